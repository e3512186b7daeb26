"""TP ops in the interpreter, several processes, against gloo."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import bodies_tp as bodies  # noqa: E402

from ditron_train.tp.gather import copy_rows_kernel  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402


@pytest.mark.parametrize("mode", ["push", "copy"])
@pytest.mark.parametrize(
    "counts, n, k, layout, dtype",
    [
        ([128, 128], 96, 64, "nt", "float32"),
        ([40, 40], 48, 40, "nn", "bfloat16"),
        ([33, 70], 64, 36, "nt", "float32"),
        ([0, 50], 20, 17, "nn", "float32"),
    ],
)
def test_ag_gemm_equals_gather_then_matmul(counts, n, k, layout, dtype, mode):
    run_workers(2, bodies.check_ag_gemm, counts, n, k, layout, mode, dtype, 3)


@pytest.mark.parametrize("scatter", ["store", "copy"])
@pytest.mark.parametrize(
    "counts, n, k, layout, dtype",
    [
        ([128, 128], 96, 64, "nt", "bfloat16"),
        ([40, 40], 48, 40, "nn", "float32"),
        ([33, 70], 72, 36, "nt", "bfloat16"),
        ([0, 50], 20, 17, "nn", "float32"),
    ],
)
def test_gemm_rs_equals_matmul_then_ring(counts, n, k, layout, dtype, scatter):
    run_workers(2, bodies.check_gemm_rs, counts, n, k, layout, scatter, dtype, 3)


def test_copies_that_would_take_multiprocessors_are_pushes_and_stores():
    run_workers(2, bodies.check_without_copy_engines)


def test_fp8_products_and_rows_as_they_arrive():
    run_workers(2, bodies.check_fp8_products, 40, 48, 32)
    run_workers(4, bodies.check_fp8_products, 16, 32, 64)


def test_fp8_operands_that_do_not_fit_are_refused_alike():
    first, second = run_workers(2, bodies.refused_fp8_calls)
    assert first == second and len(first) == 12
    for name, words in zip(["ag_gemm"] * 7 + ["gemm_rs"] * 5, first):
        assert words.startswith(f"{name}: ") and ("scale" in words or "FP8 operands" in words or "bias" in words)


def test_four_ranks():
    run_workers(4, bodies.check_ag_gemm, [32, 10, 0, 90], 40, 32, "nt", "push", "float32", 2)
    run_workers(4, bodies.check_ag_gemm, [64] * 4, 40, 32, "nn", "copy", "bfloat16", 2)
    for scatter in ("store", "copy", "copy in parts"):
        run_workers(4, bodies.check_gemm_rs, [32, 10, 0, 90], 40, 32, "nt", scatter, "bfloat16", 2)
        run_workers(4, bodies.check_gemm_rs, [64] * 4, 40, 32, "nn", scatter, "bfloat16", 2)


@pytest.mark.parametrize(
    "world_size, shape, dtype", [(2, (6, 3, 10), "bfloat16"), (4, (64, 33), "bfloat16"), (4, (8, 2, 5), "float32")]
)
def test_reduce_scatter_adds_in_ring_order(world_size, shape, dtype):
    run_workers(world_size, bodies.check_reduce_scatter, shape, dtype, 3)


def test_linear_layers_and_all_gradients():
    run_workers(2, bodies.check_linear_layers, (64, 2), 64, 48)


@pytest.mark.parametrize("world_size, layout, n, k", [(2, "nt", 40, 36), (2, "nn", 48, 17), (4, "nt", 20, 32)])
def test_the_library_multiplies_rank_by_rank(world_size, layout, n, k):
    run_workers(world_size, bodies.check_library_products, layout, n, k, 4)


def test_layers_by_the_library_and_all_gradients():
    run_workers(2, bodies.check_library_layers, (64, 2), 64, 48)


def test_tiles_multiply_where_the_library_has_other_bits_for_fewer_rows():
    uneven, varying, equal, unequal, no_memory = run_workers(2, bodies.check_tiles_instead_of_the_library)[0]
    assert equal == "LibraryAgGemmPlan" and {uneven, varying, unequal, no_memory} == {"AgGemmPlan"}


@pytest.mark.parametrize("n", [24, 300])
def test_a_bias_inside_the_product_is_rounded_with_it(n):
    run_workers(2, bodies.check_bias_inside, (32, 2), n, 96)


@pytest.mark.parametrize("shape", [(0, 2), (4, 0)])
def test_layers_on_no_token(shape):
    run_workers(2, bodies.check_empty_layers, shape)


def test_what_needs_a_gradient_leaves_nothing_in_shared_buffers():
    run_workers(2, bodies.check_gradients_stay_outside)


@pytest.mark.parametrize("num_columns", [16, 200])
def test_truth_values_are_pushed_whole(num_columns):
    run_workers(2, bodies.check_pushed_truth_values, num_columns)


def test_launches_are_named_by_where_their_operands_lie():
    run_workers(2, bodies.check_launch_keys)


def test_recorded_ops_are_named_by_all_that_they_depend_on():
    """Of 36 calls one comes before anything is recorded, and 9 have operands that are copied first."""
    for scattered, gathered in run_workers(2, bodies.check_recorded_ops):
        assert scattered == [20, 6]  # 3 operands in two sets of memory
        assert (
            gathered[0] == 7 and sum(gathered) == 26
        )  # strided rows are copied, so that they are stored elsewhere each time


@pytest.mark.parametrize(
    "op",
    ["wgrad", "dgrad", "ag_gemm push", "ag_gemm copy", "gemm_rs", "ag_gemm by the library", "gemm_rs by the library"],
)
def test_an_op_that_all_ranks_abort_in_the_middle_leaves_the_next_ones_right(op):
    run_workers(2, bodies.check_interrupted, op)


@pytest.mark.parametrize(
    "op", ["all_gather", "ag_gemm push", "ag_gemm copy", "gemm_rs", "reduce_scatter", "gemm_ar", "gemm_ar in rounds"]
)
def test_a_launch_that_is_refused_leaves_no_fork_and_no_open_epoch(op):
    for launches in run_workers(2, bodies.refused, op, env={"DITRON_TIMEOUT_S": "20"}):
        assert launches >= 2


@pytest.mark.parametrize("op", ["rows", "parts"])
def test_a_copy_of_own_rows_that_fails_leaves_no_open_epoch(op):
    run_workers(2, bodies.check_own_rows_that_fail, op, env={"DITRON_TIMEOUT_S": "20"})


@pytest.mark.parametrize("op", ["ag_gemm push", "ag_gemm copy"])
def test_an_interrupt_is_not_hidden_by_a_wait(op):
    """Found by ``verify --faults``: who was interrupted in a kernel waited for its peers, and blamed them."""
    env = {"DITRON_TIMEOUT_S": "4"}
    assert run_workers(2, bodies.interrupted_in_a_kernel, op, env=env) == [("KeyboardInterrupt", True)] * 2


def test_overlapping_groups():
    assert run_workers(4, bodies.check_overlapping_groups) == [2, 3, 2, 2]


def test_epochs_wrap():
    assert run_workers(2, bodies.check_wrap) == [-(2**31) + 5] * 2


@pytest.mark.parametrize("field", ["rows", "columns", "dtype", "known"])
def test_mismatch_is_the_same_error_on_every_rank(field):
    words = run_workers(2, bodies.mismatched, field)
    assert words[0] == words[1]
    assert words[0].startswith("MismatchError: tp.gather")
    assert "rank 0: total_rows=64" in words[0] and "rank 1:" in words[0]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs copy", "gemm_rs store", "all_gather", "reduce_scatter", "gemm_ar"])
def test_nothing_on_one_rank_is_the_same_error_on_every_rank(op: str, is_known: bool):
    words = run_workers(3, bodies.nothing_on_one_rank, op, is_known, env={"DITRON_TIMEOUT_S": "20"})
    assert len(set(words)) == 1, words
    assert re.match(r"MismatchError: tp\.[^;]*rank 0: .*rank 2: (total|num)_rows=0", words[0])


def test_bad_input_is_refused_alike_on_every_rank_before_anything_is_signalled():
    words, words_1 = run_workers(2, bodies.bad_calls)
    assert words == words_1 and len(words) == 26
    assert [
        text for text in words if not text.startswith(("ag_gemm: ", "gemm_rs: ", "all_gather: ", "reduce_scatter: "))
    ] == []


@pytest.mark.parametrize("num_rows", [0, 1, 16, 75])
def test_own_rows_are_copied_whole_and_nothing_behind_them(num_rows):
    source, buffer = torch.arange(1.0, 76 * 8 + 1).view(76, 8), torch.zeros(76, 8)
    copy_rows_kernel[(3,)](source, buffer, num_rows * 8, BLOCK=128)
    assert torch.equal(buffer[:num_rows], source[:num_rows]) and not buffer[num_rows:].any()
