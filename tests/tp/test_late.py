"""Ops whose peers have sent their start signals and whose data are late.

Each op waits for what it reads, and overwrites nothing that a late peer still reads. If all ranks are in step, a
missing wait is seen only by chance.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_late as bodies  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402


@pytest.mark.parametrize("rows", [40, 128])  # tiles that straddle ranks, or whole ones
@pytest.mark.parametrize("op", ["ag_gemm push", "ag_gemm copy", "all_gather", "consume"])
def test_rows_that_arrive_late_are_waited_for(op: str, rows: int) -> None:
    run_workers(3, bodies.check_late_gather, op, rows)


def test_partial_sums_that_arrive_late_are_waited_for() -> None:
    run_workers(3, bodies.check_late_reduce_scatter)


def test_what_a_late_rank_still_adds_up_is_not_overwritten() -> None:
    run_workers(3, bodies.check_late_sums)


def test_what_a_late_rank_still_compares_is_not_overwritten() -> None:
    run_workers(3, bodies.check_late_largest)
