"""Transformer Engine's layers in FP8 with ours in their code, on the CPU with a stand-in for Transformer Engine."""

from __future__ import annotations

import pathlib
import sys

import pytest

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import te_fp8_workers as workers  # noqa: E402


@pytest.mark.parametrize("mode", ["column", "row"])
def test_results_gradients_and_states_of_quantizers_are_those_of_the_native_layer(mode):
    for native, overlapped in workers.run(workers.compare_layers, mode):
        forwards = [call for call in native if call[0] == "TN"]
        assert len(forwards) == 4 and not any(call[0] == "TN" for call in overlapped), "forward is ours"
        assert [call for call in native if call[0] == "NT"] == [call for call in overlapped if call[0] == "NT"]
        dgrads = [call for call in overlapped if call[0] == "NN"]
        if mode == "row":  # the rows of each rank by themselves
            assert len(dgrads) == 4 and {call[1] for call in dgrads} == {(32, 32)}
        else:
            assert dgrads == [call for call in native if call[0] == "NN"]


@pytest.mark.parametrize(
    "change, words",
    [
        (("general_gemm(matrix, gathered", "general_gemm_2(matrix, gathered"), "general_gemm"),
        (("gather_along_first_dim(grad_output, ", "gather(grad_output, "), "gather_along_first_dim"),
        (("class _Linear(", "class _Affine("), "layers of another build"),
    ],
    ids=["products", "gathers", "functions"],
)
def test_code_that_calls_others_is_left_alone(change, words):
    for reason in workers.run(workers.refused_code, change, num_workers=1):
        assert words in reason and reason.startswith("this version of Transformer Engine")


@pytest.mark.parametrize("kind", ["column", "row"])
def test_what_the_policy_compares(kind):
    first, second = workers.run(workers.spec_on_cpu, kind)
    assert first == second
    assert first[0].startswith(f"tp {kind} fp8 32x64 48x64 gradients E5M2: [") and "frozen" in first[1]
    assert "multiples of 16" in first[2]
