"""Applies seeded faults to a copy of the working tree, one at a time, and runs the tests that should catch them.

A fault is caught if a test fails. One that makes the tests hang until this program stops them is not: every wait of
the package has a deadline, and a test has to report it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.mutations import MUTATIONS, ROOT, Mutation

TABLE = Path("docs/measurements/mutations.md")
_TESTS_FAILED = 1  # pytest's exit status; of anything but a failed test it is another
_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DITRON_TIMEOUT_S": "30",  # a signal that never comes is reported after so many seconds, not 100
}
_ROW = re.compile(r"\| (?P<name>[\w-]+) \| (?P<rest>`.*) \|")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Attributes:
        caught_by: The test that failed, None if none did.
        trouble: Why no test failed, in words.
        seconds: That the tests took.
    """

    caught_by: str | None
    trouble: str
    seconds: float


class Copy:
    """A copy of the files that git tracks, or would, in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """The copy with a fault, as long as the ``with`` block lasts."""
        path = self.folder / mutation.file
        source = path.read_text(encoding="utf-8")
        self._write(path, mutation.applied_to(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, encoding="utf-8")
        # Python compares whole seconds and sizes, which may be those of the file before.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def run(self, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Pytest's exit status and output; None if it had to be stopped after ``limit_s``."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-x", "--tb=short", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            return _status_and_output(process, limit_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _status_and_output(process: subprocess.Popen[str], limit_s: float) -> tuple[int | None, str]:
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest ends the workers that it has started
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        output = ""
    return None, output


def try_mutation(copy: Copy, mutation: Mutation, limit_s: float) -> Outcome:
    """Whether the tests of a fault catch it."""
    begun_s = time.monotonic()
    try:
        with copy.mutated(mutation):
            status, output = copy.run(mutation.tests, limit_s)
    except ValueError as error:
        return Outcome(None, str(error), 0.0)
    seconds = time.monotonic() - begun_s
    failed = re.search(r"^FAILED (\S+?)(?:\[| - |$)", output, re.MULTILINE)
    if status == _TESTS_FAILED and failed is not None:
        return Outcome(failed[1], "", seconds)
    if status is None:
        return Outcome(None, f"hangs: stopped after {limit_s:.0f} s", seconds)
    tail = "\n".join(output.splitlines()[-15:])
    return Outcome(None, "survives" if status == 0 else f"pytest ends with {status}:\n{tail}", seconds)


def passes_unmutated(copy: Copy, mutations: Sequence[Mutation], limit_s: float) -> bool:
    """Whether all tests that the faults name pass without a fault."""
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    begun_s = time.monotonic()
    status, output = copy.run(tests, limit_s * len(tests))
    print(f"without a fault: pytest ends with {status} after {time.monotonic() - begun_s:.0f} s", flush=True)
    if status != 0:
        print("\n".join(output.splitlines()[-30:]))
    return status == 0


def try_all(mutations: Sequence[Mutation], jobs: int, limit_s: float, checks_tests: bool) -> dict[str, Outcome] | None:
    """Outcomes by name; None if the tests fail without a fault."""
    with tempfile.TemporaryDirectory(prefix="mutations_") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for job in range(jobs):
            copies.put(Copy(Path(folder) / str(job)))
        if checks_tests:
            copy = copies.get()
            if not passes_unmutated(copy, mutations, limit_s):
                return None
            copies.put(copy)

        def try_one(mutation: Mutation) -> Outcome:
            copy = copies.get()
            try:
                outcome = try_mutation(copy, mutation, limit_s)
            finally:
                copies.put(copy)
            words = f"caught by {outcome.caught_by}" if outcome.caught_by else outcome.trouble
            print(f"{mutation.name}: {words} ({outcome.seconds:.0f} s)", flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            return dict(zip([mutation.name for mutation in mutations], pool.map(try_one, mutations)))


def table_rows(text: str) -> dict[str, str]:
    """The rows of the table in ``text``, by the name of the fault."""
    return {match["name"]: match[0] for line in text.splitlines() if (match := _ROW.fullmatch(line))}


def row_of(mutation: Mutation, outcome: Outcome) -> str:
    """One line of the table."""
    path, _, test = (outcome.caught_by or "").partition("::")
    caught = f"`{path}`: {test}" if test else "**not caught**"
    return f"| {mutation.name} | `{mutation.file}` | {mutation.kind} | {caught} | {outcome.seconds:.0f} |"


def table_of(rows: dict[str, str]) -> str:
    """The page with the rows of all faults that have one."""
    listed = [rows[mutation.name] for mutation in MUTATIONS if mutation.name in rows]
    heading = "| fault | file | kind | caught by | seconds |\n| --- | --- | --- | --- | --- |"
    return (
        f"""# Seeded faults and the tests that catch them

`python -m tests.mutations` makes one small change of the package at a time, in a copy of the working tree, and runs
the tests that are expected to notice ([contributing](../../CONTRIBUTING.md#mutations)). {len(listed)} faults; the
changes themselves are listed in `tests/mutations/mutations.py`. A fault that makes a rank wait for ever counts as
caught only if a test reports the deadline. Seconds include the start of pytest, on 2 shared CPU cores.

<!-- begin mutations -->
{heading}
"""
        + "\n".join(listed)
        + "\n<!-- end mutations -->\n"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="only this fault; may be given several times")
    parser.add_argument("--list", action="store_true", help="list the faults and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults are tried concurrently")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of the tests of one fault")
    parser.add_argument("--skip-baseline", action="store_true", help="do not run the tests without a fault first")
    options = parser.parse_args(arguments)
    unknown = set(options.only or ()) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the faults, writes the table, and returns 1 if one was not caught or cannot be applied any more."""
    options = parse(arguments)
    chosen = [mutation for mutation in MUTATIONS if options.only is None or mutation.name in options.only]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.kind}, {mutation.file}; {' '.join(mutation.tests)}")
        return 0
    begun_s = time.monotonic()
    outcomes = try_all(chosen, options.jobs, options.limit, not options.skip_baseline)
    if outcomes is None:
        return 1
    page = ROOT / TABLE
    rows = table_rows(page.read_text(encoding="utf-8")) if page.exists() else {}
    rows.update({mutation.name: row_of(mutation, outcomes[mutation.name]) for mutation in chosen})
    page.write_text(table_of(rows), encoding="utf-8")
    survivors = [name for name, outcome in outcomes.items() if outcome.caught_by is None]
    words = f"not caught: {', '.join(survivors)}" if survivors else "all caught"
    print(f"{len(chosen)} faults in {time.monotonic() - begun_s:.0f} s, {words}")
    return 1 if survivors else 0
