"""Many faults, one after the other or a few at once: draws them, forks a process for each, sums up."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ditron_train.runtime.errors import NotSupportedError, SettingError, VersionError
from ditron_train.runtime.files import parse_json, read_regular, replace_file
from ditron_train.runtime.versions import check_versions
from ditron_train.tools.stamp import collect_stamp
from ditron_train.tools.tables import terminal
from tests.faults.fault import KINDS, Fault, draw
from tests.faults.jobs import MODULES, PATIENCE, jobs_here
from tests.faults.judge import NEVER_CAME
from tests.faults.one_job import run_one
from tests.support import quick_interpreter
from tests.support.gloo_device import share_gloo_device

_TIMEOUT_S = 2.0
_SHARING = 2.0  # deadlines of ranks that take turns on a GPU
_POLL_S = 0.02
_ATTEMPTS = 8
_MOST_AT_ONCE = 64
_ON_GPU = tuple(kind for kind in KINDS if kind not in ("no memory", "full disk", "read-only disk"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first fault (0)")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no fault after S seconds")
    parser.add_argument("--count", type=int, default=40, metavar="N", help="faults, of seeds from --seed on (40)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="one JSON file of faults; what it holds stays")
    parser.add_argument("--at-once", type=int, metavar="N", help="jobs side by side (default: 4, on GPUs 1)")
    parser.add_argument("--jobs", metavar="NAME,NAME", help=f"of {', '.join(MODULES)} (default: all that run here)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there are GPUs")


def run(arguments: argparse.Namespace) -> int:
    """Runs the campaign; returns 0 where every fault ended as it should have.

    Raises:
        SettingError: A count, a name or a file that cannot be.
        NotSupportedError: No GPUs where they are asked for, or a CPU without Triton's interpreter.
    """
    # Ranks are forked from here: counting GPUs by CUDA itself would keep CUDA from all of them.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    device_type = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    jobs = _check(arguments, device_type)
    earlier = read_rows(arguments.results) if arguments.results is not None and arguments.results.exists() else []
    _import_all(device_type, jobs)
    campaign = _Campaign(arguments, device_type, jobs, earlier)
    try:
        campaign.run()
    except KeyboardInterrupt:
        campaign.end()
        campaign.finish()  # what is known so far
        raise
    finally:
        campaign.end()
    return campaign.finish()


def _check(arguments: argparse.Namespace, device_type: str) -> dict[str, tuple[int, ...]]:
    """The jobs to draw from; raises for whatever cannot be."""
    if arguments.count < 1:
        raise SettingError("--count has to be above 0")
    if arguments.at_once is not None and not 0 < arguments.at_once <= _MOST_AT_ONCE:
        raise SettingError(f"--at-once has to be from 1 to {_MOST_AT_ONCE}")
    if not hasattr(os, "fork") or not os.path.isdir("/proc/self"):
        raise NotSupportedError("the campaign needs Linux")
    num_ranks = 3
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise NotSupportedError("--device cuda: no GPU here")
        num_ranks = min(max(torch.cuda.device_count(), 2), 3)  # two share a single GPU
    else:
        from ditron_train.runtime.device import is_interpreter

        if not is_interpreter():
            raise NotSupportedError("no GPU here: TRITON_INTERPRET=1 runs kernels in Triton's interpreter")
    try:
        check_versions()
        jobs = jobs_here(num_ranks, device_type)
    except VersionError:
        jobs = {name: sizes for name, sizes in jobs_here(num_ranks, device_type).items() if name != "quickstart"}
    wanted = [name.strip() for name in (arguments.jobs or "").split(",") if name.strip()]
    unknown = sorted(set(wanted) - set(jobs))
    if unknown:
        raise SettingError(f"--jobs knows {', '.join(jobs)} here, not {', '.join(unknown)}")
    return {name: sizes for name, sizes in jobs.items() if not wanted or name in wanted}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The faults that a file of results holds.

    Raises:
        SettingError: It cannot be read, or is something else.
    """
    try:
        rows = parse_json(read_regular(path))["faults"]
        if all(isinstance(row["seed"], int) and isinstance(row["ended"], str) for row in rows):
            return list(rows)
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise SettingError(f"{path} holds no results of faults")


