"""Transformer Engine's experts in FP8 with ours in their code, on the CPU with a stand-in for Transformer Engine."""

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
    (((native, inherited, *others, with_rows), quantised),) = run(workers.compare_layers, recipe, minor, num_workers=1)
    assert native == inherited == with_rows, "products are ours only where they are asked for"
    trained = [splits for splits, has_grad, _ in workers.STEPS if has_grad for _ in ("rows", "gradients")]
    assert quantised == (trained if recipe == "tensorwise" else []), "without gradients rows have no transposes"
    passes = [("TN", tuple(splits), is_split) for splits, _, is_split in workers.STEPS]
    backward = [
        (layout, tuple(splits), True) for splits, has_grad, _ in workers.STEPS if has_grad for layout in ("NN", "NT")
    ]
    assert sorted(native) == sorted(passes + backward)
    # A split accumulator, and an expert with so few rows that cuBLAS may add up in another order, are left alone.
    few = [call for call in native if min(filter(None, call[1])) < workers.FEWEST_ROWS]
    left = [call for call in passes if call[2]]
    assert few and left
    for layouts, found in zip((("TN",), ("NN",), ("TN", "NN")), others):
        kept = [call for call in native if call[0] not in layouts or call in few or call in left]
        assert sorted(found) == sorted(kept), layouts


@pytest.mark.parametrize(
    "change, words",
    [
        (("_ = general_grouped_gemm(", "_ = grouped_gemm_2("), "does not call general_grouped_gemm"),
        (("class _GroupedLinear(", "class _Experts("), "has experts of another build"),
        (("grads = tex.split_quantize(", "grads = _split("), "quantises them by functions of another module"),
    ],
    ids=["products", "functions", "rows"],
)
def test_code_that_calls_others_is_left_alone(change, words):
    (reason,) = run(workers.refused_code, change, num_workers=1)
    assert reason == f"this version of Transformer Engine {words}"


def test_products_that_are_left_to_transformer_engine_are_logged_once():
    (((is_ours, lines), *left),) = run(workers.kept_apart, num_workers=1)
    assert is_ours and lines == [], "what is covered is not told apart"
    expected = [
        "the experts' rows are not of one FP8 format, but E4M3 and E5M2",
        "the experts' weights are not of one FP8 format, but E4M3 and E5M2",
        "all need e4m3",
        "the experts' weights are not all in FP8 with one scale",
        "into torch.float32",
        "forward has a split accumulator",
        "forward of steps in which an expert has fewer than 64 rows",
        "forward is asked for with more than a product",
    ]
    assert len(left) == len(expected)
    for (is_ours, lines), words in zip(left, expected):
        assert not is_ours and len(lines) == 1, (words, lines)
        assert lines[0].startswith("ep experts (FP8): native, ") and words in lines[0]


def test_recipes():
    (said,) = run(workers.recipes, num_workers=1)
    assert said == ["Float8CurrentScaling", "TEDelayedScaling"]


@pytest.mark.parametrize("kind, expected", [("equal", 128), ("differs", 257), ("none", "have other bits")])
def test_ranks_agree_from_how_many_rows_on_products_are_ours(kind, expected):
    """And a product that one of them cannot compute is the same refusal on both."""
    first, second = run(workers.measured_rows, kind)
    assert first == second and (first == expected or expected in str(first)), first


def test_rows_that_transformer_engine_quantises_are_logged_once():
    (found,) = run(workers.rows_kept_apart, num_workers=1)
    assert found[0] == (True, [])
    expected = ["in 3 dimensions", "of another kind", "that differ", "from elsewhere", "without their transposes"]
    expected.append("options: disable_bulk_allocation")
    for (is_ours, lines), words in zip(found[1:], expected, strict=True):
        assert not is_ours and len(lines) == 1 and words in lines[0], (words, lines)
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


def test_what_the_policy_compares():
    first, second = run(workers.spec_on_cpu)
    assert first == second
    assert first[:4] == [
        "ep experts fp8 forward 3 experts 48x32 E4M3, host ahead or not",
        "ep experts fp8 forward 20 experts 48x32 E4M3, host ahead or not",
        "ep experts fp8 dgrad 3 experts 48x32 E5M2, host ahead or not",
        "ep experts fp8 dgrad 3 experts 48x32 E4M3, host ahead or not",
    ]
    assert "multiples of 16" in first[4] and "covered is bfloat16" in first[5]
