"""Transformer Engine's experts in FP8 with the fused path in their code, on the CPU with a stand-in for Transformer
Engine."""

from __future__ import annotations

import pathlib
import sys

import pytest

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import te_fp8_experts_workers as workers  # noqa: E402
from te_fp8_workers import run  # noqa: E402


@pytest.mark.parametrize("recipe, minor", [("tensorwise", 10), ("tensorwise", 16), ("delayed", 10)])
def test_results_gradients_and_states_are_those_of_the_native_layer(recipe, minor):
    (((native, inherited, with_rows), quantised),) = run(workers.compare_layers, recipe, minor, num_workers=1)
    assert native == inherited == with_rows, "all products are Transformer Engine's"
    trained = [splits for splits, has_grad in workers.STEPS if has_grad for _ in ("rows", "gradients")]
    assert quantised == (trained if recipe == "tensorwise" else []), "without gradients rows have no transposes"


@pytest.mark.parametrize(
    "change, words",
    [
        (("(_GroupedLinear.", "(_Experts."), "does not call _GroupedLinear"),
        (("class _GroupedLinear(", "class _Experts("), "has experts of another build"),
        (("grads = tex.split_quantize(", "grads = _split("), "quantises rows by functions of another module"),
    ],
    ids=["layer", "functions", "rows"],
)
def test_code_that_calls_others_is_left_alone(change, words):
    (reason,) = run(workers.refused_code, change, num_workers=1)
    assert reason == f"this version of Transformer Engine {words}"


def test_recipes():
    (logged,) = run(workers.recipes, num_workers=1)
    assert logged == ["Float8CurrentScaling", "TEFloat8CurrentScaling"]


def test_rows_that_transformer_engine_quantises_are_logged_once():
    (found,) = run(workers.rows_kept_apart, num_workers=1)
    assert found[0] == (True, [])
    expected = ["in 3 dimensions", "of another kind", "that differ", "from elsewhere", "without their transposes"]
    expected.append("options: disable_bulk_allocation")
    for (is_fused, lines), words in zip(found[1:], expected, strict=True):
        assert not is_fused and len(lines) == 1 and words in lines[0], (words, lines)
        assert lines[0].startswith("ep rows (FP8): native, ")


def test_what_the_policy_compares_of_rows():
    first, second = run(workers.rows_spec_on_cpu)
    assert (
        first
        == second
        == [
            "ep rows fp8 3 experts of 32 E4M3 power of 2 epsilon 0, host ahead or not",
            "ep rows fp8 3 experts of 48 E5M2 epsilon 0.5, host ahead or not",
            "torch.float32 is not covered",
        ]
    )


def test_tools_walk_the_rows_of_experts():
    first, second = run(workers.rows_in_tools)
    assert (
        first
        == second
        == [
            ((64, 32), 32, 96, "E4M3"),
            ((64, 96), 96, 32, "E5M2"),
            ((64, 48), 48, 32, "E4M3"),
            ((64, 32), 32, 48, "E5M2"),
        ]
    )
