"""GEMM-AR in the interpreter, several processes, with given orders of NCCL's all-reduce."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import bodies_all_reduce as bodies  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402


@pytest.mark.parametrize("way", ["stores", "copies", "rounds"])
@pytest.mark.parametrize(
    ("world_size", "m", "n", "k", "layout", "dtype"),
    [
        (2, 50, 40, 24, "nt", "bfloat16"),
        (3, 33, 72, 36, "nn", "bfloat16"),
        (4, 64, 136, 32, "nt", "bfloat16"),
        (4, 3, 20, 17, "nn", "float32"),
    ],
)
def test_gemm_ar_equals_matmul_then_the_simulated_orders(world_size, m, n, k, layout, dtype, way):
    run_workers(world_size, bodies.check_gemm_ar, m, n, k, layout, way, dtype, 2)


def test_small_all_reduces_share_slots_by_parity():
    run_workers(3, bodies.check_alternating, 12)


@pytest.mark.parametrize("first_epoch", [0, 2**31 - 5])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_largest_of_all_ranks(world_size, first_epoch):
    run_workers(world_size, bodies.check_largest, first_epoch, 12)


def test_what_is_no_amax_is_refused_by_each_rank():
    for logged in run_workers(2, bodies.refuse_largest):
        assert [words.partition(" on ")[0] for words in logged] == [
            "largest_of_ranks: (2,) torch.float32",
            "largest_of_ranks: (1,) torch.bfloat16",
        ]


def test_layers_and_all_gradients():
    run_workers(2, bodies.check_layers, (24, 2), 64, 48)
    run_workers(4, bodies.check_layers, (7, 3), 32, 16)


def test_products_of_gradients_get_what_the_layer_multiplies():
    run_workers(2, bodies.check_operands, 24, 16, 32)


def test_nothing_on_one_rank_is_the_same_error_on_every_rank():
    words = run_workers(3, bodies.nothing_on_one_rank, env={"DITRON_TIMEOUT_S": "20"})
    assert len(set(words)) == 1 and words[0].startswith("MismatchError: tp.all_reduce"), words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "words"),
    [("simulated", None), ("tree", "along a chain"), ("unrounded", "round to"), ("by call", "along a chain")],
)
def test_orders_are_read_from_values(kind: str, words: str | None, dtype: torch.dtype) -> None:
    for is_right, reason in run_workers(4, bodies.revealed, kind, 5000, dtype):
        assert is_right == (words is None) and (words is None or words in reason)
