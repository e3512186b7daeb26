"""The table of Megatron-LM's tests: what passes natively, what of it passes with the fused path, and what is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ditron_train.runtime.files import replace_file
from ditron_train.tools.results import MEGATRON_TESTS, Stamp, result_path
from megatron_tests.records import Suite


@dataclass(frozen=True)
class Row:
    """One policy.

    Attributes:
        policy: ``DITRON_POLICY``.
        world_size: Ranks.
        native_passed: Tests that pass natively, each time.
        ours_passed: Of these, with every feature on.
        ours_ran: Of those that pass natively, in how many the fused path ran.
        calls: How often it ran in them, by feature.
        passed_again: Of those that pass, the tests that failed beside others and passed in a launch of their own.
        native_because: Of those in which the fused path did not run, how many had this reason, by folder.
        not_run: Tests that pass natively and were not reached with the fused path.
        lost: Names of those that pass natively and not with the fused path, with what became of them.
        unsteady: Tests that failed with the fused path, passed natively, and failed natively when they were run again.
        uncollected: Files that cannot be imported natively, and why: what they need is not installed.
    """

    policy: str
    world_size: int
    native_passed: int
    ours_passed: int
    ours_ran: int
    calls: dict[str, int]
    passed_again: list[str]
    native_because: dict[str, dict[str, int]]
    not_run: int
    lost: dict[str, str]
    unsteady: list[str] = field(default_factory=list)
    uncollected: dict[str, str] = field(default_factory=dict)


#: Said of a test in which no layer of this package decided anything.
NOTHING_ASKED = "no layer that the fused ones stand in for was called in a group of several ranks"
_SHAPES = re.compile(r"(?<!\w)(?:\(?\d[\d., x()]*\d\)?|\d)(?!\w)")


def row_of(policy: str, world_size: int, suites: Mapping[str, tuple[Suite, Suite]]) -> Row:
    """The row of a policy from each suite's native outcomes and those with the fused path, by the suite's name."""
    ours_passed, ran = 0, 0
    calls: dict[str, int] = {}
    again: list[str] = []
    lost: dict[str, str] = {}
    because: dict[str, dict[str, int]] = {}
    unsteady: list[str] = []
    counted: set[str] = set()  # older records may hold a test in another suite
    left: set[str] = set()
    differ = {test for native, _ in suites.values() for test in native.unsteady}
    for name, (native, fused) in suites.items():
        unsteady += [test for test in native.unsteady if fused.outcomes.get(test, "passed") != "passed"]
        for test in native.with_outcome("passed"):
            if test in counted or test in differ:
                continue
            outcome = fused.outcomes.get(test)
            if outcome is None:
                left.add(test)
                continue
            counted.add(test)
            ours_passed += outcome == "passed"
            if outcome != "passed":
                lost[test] = outcome
            elif test in fused.again:
                again.append(test)
            counts = fused.ran.get(test, {})
            ran += any(counts.values())
            if not any(counts.values()):
                in_suite = because.setdefault(name, {})
                for reason in _reasons(fused.native.get(test, [])):
                    in_suite[reason] = in_suite.get(reason, 0) + 1
            for feature, count in counts.items():
                calls[feature] = calls.get(feature, 0) + count
    because = {name: dict(sorted(found.items(), key=lambda pair: -pair[1])) for name, found in because.items()}
    return Row(
        policy,
        world_size,
        len(counted | left),
        ours_passed,
        ran,
        dict(sorted(calls.items())),
        again,
        because,
        len(left - counted),
        lost,
        unsteady,
        {file: why for native, _ in suites.values() for file, why in native.uncollected.items()},
    )


def _reasons(lines: Iterable[str]) -> set[str]:
    """The log's lines without their numbers."""
    return {_SHAPES.sub("N", line) for line in lines} or {NOTHING_ASKED}


def write_table(folder: Path, stamp: Stamp, rows: Iterable[Row]) -> Path:
    """Writes ``<folder>/<device>x<count>/megatron_tests.json`` and returns its path."""
    path = result_path(folder, stamp, MEGATRON_TESTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    values: Mapping[str, object] = {"stamp": asdict(stamp), "rows": [asdict(row) for row in rows]}
    replace_file(path, json.dumps(values, indent=1) + "\n")
    return path
