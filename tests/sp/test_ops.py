"""Ulysses ops in the interpreter, on several processes, against GEMM, all-to-all and reorder."""

from __future__ import annotations

import pathlib
import random
import sys

import pytest
import torch

from tests.support.processes import run_workers, run_workers_once

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import bodies_sp  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_case(draw: random.Random, world: int) -> dict:
    groups = world * draw.choice([1, 2])
    return dict(
        heads=groups * draw.choice([1, 2, 3]),
        groups=groups,
        head_dim=draw.choice([8, 16, 24, 5]),
        length=2 * world * draw.choice([1, 3, 8, 17]),
        batch=draw.choice([1, 2, 3]),
        dtype=draw.choice(DTYPES),
    )


@pytest.mark.parametrize("world, num_cases", [(2, 5), (4, 5), (8, 1)])
def test_projections_have_the_bits_of_the_native_sequence(world, num_cases):
    draw = random.Random(world)
    cases = [random_case(draw, world) | {"hidden": draw.choice([16, 40, 33])} for _ in range(num_cases)]
    cases.append(cases[0] | {"value_dim": 16})
    run_workers(world, bodies_sp.run_projections, cases)


@pytest.mark.parametrize("rounds_once", [False, True])
def test_a_bias_is_that_of_a_ranks_own_heads(rounds_once):
    run_workers(2, bodies_sp.check_bias, rounds_once)


def test_rows_that_arrive_late_are_waited_for():
    """If all ranks are in step, a missing wait is seen only by chance."""
    run_workers(2, bodies_sp.check_late_rank, 0.1)


@pytest.mark.parametrize("late", [False, True])
def test_what_was_multiplied_is_copied_only_where_a_backward_follows(late):
    """Trained, evaluated; recomputed (first pass, second pass), evaluated."""
    wanted = [True, False, False, True, False]
    assert run_workers(2, bodies_sp.copies_for_backward, late) == [wanted] * 2


def test_epochs_wrap():
    case = dict(heads=4, groups=2, head_dim=8, length=16, batch=1, hidden=16, dtype=torch.float32)
    run_workers(2, bodies_sp.run_projections, [case] * 3, 2**31 - 3)


@pytest.mark.parametrize("world, num_cases", [(1, 5), (2, 5), (4, 5), (8, 3)])
def test_exchanges_move_any_bits(world, num_cases):
    draw = random.Random(10 + world)
    run_workers(world, bodies_sp.run_exchanges, [random_case(draw, world) for _ in range(num_cases)])


@pytest.mark.parametrize(
    "name, words",
    [
        ("odd", "Sequence length per GPU needs to be divisible by 2"),
        ("empty", "empty sequence"),
        ("columns", "needed is 16 to 64"),
        ("k", "needed is 15"),
        ("dtype", "float16"),
        ("layout", "'tt'"),
        ("dimensions", "1 dimensions"),
        ("parts", "2 parts"),
        ("heads", "part 0 is"),
        ("sequence", "divisible by 2"),
        ("double", "float64"),
        ("unlike", "part 2 is"),
    ],
)
def test_bad_input_is_refused_alike_on_every_rank_before_anything_is_signalled(name, words):
    errors = run_workers(2, bodies_sp.bad_input, name)
    assert errors[0] == errors[1] and errors[0].startswith("NotSupportedError") and words in errors[0]


@pytest.mark.parametrize("known", [False, True])
def test_different_calls_are_the_same_error_on_every_rank(known):
    outcomes = run_workers_once(2, bodies_sp.different_calls, known, env={"DITRON_TIMEOUT_S": "20"})
    errors = [outcome.value for outcome in outcomes]
    assert errors[0] == errors[1] and errors[0].startswith("MismatchError"), errors
    assert "rows=8" in errors[0] and "rows=16" in errors[0]


@pytest.mark.parametrize("op", ["gemm_a2a", "a2a_gemm", "gather_sequence"])
def test_an_absent_peer_is_named(op):
    outcomes = run_workers_once(2, bodies_sp.absent_peer, op, env={"DITRON_TIMEOUT_S": "3"})
    assert outcomes[1].value == "absent"
    assert outcomes[0].value.startswith("PeerTimeoutError") and "for rank 1" in outcomes[0].value


@pytest.mark.parametrize("op", ["gemm_a2a", "gather_sequence"])
def test_an_error_beside_a_transfer_leaves_the_ranks_in_step(op):
    for outcome in run_workers_once(2, bodies_sp.interrupted, op, env={"DITRON_TIMEOUT_S": "20"}):
        assert outcome.ok, outcome.traceback


@pytest.mark.parametrize(
    "op, launches", [("to_heads", 2), ("to_sequence", 2), ("gather_sequence", 2), ("gemm_a2a", 3)]
)
def test_a_launch_that_is_refused_leaves_no_fork_and_no_open_epoch(op, launches):
    for outcome in run_workers_once(2, bodies_sp.refused, op, env={"DITRON_TIMEOUT_S": "20"}):
        assert outcome.ok, outcome.traceback
        assert outcome.value == launches


@pytest.mark.parametrize("world", [2, 4])
def test_packed_sequences(world):
    lengths = [2 * world * count for count in (3, 1, 17, 0, 6)]
    run_workers(world, bodies_sp.packed, lengths, 2 * world, world, 8, 16)


@pytest.mark.parametrize("world, dtype", [(2, torch.bfloat16), (4, torch.bfloat16), (2, torch.float32)])
@pytest.mark.parametrize("counts", [(3, 1, 17, 0, 6), (40,), (1,) * 30])
def test_packed_rows_to_all_ranks_and_sums_back(world, dtype, counts):
    lengths = [2 * world * count for count in counts]
    assert min(run_workers(world, bodies_sp.gathered_packed, lengths, 3, dtype)) > 0


def test_packed_rows_to_all_ranks_while_epochs_wrap():
    run_workers(2, bodies_sp.gathered_packed, [8, 4], 1, torch.bfloat16, 2**31 - 2)


@pytest.mark.parametrize("name", ["table", "later table"])
def test_a_table_of_another_shape_or_type_is_refused(name):
    """Also where one of the same shape was right before: its type is not in the kernels' arguments."""
    errors = run_workers(2, bodies_sp.bad_input, name)
    assert errors[0] == errors[1] and "table of rows" in errors[0]


def test_an_empty_sequence_on_one_rank_is_the_same_error_on_every_rank():
    words = run_workers(2, bodies_sp.empty_on_one_rank, env={"DITRON_TIMEOUT_S": "20"})
    assert words[0] == words[1] and len(words[0]) == 2
    assert all(text.startswith("MismatchError: sp.") and "rank 1: operation=0, rows=0" in text for text in words[0])
