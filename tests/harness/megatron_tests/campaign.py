"""Runs Megatron-LM's own unit tests natively and with every feature on, under several policies, and writes the table
of what passes natively and not with the fused path. The environment variable MEGATRON_LM names a checkout of
Megatron-LM (tag core_v0.16.1); nothing is fetched. What was run before is kept: a run that is stopped by --seconds is
continued by the next one with the same --records."""

from __future__ import annotations

import argparse
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.nothing_compared import require_compared
from ditron_train.tools.results import RESULTS
from ditron_train.tools.stamp import collect_stamp
from megatron_tests.launches import NATIVE, NUM_CHANNELS, Launcher
from megatron_tests.records import Suite, read_suite
from megatron_tests.suites import FOLDERS, SUITES, paths_of, suites_of
from megatron_tests.table import Row, row_of, write_table

_POLICIES = ("strict", "bits", "force")
_AT_ONCE = 6  # native launches of what is lost, at most
_logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the script."""
    parser.add_argument(
        "--folder",
        action="append",
        choices=sorted({*SUITES, *FOLDERS, "moe", "dist_checkpointing"}),
        help="only this part of the tests; may be given again",
    )
    parser.add_argument("--policy", action="append", choices=_POLICIES, help="only this policy; may be given again")
    parser.add_argument("--ranks", type=int, help="processes (default: GPUs, at most 8; 2 without any)")
    parser.add_argument("--jobs", type=int, default=1, help="launches beside each other")
    parser.add_argument("--features", default="tp,sp,ep,pp,muon", help="what to switch on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="nothing runs longer than this")
    parser.add_argument("--test-seconds", type=float, default=120.0, help="after which a test counts as hung")
    parser.add_argument(
        "--records", type=Path, default=Path("build") / "megatron_tests", help="what was run, test by test, and logs"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the table")


def run(arguments: argparse.Namespace) -> int:
    """Runs what has no outcome yet, writes and shows the table; 1 where a test is lost or was not reached.

    Raises:
        SettingError: No checkout, or one of which no test passes natively, so that nothing was compared.
        NothingComparedError: Under some policy no fused call ran in any test.
    """
    checkout = _checkout()
    has_gpus = torch.cuda.is_available()
    num_ranks = arguments.ranks or (min(8, torch.cuda.device_count()) if has_gpus else 2)
    if not has_gpus:
        os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    launcher = Launcher(
        checkout, arguments.records, num_ranks, arguments.features, arguments.test_seconds,
        time.monotonic() + arguments.seconds,
    )  # fmt: skip
    policies = arguments.policy or _POLICIES
    _launch_all(launcher, checkout, _suites(arguments.folder), policies, arguments.jobs)
    rows = [row_of(policy, num_ranks, _pairs(arguments.records, policy)) for policy in policies]
    if not rows[0].native_passed:
        raise SettingError(
            f"no test passes natively, so nothing is compared; logs are in {arguments.records / NATIVE}"
        )
    device = torch.device("cuda" if has_gpus else "cpu")
    settings = {"features": arguments.features, "megatron_lm": _version(checkout), "NCCL_MAX_NCHANNELS": NUM_CHANNELS}
    num_devices = min(num_ranks, torch.cuda.device_count()) if has_gpus else num_ranks  # simulated ranks share GPUs
    path = write_table(arguments.output, collect_stamp(device, num_devices, **settings), rows)
    _show(rows, path)
    if any(row.lost or row.not_run for row in rows):
        return 1
    require_compared({row.policy: row.ours_ran for row in rows}, "no fused call ran in any test under this policy")
    return 0


def _launch_all(
    launcher: Launcher, checkout: Path, suites: Sequence[str], policies: Sequence[str], num_jobs: int
) -> None:
    """Each suite natively, then what passed there under each policy; ``num_jobs`` suites and modes at a time."""
    with ThreadPoolExecutor(num_jobs) as natively, ThreadPoolExecutor(num_jobs) as with_fused:
        free = threading.Semaphore(num_jobs)

        def launch(mode: str, name: str, only: Sequence[str] | None = None) -> Suite:
            with free:
                return launcher.run(mode, name, paths_of(checkout, name), only)

        def launch_suite(name: str) -> None:
            passed = launch(NATIVE, name).with_outcome("passed")
            if passed:
                launched.extend(with_fused.submit(launch, policy, name, passed) for policy in policies)

        launched: list[Future[Any]] = []
        for future in [natively.submit(launch_suite, name) for name in suites]:
            future.result()
        for future in launched:
            future.result()
    for name in suites:
        pairs = [_pairs(launcher.records, policy)[name] for policy in policies]
        lost = {test for pair in pairs for test in row_of("", launcher.num_ranks, {name: pair}).lost}
        launcher.repeat_natively(name, paths_of(checkout, name), sorted(lost), at_once=min(num_jobs, _AT_ONCE))


def _suites(folders: Sequence[str] | None) -> list[str]:
    return list(SUITES) if folders is None else [suite for folder in folders for suite in suites_of(folder)]


def _checkout() -> Path:
    name = os.environ.get("MEGATRON_LM")
    if not name:
        raise SettingError("MEGATRON_LM names no checkout of Megatron-LM (tag core_v0.16.1)")
    checkout = Path(name).resolve()
    if not (checkout / "tests" / "unit_tests").is_dir():
        raise SettingError(f"MEGATRON_LM is {name}, which has no folder tests/unit_tests")
    return checkout


def _version(checkout: Path) -> str:
    text = (checkout / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    parts = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) if part else "?" for part in parts)


def _pairs(records: Path, policy: str) -> dict[str, tuple[Suite, Suite]]:
    """Of every part that was ever run: native outcomes and those with the fused path."""
    return {name: (read_suite(records / NATIVE / name), read_suite(records / policy / name)) for name in SUITES}


def _show(rows: Sequence[Row], path: Path) -> None:
    for row in rows:
        words = f"{row.policy}: {row.native_passed} pass natively, {row.ours_passed} of them fused, which ran in "
        words += f"{row.ours_ran}; {len(row.lost)} lost, {row.not_run} not run"
        _logger.info("%s", words)
        for test, outcome in row.lost.items():
            _logger.info("%s", f"  {outcome}: {test}")
        for test in row.unsteady:
            _logger.info("%s", f"  failed with the fused path, and natively when run again: {test}")
    for file, why in rows[0].uncollected.items():
        _logger.info("%s", f"cannot be imported: {file}: {why}")
    _logger.info("%s", f"written: {path}")
