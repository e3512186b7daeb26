"""Launches a suite of Megatron-LM's tests, again and again until every test has an outcome or the time is over."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_tests.plugin import JOB, Job
from megatron_tests.records import Suite, read_suite, stop_mark
from megatron_tests.suites import SUITES, Part

#: The mode in which nothing is switched on; the others are policies.
NATIVE = "native"
#: Of a communicator of NCCL: tests make hundreds, which keep their buffers.
NUM_CHANNELS = "4"
_PLUGIN = "megatron_tests.plugin"
#: Files whose tests write and delete one folder below /tmp.
_SHARED_FOLDERS = ("test_mfsdp_fully_shard.py",)
_LEAST_SECONDS = 20.0  # in which a launch gets nowhere
_END_SECONDS = 45.0  # torchrun kills what has not ended 30 s after it was told to
_HARNESS = Path(__file__).resolve().parents[1]
_ROOT = _HARNESS.parents[1]
_logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Launcher:
    """How launches are made.

    Attributes:
        checkout: Of Megatron-LM.
        records: Folder of all notes; of a suite in a mode, ``<records>/<mode>/<suite>``.
        num_ranks: Processes of a launch.
        features: What is switched on in all modes but the native one.
        test_seconds: After which a test counts as hung.
        deadline: By ``time.monotonic``, after which nothing runs.
        most_launches: Of a suite in a mode, in one call.
    """

    checkout: Path
    records: Path
    num_ranks: int
    features: str
    test_seconds: float
    deadline: float
    most_launches: int = 8

    def run(self, mode: str, suite: str, paths: Sequence[str], only: Sequence[str] | None = None) -> Suite:
        """Runs what has no outcome yet; with ``only`` those tests alone, and once more what fails among them."""
        folder = self.records / mode / suite
        known = read_suite(folder)
        for _ in range(self.most_launches):
            is_done = bool(known.launches) and not (known.open if only is None else set(only) - set(known.outcomes))
            if is_done or not self._has_time():
                break
            before = dict(known.outcomes)
            known = self._launch(mode, folder, known.launches, paths, tuple(before), only)
            if known.outcomes == before:  # nothing could be collected, or run
                break
        return known if only is None else self._run_again(mode, folder, paths, known)

    def _run_again(self, mode: str, folder: Path, paths: Sequence[str], known: Suite) -> Suite:
        """What failed beside other tests, without them: one that breaks a process breaks what follows in it."""
        left = set(known.with_outcome("failed", "crashed", "hung"))
        mark = folder / "again"
        if known.open or mark.exists():
            return known
        while left and self._has_time():
            mark.touch()
            known = self._launch(mode, folder, known.launches, paths, (), sorted(left))
            if not left & known.latest:
                break
            left -= known.latest
        return known

    def repeat_natively(
        self, suite: str, paths: Sequence[str], tests: Sequence[str], *, at_once: int, times: int = 12
    ) -> Suite:
        """Runs ``tests``, which pass natively and not with the fused path, natively again while they pass: what fails
        once without the fused path is not lost by them. ``at_once`` launches share the GPUs, as launches did when the
        tests failed: a test was seen that fails natively in one run of three beside others, and passed alone each
        time. Not for tests that work in one folder whichever launch they belong to: of several at once none is what it
        is alone."""
        folder = self.records / NATIVE / suite
        known, mark = read_suite(folder), folder / "repeated"
        done = set(mark.read_text(encoding="utf-8").splitlines()) if mark.exists() else set()
        asked = [test for test in tests if test not in done]
        if not asked:
            return known
        shared = [test for test in asked if test.split("::")[0].endswith(_SHARED_FOLDERS)]
        for some, copies in ((shared, 1), ([test for test in asked if test not in shared], at_once)):
            for _ in range(0, times, copies):
                left = [test for test in some if test not in known.unsteady and known.outcomes.get(test) == "passed"]
                if not left:
                    break
                if not self._has_time():
                    return known
                before, first = dict(known.runs), known.launches
                with ThreadPoolExecutor(copies) as launches:
                    numbers = range(first, first + copies)
                    found = [
                        launches.submit(self._launch, NATIVE, folder, number, paths, (), left) for number in numbers
                    ]
                for launch in found:
                    launch.result()
                known = read_suite(folder)
                if any(known.runs.get(test, 0) < before.get(test, 0) + copies for test in left):
                    return known  # cut off, or a launch died: not all were run
        mark.write_text("\n".join([*done, *asked]) + "\n", encoding="utf-8")
        return known

    def _has_time(self) -> bool:
        return time.monotonic() < self.deadline - _LEAST_SECONDS

    def _launch(
        self,
        mode: str,
        folder: Path,
        number: int,
        paths: Sequence[str],
        skip: Sequence[str],
        only: Sequence[str] | None,
    ) -> Suite:
        folder.mkdir(parents=True, exist_ok=True)
        features = "" if mode == NATIVE else self.features
        chosen = None if only is None else tuple(only)
        part = SUITES.get(folder.name, Part(()))
        place = (part.index, part.count)
        job = Job(str(folder.resolve()), number, features, tuple(skip), chosen, self.test_seconds, place)
        job_file = folder.resolve() / f"{number}.job.json"
        job_file.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        words = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.num_ranks),
            "-m", "pytest", "-p", _PLUGIN, "-p", "no:cacheprovider", "-o", "addopts=", "-q", "--tb=native",
            "--continue-on-collection-errors", *paths,
        ]  # fmt: skip
        log = folder / f"{number}.log"
        stop_mark(folder, number).unlink(missing_ok=True)  # of one with this number that left no notes
        if self._run_until_deadline(words, self._environment(mode, job_file), log):
            stop_mark(folder, number).touch()
        _logger.info("%s", f"{mode} {folder.name}: launch {number} is over, {log}")
        return read_suite(folder)

    def _environment(self, mode: str, job_file: Path) -> Mapping[str, str]:
        folders = (self.checkout.resolve(), _ROOT, _HARNESS, os.environ.get("PYTHONPATH", ""))
        path = os.pathsep.join(map(str, folders))
        defaults = {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "DITRON_TIMEOUT_S": "60",
            "NCCL_ALGO": "Ring",
            "NCCL_MAX_NCHANNELS": NUM_CHANNELS,
            "NVIDIA_PYTORCH_VERSION": "26.01",  # without it tests of newer releases skip themselves
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "PYTHONWARNINGS": "ignore",
        }
        # Megatron's tests of checkpoints share one folder below this one, whichever test they are.
        temporary = job_file.parent / "tmp" / job_file.name.split(".")[0]
        temporary.mkdir(parents=True, exist_ok=True)
        chosen = {"PYTHONPATH": path, JOB: str(job_file), "PYTEST_DEBUG_TEMPROOT": str(temporary)}
        if mode != NATIVE:
            chosen["DITRON_POLICY"] = mode
        return {**defaults, **os.environ, **chosen}

    def _run_until_deadline(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> bool:
        """Runs a command in the checkout; whether the deadline ended it."""
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                words, cwd=self.checkout, env=environment, stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                process.wait(max(0.0, self.deadline - time.monotonic()))
                return False
            except subprocess.TimeoutExpired:
                return True
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launch that is still there: torchrun ends its workers."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
