"""Transformer Engine's experts in FP8 with ours in their code, on the CPU with a stand-in for Transformer Engine."""

from __future__ import annotations

import pathlib
import sys

import pytest

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import te_fp8_experts_workers as workers  # noqa: E402
from te_fp8_workers import run  # noqa: E402


def test_results_gradients_and_states_are_those_of_the_native_layer():
    ((native, inherited, at_once),) = run(workers.compare_layers, num_workers=1)
    assert native == inherited, "products are ours only where they are asked for"
    forwards = [call for call in native if call[0] == "TN"]
    # A split accumulator, and an expert with so few rows that cuBLAS may add up in another order, are left alone.
    assert len(forwards) == 5
    assert [call for call in at_once if call[0] == "TN"] == [("TN", (32, 16, 48), True), ("TN", (32, 8, 48), False)]
    assert [call for call in native if call[0] != "TN"] == [call for call in at_once if call[0] != "TN"]


@pytest.mark.parametrize(
    "change, words",
    [
        (("_ = general_grouped_gemm(", "_ = grouped_gemm_2("), "general_grouped_gemm"),
        (("rows = tex.split_quantize(", "rows = tex.quantize_all("), "split_quantize"),
        (("class _GroupedLinear(", "class _Experts("), "experts of another build"),
    ],
    ids=["products", "quantising", "functions"],
)
def test_code_that_calls_others_is_left_alone(change, words):
    (reason,) = run(workers.refused_code, change, num_workers=1)
    assert words in reason and reason.startswith("this version of Transformer Engine")


def test_what_the_policy_compares():
    first, second = run(workers.spec_on_cpu)
    assert first == second and first[:2] == [None, "ep experts fp8 3 experts 48x32"]
    assert "multiples of 16" in first[2] and "covered is bfloat16" in first[3]
