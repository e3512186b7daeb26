"""Beside libraries that nobody has tried: launches, memory order and rendezvous are seen to work, or all is native."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ditron_train.runtime.versions import PAIRS
from tests.support.processes import run_workers

sys.path.insert(0, str(Path(__file__).parent))
from bodies_self_check import gate_beside, gate_of_one_process  # noqa: E402

NEWER = "3.99.0"


def test_what_works_beside_a_newer_library_is_fused() -> None:
    logged = run_workers(2, gate_beside, NEWER, "none", ())
    assert [answers for answers, _ in logged] == [[(True, None)] * 2] * 2
    assert [sum("self-check" in line for line in lines) for _, lines in logged] == [1, 0]


@pytest.mark.parametrize(
    ("fault", "broken", "words"),
    [
        ("wrong results", (1,), "launching a kernel (rank 1: a kernel for interpreter launched through Triton gives"),
        ("raises", (0, 1), "launching a kernel (rank 0: TypeError: function takes exactly 16 arguments (23 given);"),
        ("no rendezvous", (0, 1), "AttributeError: module 'symmetric memory' has no attribute 'rendezvous'"),
        ("no rendezvous", (1,), "waited 0 s for rank 1, chunk -1"),
        ("no channel", (0,), "waited 0 s for rank 0, chunk -1"),
        ("the store fails once", (1,), "rank 1: RuntimeError: Connection reset by peer"),
        ("cannot be freed", (1,), "handing values over (rank 1: OSError: the memory is in use)"),
        ("reads early", (1,), "handing values over (rank 1: what ranks [0] released was not what was acquired)"),
        ("no signal", (0, 1), "handing values over (rank 0: what ranks [0, 1] released"),
        ("no signal", (0,), "rank 1: PeerTimeoutError: self-check on group"),
    ],
)
def test_what_fails_on_any_rank_is_native_on_every_rank(fault: str, broken: tuple[int, ...], words: str) -> None:
    (first, lines), (second, silent) = run_workers(2, gate_beside, NEWER, fault, broken)
    assert first == second and not any(fused for fused, _ in first)
    assert all(reason == first[0][1] and words in reason and f"triton {NEWER}" in reason for _, reason in first)
    assert [line for line in lines if "native" in line or "Megatron" in line] == [
        f"everything natively: {first[0][1]}"
    ]
    assert not any("self-check" in line for line in silent)  # a rank whose wait ended says where its last calls are


def test_beside_libraries_that_were_tried_nothing_is_checked() -> None:
    logged = run_workers(2, gate_beside, f"{PAIRS[-1][1]}.0", "checks", (0, 1))
    assert [answers for answers, _ in logged] == [[(True, None)] * 2] * 2
    with pytest.raises(AssertionError, match=f"checked beside .'triton {NEWER}'"):
        run_workers(2, gate_beside, NEWER, "checks", (0, 1))


def test_without_a_group_the_job_s_verdict_counts() -> None:
    (good,), (bad,) = (run_workers(1, gate_of_one_process, fault) for fault in ("none", "wrong results"))
    assert good == [None] * 3
    assert all("torch 2.99.0" in reason for reason in bad)
