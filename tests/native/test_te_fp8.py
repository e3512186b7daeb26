"""Transformer Engine's layers in FP8 with the fused path in their code, on the CPU with a stand-in for Transformer
Engine."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import te_fp8_workers as workers  # noqa: E402

TRANSFORMER_ENGINE = os.environ.get("TRANSFORMER_ENGINE")


@pytest.mark.parametrize(
    "recipe, minor",
    [
        *[("tensorwise", 10), ("delayed", 10), ("blockwise", 10), ("blockwise", 12), ("blockwise", 14)],
        *[("tensorwise", 15), ("delayed", 16), ("tensorwise", 18), ("blockwise", 18)],
    ],
)
@pytest.mark.parametrize("mode", ["column", "row"])
def test_results_gradients_and_states_of_quantizers_are_those_of_the_native_layer(mode, recipe, minor):
    for native, overlapped in workers.run(workers.compare_layers, mode, recipe, minor):
        _check_products(native, overlapped, mode, recipe)


@pytest.mark.parametrize("minor", [10, 12])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_short_products_in_blocks_are_of_two_ranks_rows_among_four(mode, minor):
    """What a small product takes the host is more than it is worth to begin it earlier."""
    for native, overlapped in workers.run(workers.compare_layers, mode, "blockwise", minor, num_workers=4):
        _check_products(native, overlapped, mode, "blockwise", rows=256)


@pytest.mark.skipif(not TRANSFORMER_ENGINE, reason="TRANSFORMER_ENGINE names no checkout of Transformer Engine")
@pytest.mark.parametrize(
    "mode, module, name",
    [("column", "linear", "Linear"), ("column", "layernorm_linear", "LayerNormLinear"), ("row", "linear", "Linear")],
)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_the_same_with_transformer_engines_own_code(mode, recipe, module, name):
    for native, overlapped in workers.run(workers.compare_sources, mode, recipe, TRANSFORMER_ENGINE, module, name):
        _check_products(native, overlapped, mode, recipe)


def _check_products(native, overlapped, mode, recipe, rows=128):
    forwards, fused = ([call for call in calls if call[0] == "TN"] for calls in (native, overlapped))
    if recipe == "blockwise":  # the rows of each rank by themselves
        assert len(forwards) == 4 and [call[1][0] for call in fused] == [rows, rows] * 4
    else:
        assert len(forwards) == 4 and not fused, "forward is fused"
    assert [call for call in native if call[0] == "NT"] == [call for call in overlapped if call[0] == "NT"]
    dgrads, fused = ([call for call in calls if call[0] == "NN"] for calls in (native, overlapped))
    if mode == "row":  # the rows of each rank by themselves
        assert len(fused) == 4 and {call[1] for call in fused} == {(whole // 2, k) for _, (whole, k), _ in dgrads}
    else:
        assert fused == dgrads


def test_a_gather_whose_product_finds_no_memory_is_waited_for():
    for right in workers.run(workers.results_behind_memory_errors):
        assert right == [True] * 5


def test_products_are_known_again_by_all_that_they_depend_on():
    for right in workers.run(workers.keys_of_products):
        assert all(right), right


def test_the_amax_of_all_ranks_is_asked_for_by_the_pass_from_cpp():
    assert workers.run(workers.amax_asked_from_cpp) == [[2.0, 2.0, 2.0, 1.0], [2.0, 2.0, 2.0, 2.0]]


@pytest.mark.parametrize(
    "change, words, minor",
    [
        (("general_gemm(matrix, gathered", "general_gemm_2(matrix, gathered"), "general_gemm", 10),
        (("gather_along_first_dim(grad_output, ", "gather(grad_output, "), "gather_along_first_dim", 10),
        (("class _Linear(", "class _Affine("), "layers of another build", 10),
        (("general_gemm(matrix, gathered", "general_gemm_2(matrix, gathered"), "general_gemm", 18),
        (("weight, inp, bias, layer):", "weight, x, bias, layer):"), "layers of another build", 18),
    ],
    ids=["products", "gathers", "functions", "products of functions", "inputs"],
)
def test_code_that_calls_others_is_left_alone(change, words, minor):
    for reason in workers.run(workers.refused_code, change, minor, num_workers=1):
        assert words in reason and reason.startswith("this version of Transformer Engine")


@pytest.mark.parametrize("scaling, minor", [("tensor", 10), ("block", 10), ("block", 12)])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_what_the_policy_compares(kind, scaling, minor):
    first, second = workers.run(workers.spec_on_cpu, kind, scaling, minor)
    words, size, alignment = ("BlockScaling", 8, 128) if scaling == "block" else ("CurrentScaling", 1, 16)
    sizes = f"{32 * size}x{64 * size} {48 * size}x{64 * size}"
    assert first == second
    assert first[0].startswith(f"tp {kind} fp8 {sizes} gradients E5M2, Float8{words}: [") and "frozen" in first[1]
    assert ("bias" in first[1]) == (kind == "column")
    assert f"multiples of {alignment}" in first[2]


@pytest.mark.parametrize(
    "minor, change, is_known",
    [
        (11, ("", ""), True),
        (12, ("", ""), True),
        (12, ("return (shape[-1], *shape[:-1])", "return tuple(shape)"), False),
        (12, ("def get_scale_shape(self, shape, columnwise)", "def get_scale_shape(self, shape)"), False),
    ],
    ids=["2.11", "2.12", "columns as the tensor is", "another interface"],
)
def test_blocks_that_lie_otherwise_are_left_alone(minor, change, is_known):
    (reason,) = workers.run(workers.form_of_blocks, minor, change, num_workers=1)
    assert reason is None if is_known else "sends blocks in another form" in reason


@pytest.mark.parametrize("what", ["shape", "type", "recipe", "format", "frozen"])
def test_ranks_that_differ_raise_the_same(what):
    first, second = workers.run(workers.different_calls, what)
    assert first == second and "rank 0: (64, 64)" in first and "; rank 1: " in first


def test_recipes():
    logged = workers.run(workers.recipes, num_workers=1)[0]
    tensors, blocks = {"Float8CurrentScaling": "tensor", "TEDelayedScaling": "tensor"}, {"Float8BlockScaling": "block"}
    assert logged["covered"] == {**tensors, **blocks, "Blocks of any scale": "block fp32"}
    assert "the recipe MXFP8BlockScaling" in logged["MXFP8BlockScaling"]
    assert (
        "split accumulator" in logged["Precise"]
        and "another shape" in logged["Square"]
        and "another form" in logged["newer"]
        and "backward_override" in logged["override"]
    )
