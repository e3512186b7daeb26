"""Fused kernels on 2 and 4 processes in the interpreter, against their parts one after the other."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from bodies_ep import compiling_alone, expert_functions, fused_forms, fused_forms_by_one_program  # noqa: E402

from ditron_train.ep.context import EPContext, MoveConfig, usual_senders  # noqa: E402
from ditron_train.ep.plan import (  # noqa: E402
    NEVER,  # noqa: E402
    PAIRS,
    pairs_of_step,
    triton_wgrad_has_native_bits,
)
from tests.support.processes import run_workers  # noqa: E402


@pytest.mark.parametrize(
    "case",
    [
        ("random", (40, 55), 4, 2, 32, 48, torch.bfloat16, "ascending_rounded"),
        ("one_expert", (12, 0), 6, 3, 16, 24, torch.float32, "descending"),
        ("dropped", (9, 4, 0, 17), 8, 3, 24, 16, torch.float16, "ascending"),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}-{case[7]}",
)
def test_fused_forms_equal_their_parts(case):
    run_workers(len(case[1]), fused_forms, *case, 5)


def test_fused_forms_without_a_host_sync():
    run_workers(2, fused_forms, "random", (20, 20), 4, 2, 32, 48, torch.bfloat16, "ascending", 6, 1.8)


def test_fused_forms_padded_to_capacity():
    run_workers(2, fused_forms, "padded", (20, 20), 6, 2, 32, 48, torch.bfloat16, "ascending_rounded", 6, None, 10)


@pytest.mark.parametrize("min_rows", [12, 17, 1000])
def test_experts_of_min_rows_are_multiplied_before(min_rows):
    case = ("random", (40, 21), 8, 2, 32, 48, torch.bfloat16, "ascending_rounded", 7, None, None, min_rows)
    counts = run_workers(2, fused_forms, *case)
    few, experts = (sum(values) for values in zip(*counts))
    assert 0 < few < experts if min_rows < 1000 else few == experts, counts


def test_a_program_without_a_multiprocessor_leaves_its_tiles_to_others():
    """NCCL may hold some until a peer has joined its collective, which waits for these tiles."""
    run_workers(2, fused_forms_by_one_program, "random", (40, 55), 4, 2, 32, 48, torch.bfloat16, "ascending", 5)


@pytest.mark.parametrize(("num_programs", "senders"), [(132, 16), (20, 10), (2, 1)])
def test_of_few_programs_half_place_what_arrives(monkeypatch, num_programs, senders):
    """What a table says, or ``tune`` tries, is no exception; ``leave_room`` may come behind the first question."""
    simulated = SimpleNamespace(shape=SimpleNamespace(num_experts=8, topk=2), device=torch.device("cpu"), world_size=2)
    simulated.tried_senders, simulated._senders, simulated.move = None, {}, MoveConfig()
    monkeypatch.setenv("DITRON_TUNING", "off")
    assert EPContext.senders(simulated, "dispatch", 64) == 16
    simulated.move.num_programs = num_programs
    assert EPContext.senders(simulated, "dispatch", 64) == senders
    simulated.tried_senders = 32
    assert EPContext.senders(simulated, "dispatch", 64) == min(32, num_programs // 2)


@pytest.mark.parametrize(("world_size", "senders"), [(1, 16), (2, 32), (3, 24), (4, 24), (8, 24), (16, 32), (32, 16)])
def test_a_combine_has_as_many_more_senders_as_copy_own_rows(world_size, senders):
    assert usual_senders("dispatch", 16, world_size) == 16
    found = usual_senders("combine", 16, world_size)
    assert found == senders and found % min(world_size, 16) == 0
    assert usual_senders("combine", 1, world_size) == 1  # the interpreter's


def test_expert_functions_and_their_gradients():
    calls = run_workers(2, expert_functions, (9, 14), torch.bfloat16, "descending")
    expected = [True] + [True, True, False, False]  # of fc2's, then of all four
    assert all([transpose for transpose, _ in call] == expected for call in calls)
    assert 0 < sum(call[0][1] for call in calls) < 6


def test_gemms_stay_native_where_cublas_may_split_their_sums():
    assert triton_wgrad_has_native_bits(7168, 2048) and not triton_wgrad_has_native_bits(512, 256)


def test_a_step_keeps_its_pairs_where_min_rows_are_apart():
    pairs = frozenset(PAIRS)
    limits = {"gemm_combine": 385, "fc1_dgrad": 1}
    assert pairs_of_step(pairs, None, limits) == pairs_of_step(pairs, np.array([0, 385, 9000]), limits) == (pairs, {})
    assert pairs_of_step(pairs, np.array([0, 384, 9000]), limits) == (pairs, {"gemm_combine": 385})
    assert pairs_of_step(pairs, np.array([0, 384, 9000]), {}) == (pairs, {})
    assert pairs_of_step(pairs, np.array([200, 384, 600]), limits) == (pairs - {"gemm_combine"}, {})
    both = {"gemm_combine": 385, "fc1_dgrad": 257}
    assert pairs_of_step(pairs, np.array([300, 256, 600]), both) == (pairs - {"gemm_combine"}, {"fc1_dgrad": 257})
    assert pairs_of_step(pairs, np.array([9000, 9000]), {"fc1_gemm": NEVER}) == (pairs - {"fc1_gemm"}, {})
    alone = frozenset(["overlap_wgrad"])
    assert pairs_of_step(alone, np.array([1, 384]), limits) == (alone, {})


def test_compiling_launches_nothing():
    run_workers(2, compiling_alone)
