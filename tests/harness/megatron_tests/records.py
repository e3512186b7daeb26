"""What the ranks of a run write down, test by test, and what it says together: a process that dies leaves its
notes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped", "crashed", "hung"]
_NO_MEMORY = "out of memory"  # in what a failure says
_WORST: tuple[Outcome, ...] = ("crashed", "hung", "failed", "passed", "skipped")


class Notes:
    """The file of one rank, to which lines are added.

    Args:
        folder: Of the suite in one mode.
        rank: Of this process.
        launch: Which of the suite's launches this is, from 0.
    """

    def __init__(self, folder: Path, rank: int, launch: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{launch}.{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Adds a line, at once."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


@dataclass
class Suite:
    """What is known of a suite in one mode.

    Attributes:
        collected: The tests that launches meant to run, in order.
        outcomes: Of the tests that ended, or ended a launch; over all ranks the worst.
        ran: How often the fused path ran in a test, by feature, on the first rank.
        native: What was native in a test and why, in the log's words, on the first rank.
        why: What a failure said, on the first rank that said something.
        launches: How many there were.
        latest: Tests that have an outcome by the last launch.
        unsteady: Tests that passed in one launch and failed in a later one, by themselves.
        runs: How many launches gave a test an outcome.
        uncollected: Files that could not be imported, and why.
    """

    collected: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    ran: dict[str, dict[str, int]] = field(default_factory=dict)
    native: dict[str, list[str]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    launches: int = 0
    again: set[str] = field(default_factory=set)
    unsteady: set[str] = field(default_factory=set)
    uncollected: dict[str, str] = field(default_factory=dict)
    latest: set[str] = field(default_factory=set)
    runs: dict[str, int] = field(default_factory=dict)

    def with_outcome(self, *outcomes: Outcome) -> list[str]:
        """The tests of these outcomes, in order."""
        return [test for test in self.collected if self.outcomes.get(test) in outcomes]

    @property
    def open(self) -> list[str]:
        """The tests that have no outcome yet."""
        return [test for test in self.collected if test not in self.outcomes]


def read_suite(folder: Path) -> Suite:
    """Reads what the launches of a suite have left; a later launch of a test counts, not an earlier one."""
    suite = Suite()
    known: set[str] = set()
    for launch in sorted({int(path.name.split(".")[0]) for path in folder.glob("*.*.jsonl")}):
        ranks = [list(_lines(path)) for path in sorted(folder.glob(f"{launch}.*.jsonl"), key=_rank)]
        collected: list[str] = next(
            (line["collected"] for lines in ranks for line in lines if "collected" in line), []
        )
        suite.latest = set()
        lines_of_all = (line for lines in ranks for line in lines)
        suite.uncollected.update((line["uncollected"], line["why"]) for line in lines_of_all if "uncollected" in line)
        files = {test.split("::")[0] for test in collected}  # which another launch could import
        suite.uncollected = {file: why for file, why in suite.uncollected.items() if file not in files}
        suite.collected += [test for test in collected if test not in known]
        known.update(collected)
        _add_launch(suite, collected, ranks, was_stopped=stop_mark(folder, launch).exists())
        suite.launches = launch + 1
    return suite


def stop_mark(folder: Path, launch: int) -> Path:
    """The file that says that a launch was stopped from outside: what was running then is not to blame."""
    return folder / f"{launch}.stopped"


def _rank(path: Path) -> int:
    return int(path.name.split(".")[1])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:  # the process died while it wrote
            return


def _add_launch(
    suite: Suite, collected: Sequence[str], ranks: Sequence[Iterable[dict[str, Any]]], *, was_stopped: bool
) -> None:
    begun: set[str] = set()
    full: set[str] = set()  # of tests that found no memory
    ended: dict[str, list[Outcome]] = {}
    for lines in ranks:
        for line in lines:
            test = line.get("test")
            if test is not None and "outcome" in line:
                ended.setdefault(test, []).append(line["outcome"])
                suite.ran.setdefault(test, line.get("ran", {}))
                suite.native.setdefault(test, line.get("native", []))
                if line.get("why"):
                    suite.why.setdefault(test, line["why"])
                if _NO_MEMORY in line.get("why", "").lower():
                    full.add(test)
            elif test is not None:
                begun.add(test)
    for test in collected:
        outcomes = ended.get(test, [])
        is_cut = len(outcomes) < len(ranks) and test in begun
        if is_cut and was_stopped and "hung" not in outcomes:
            return
        if is_cut or "hung" in outcomes:  # what other ranks began behind it is to be run again
            _set_outcome(suite, test, "hung" if "hung" in outcomes else "crashed")
            return
        if outcomes:
            _set_outcome(suite, test, min(outcomes, key=_WORST.index), has_memory=test not in full)


def _set_outcome(suite: Suite, test: str, outcome: Outcome, *, has_memory: bool = True) -> None:
    before = suite.outcomes.get(test, outcome)
    suite.latest.add(test)
    suite.runs[test] = suite.runs.get(test, 0) + 1
    if before == "passed" and (outcome not in ("passed", "failed") or not has_memory):
        return  # who shares GPUs with others may be too slow, or find them full: it says nothing of the test
    if outcome == "passed" and before != outcome:
        suite.again.add(test)
    if before == "passed" and outcome != before:
        suite.unsteady.add(test)
    suite.outcomes[test] = outcome