def _import_all(device_type: str, jobs: Mapping[str, Sequence[int]]) -> None:
    """What every rank needs, once; no thread is started and no device touched."""
    if device_type == "cpu":
        from ditron_train.cpu import megatron_shim

        quick_interpreter.install()
        torch.compile = megatron_shim.leave_uncompiled  # type: ignore[assignment]
        share_gloo_device()
    for name in jobs:
        for module in MODULES[name]:
            importlib.import_module(module)
    if device_type == "cpu":
        quick_interpreter.rewrite_kernels()  # once, not in every rank of every fault
    gc.collect()
    gc.freeze()


@dataclass
class _Running:
    fault: Fault
    pid: int
    folder: Path
    answer: Path
    attempt: int


class _Campaign:
    """The faults of one command."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        device_type: str,
        jobs: Mapping[str, tuple[int, ...]],
        earlier: list[dict[str, Any]],
    ) -> None:
        self._arguments, self._device_type, self._jobs = arguments, device_type, jobs
        shares_gpus = device_type == "cuda" and torch.cuda.device_count() == 1
        self._timeout_s = _TIMEOUT_S * (_SHARING if shares_gpus else 1.0)
        self._at_once = arguments.at_once or (1 if device_type == "cuda" else 4)
        self._folder = Path(tempfile.mkdtemp(prefix="ditron_faults_"))
        self._running: list[_Running] = []
        self._calls: dict[tuple[str, int], int] = {}
        self._rows: dict[int, dict[str, Any]] = {row["seed"]: row for row in earlier}
        self._new: list[dict[str, Any]] = []
        self._stamp: dict[str, Any] | None = None  # CUDA may be asked only when nothing is forked any more
        self._begun_s = time.monotonic()

    def run(self) -> None:
        """All faults, or those that begin in time."""
        arguments = self._arguments
        kinds = _ON_GPU if self._device_type == "cuda" else tuple(KINDS)
        seeds = range(arguments.seed, arguments.seed + arguments.count)
        patience = PATIENCE if self._device_type == "cpu" else {}
        faults = [draw(seed, self._jobs, self._timeout_s, patience, kinds) for seed in seeds]
        places = dict.fromkeys((fault.job, fault.world_size) for fault in faults)
        plain = [Fault(-1, job, "start", "none", world, 0, 0.0, 20.0) for job, world in places]
        self._run_all(plain)  # counts the calls of each job, and shows that it ends well by itself
        if not self._new:
            self._run_all(faults)

    def _run_all(self, faults: Sequence[Fault]) -> None:
        waiting = list(faults)
        while waiting or self._running:
            limit_s = self._arguments.seconds
            if limit_s is not None and time.monotonic() - self._begun_s > limit_s:
                waiting = []
            while waiting and len(self._running) < self._at_once:
                self._start(waiting.pop(0), 1)
            self._collect()
            time.sleep(_POLL_S)

    def _start(self, fault: Fault, attempt: int) -> None:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        answer = folder.with_suffix(".json")
        calls = self._calls.get((fault.job, fault.world_size), 0)
        pid = os.fork()
        if pid == 0:
            _answer(fault, calls, folder, answer, self._device_type)
        self._running.append(_Running(fault, pid, folder, answer, attempt))

    def _collect(self) -> None:
        for one in list(self._running):
            pid, _ = os.waitpid(one.pid, os.WNOHANG)
            if not pid:
                continue
            self._running.remove(one)
            try:
                row = json.loads(one.answer.read_text())
            except (OSError, ValueError):
                row = {**one.fault.to_json(), "place": "", "ended": "wrong", "wrong": ["its watcher died"]}
            shutil.rmtree(one.folder, ignore_errors=True)
            has_failed_by_itself = row["ended"] == "wrong" and (one.fault.kind == "none" or NEVER_CAME in row["wrong"])
            if has_failed_by_itself and one.attempt < _ATTEMPTS:  # on a busy machine: nothing was shown
                self._start(one.fault, one.attempt + 1)
            else:
                self._take(one.fault, row)

    def _take(self, fault: Fault, row: dict[str, Any]) -> None:
        calls = row.pop("calls", 0)
        if fault.kind == "none" and row["ended"] == "survived":
            self._calls[fault.job, fault.world_size] = calls
            return
        self._new.append(row)
        self._rows[fault.seed] = row
        if row["ended"] == "wrong":
            words = f"{fault.seed}: {fault.kind} of rank {fault.rank} in {fault.job} ({row['place']})"
            terminal().print(f"{words}: {'; '.join(row['wrong'])}", markup=False, highlight=False, soft_wrap=True)
        if len(self._new) % 25 == 0:
            self._write()

    def end(self) -> None:
        """Nothing of the campaign runs on."""
        while self._running:
            os.killpg(self._running.pop().pid, signal.SIGTERM)
        shutil.rmtree(self._folder, ignore_errors=True)

    def finish(self) -> int:
        """Shows and writes what was found; the exit status."""
        device = torch.device(self._device_type, 0) if self._device_type == "cuda" else torch.device("cpu")
        self._stamp = vars(collect_stamp(device, torch.cuda.device_count() or os.cpu_count() or 1))
        self._write()
        terminal().print(_table(self._new))
        wrong = sum(row["ended"] == "wrong" for row in self._new)
        seconds = time.monotonic() - self._begun_s
        terminal().print(f"{len(self._new)} faults in {seconds:.0f} s, {wrong} did not end as they should have")
        return 1 if wrong or not self._new else 0

    def _write(self) -> None:
        path = self._arguments.results
        if path is None:
            return
        rows = [self._rows[seed] for seed in sorted(self._rows)]
        content = {"stamp": self._stamp, "summary": _summary(rows), "faults": rows}
        head = json.dumps({**content, "faults": []}, indent=1)[: -len("[]\n}")]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{head}[\n{lines}\n ]\n}}\n")


def _answer(fault: Fault, calls: int, folder: Path, answer: Path, device_type: str) -> None:
    """What the process of one fault does; never returns."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        outcome = run_one(fault, calls, folder, device_type)
        content = {**outcome.to_json(), "calls": outcome.calls}
    except BaseException:
        content = {**fault.to_json(), "place": "", "ended": "wrong", "wrong": [traceback.format_exc()]}
    try:
        answer.write_text(json.dumps(content))
    finally:
        os._exit(0)


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    after = sorted(row["after_s"] for row in rows if row.get("after_s") is not None)
    return {
        "faults": len(rows),
        "ended": dict(Counter(row["ended"] for row in rows)),
        "by_kind": dict(sorted(Counter(row["kind"] for row in rows).items())),
        "by_job": dict(sorted(Counter(row["job"] for row in rows).items())),
        "places": len({row["place"] for row in rows}),
        "median_s": after[len(after) // 2] if after else None,
        "longest_s": after[-1] if after else None,
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="faults", title_justify="left")
    for name in ("job", "faults", "survivors raised", "went on, bits equal", "wrong", "median s", "longest s"):
        table.add_column(name)
    for job in dict.fromkeys(row["job"] for row in rows):
        of_job = [row for row in rows if row["job"] == job]
        ended = Counter(row["ended"] for row in of_job)
        summary = _summary(of_job)
        numbers = (len(of_job), ended["raised"], ended["survived"], ended["wrong"])
        table.add_row(job, *map(str, numbers), str(summary["median_s"]), str(summary["longest_s"]))
    return table
