"""What newer versions of Megatron-core call differently or add: asked for by one question, or refused by name."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ditron_train.megatron.compat import config as compat
from ditron_train.megatron.compat import muon
from ditron_train.runtime.errors import NotSupportedError

Part = enum.Enum("Part", ["attn", "moe_router", "moe_preprocess", "full_iteration"])
X = torch.zeros(2, 2, dtype=torch.bfloat16)


def _config(**values: Any) -> Any:
    return SimpleNamespace(**values)


@pytest.mark.parametrize("name", ["cuda_graph_scope", "cuda_graph_modules"])
def test_captured_parts_by_either_name(name: str) -> None:
    assert compat.captured_parts(_config(**{name: [Part.attn]})) is None
    assert compat.captured_parts(_config(cuda_graph_impl="none", **{name: [Part.attn]})) is None
    for nothing in ([], "full", None):
        config = _config(cuda_graph_impl="local", **{name: nothing})
        assert compat.captured_parts(config) == frozenset() and compat.captures_dispatch(config)
    config = _config(cuda_graph_impl="local", **{name: [Part.attn, Part.moe_router]})
    assert compat.captured_parts(config) == {"attn", "moe_router"} and not compat.captures_dispatch(config)
    config = _config(cuda_graph_impl="transformer_engine", **{name: [Part.moe_router, Part.moe_preprocess]})
    assert compat.captures_dispatch(config)


def test_newer_versions_clear_the_old_name() -> None:
    config = _config(cuda_graph_impl="local", cuda_graph_scope=None, cuda_graph_modules=[Part.attn])
    assert compat.captured_parts(config) == {"attn"} and not compat.captures_iteration(config)


def test_a_whole_iteration_is_an_implementation_or_a_scope() -> None:
    assert compat.captures_iteration(_config(cuda_graph_impl="full_iteration", cuda_graph_modules=[]))
    assert compat.captures_dispatch(_config(cuda_graph_impl="full_iteration", cuda_graph_modules=[]))
    assert compat.captures_iteration(_config(cuda_graph_impl="local", cuda_graph_scope=[Part.full_iteration]))
    assert compat.captures_iteration(_config(cuda_graph_impl="local", cuda_graph_scope="full_iteration"))
    assert not compat.captures_iteration(_config(cuda_graph_impl="local", cuda_graph_scope=[Part.attn]))


def _experts(**changes: Any) -> Any:
    linear = SimpleNamespace(weight0=SimpleNamespace(**changes.pop("weight", {})), **changes.pop("linear", {}))
    return SimpleNamespace(config=_config(**changes), linear_fc1=linear, linear_fc2=linear)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_transformer_engine_op_fuser": True}, "operation fuser"),
        ({"moe_use_grouped_tensor": True}, "moe_use_grouped_tensor"),
        ({"linear": {"single_grouped_weight": True}}, "one grouped weight"),
        ({"linear": {"use_grouped_tensor": True}}, "cuBLAS's grouped GEMM"),
        ({"weight": {"gtp_remat_size": 2}}, "shared by 2 ranks"),
    ],
)
def test_experts_that_are_computed_otherwise_stay_megatrons(changes: dict, words: str) -> None:
    assert compat.unsupported_reason_experts(_experts()) is None
    assert words in str(compat.unsupported_reason_experts(_experts(**changes)))


def test_a_layer_of_one_grouped_weight_is_known_by_itself() -> None:
    """In FP8 it is asked about before its weights, which are no longer there one by one."""
    layer = SimpleNamespace(single_grouped_weight=True, weight0=None)
    assert compat.unsupported_reason_grouped_layer(layer) == "the experts share one grouped weight"


def test_a_grouped_gemm_that_a_variable_asks_for_stays_transformer_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 2.17, which has a way for it; what 2.20 was told when the layer was made counts more."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "1")
    assert compat.unsupported_reason_experts(_experts()) is None
    assert compat.unsupported_reason_experts(_experts(linear={"use_grouped_tensor": False})) is None
    module = ModuleType("simulated_grouped_linear")
    module._GroupedLinear = SimpleNamespace(_is_grouped_tensor_path_supported=None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    of_library = type("GroupedLinear", (), {"__module__": module.__name__})
    layer = type("TEGroupedLinear", (of_library,), {})()
    assert "cuBLAS's grouped GEMM" in str(compat.unsupported_reason_grouped_layer(layer))
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "0")
    assert compat.unsupported_reason_grouped_layer(layer) is None


def test_a_dispatcher_that_adds_in_another_order_is_refused() -> None:
    older, config = SimpleNamespace(config=_config(batch_invariant_mode=True)), _config(batch_invariant_mode=False)
    newer = SimpleNamespace(**vars(older), batch_invariant_inverse_permutation_mapping=None)
    assert compat.unsupported_reason_dispatcher(older) is None
    assert compat.unsupported_reason_dispatcher(SimpleNamespace(**{**vars(newer), "config": config})) is None
    assert compat.unsupported_reason_dispatcher(newer) == "batch_invariant_mode is on"


def test_a_call_that_asks_for_something_new_is_refused() -> None:
    known = {"bias": torch.zeros(1), "allreduce_dgrad": True, "tp_group": object(), "sequence_parallel": True}
    harmless = {"gtp_remat_size": 1, "output_dtype": None, "something": False}
    assert (
        compat.unsupported_reason_arguments(X, known) is None
        and compat.unsupported_reason_arguments(X, {**known, **harmless}) is None
    )
    assert compat.unsupported_reason_arguments(X, {**known, "output_dtype": torch.bfloat16}) is None
    for new in ({"output_dtype": torch.float32}, {"gtp_remat_size": 2}, {"something": "x"}):
        assert f"{next(iter(new))}=" in str(compat.unsupported_reason_arguments(X, {**known, **new}))


def test_a_weight_of_several_ranks_is_refused() -> None:
    assert compat.unsupported_reason_weight(torch.zeros(1)) is None and compat.unsupported_reason_weight(None) is None
    assert compat.unsupported_reason_weight(SimpleNamespace(gtp_remat_size=1)) is None
    assert "4 ranks" in str(compat.unsupported_reason_weight(SimpleNamespace(gtp_remat_size=4)))
    assert "by ranks" in str(compat.unsupported_reason_weight(SimpleNamespace(is_gtp_weight_remat=True)))
    assert "by ranks" in str(compat.unsupported_reason_weight(SimpleNamespace(is_distributed_weight=True)))


def test_arguments_of_muon_by_the_names_of_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer:
        def __init__(self, params, momentum=0.95, nesterov=True, tp_mode="duplicated", use_syrk=False) -> None: ...

    monkeypatch.setattr(muon.muon_module(), "TensorParallelMuon", Newer)
    named = {"momentum": 0.9, "nesterov": False, "tp_mode": "blockwise", "lr": 0.1, "use_syrk": False}
    common = {"momentum_beta": 0.9, "use_nesterov": False, "mode": "blockwise", "lr": 0.1}
    assert muon.common_arguments(named) == common == muon.common_arguments(common)
    for new in ({"use_syrk": True}, {"something": 1}):
        with pytest.raises(NotSupportedError, match="is not covered"):
            muon.common_arguments({**named, **new})


def test_a_layer_wise_optimizer_that_gathers_otherwise_is_megatrons() -> None:
    legacy, laid_out = SimpleNamespace(full_param_layout=None), SimpleNamespace(full_param_layout=object())
    plain, overlapped = _config(overlap_param_gather=False), _config(overlap_param_gather=True)
    assert muon.unsupported_reason_layer_wise(overlapped, {}) is None  # 0.16 does not ask for it
    assert muon.unsupported_reason_layer_wise(plain, {"model_chunks": [legacy], "async_allgather": False}) is None
    assert "overlap_param_gather" in str(muon.unsupported_reason_layer_wise(plain, {"async_allgather": True}))  # 0.17
    assert "overlap_param_gather" in str(muon.unsupported_reason_layer_wise(overlapped, {"model_chunks": [legacy]}))
    assert "param_layout" in str(muon.unsupported_reason_layer_wise(plain, {"model_chunks": [legacy, laid_out]}))


def test_the_norm_is_bounded_as_by_the_package_that_is_there() -> None:
    assert muon.norm_eps() == 1e-7


def _after_0_19(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers

    def written(out: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor:
        return out.copy_(grad_output.t().matmul(total_input))  # as without Transformer Engine

    monkeypatch.setattr(layers, "_wgrad_gemm", written, raising=False)


def _of_0_18(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import layers

    def product(
        a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, layout: str, out: torch.Tensor, grad: bool
    ) -> list[torch.Tensor]:
        assert layout == "NT" and grad and out.dtype == out_dtype
        return [out.copy_(b.t().matmul(a))]

    class Linear:
        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            from megatron.core.extensions.transformer_engine import te_general_gemm

            return te_general_gemm

    monkeypatch.delattr(layers, "_wgrad_gemm", raising=False)
    monkeypatch.setattr(layers, "LinearWithGradAccumulationAndAsyncCommunication", Linear)
    monkeypatch.setattr(transformer_engine, "te_general_gemm", product, raising=False)


@pytest.mark.parametrize("as_in", [_of_0_18, _after_0_19])
def test_a_gradient_that_fsdp_keeps_wider_is_written_as_newer_layers_do(
    monkeypatch: pytest.MonkeyPatch, as_in: Callable[[pytest.MonkeyPatch], None]
) -> None:
    from ditron_train.megatron.shared.wgrad import NativeWgrad

    as_in(monkeypatch)
    weight: Any = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    buffer = torch.full((3, 4), 7.0)
    weight.__fsdp_param__, weight.main_grad, weight.get_main_grad = True, None, lambda: buffer
    grad, x = torch.randn(5, 3).bfloat16(), torch.randn(5, 4).bfloat16()
    assert NativeWgrad(weight, fused=True)(grad, x) is None
    assert weight.main_grad is buffer and torch.equal(buffer, grad.t().matmul(x).float())


def test_a_failed_op_never_reaches_the_weights_by_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--optimizer-cuda-graph`` replays the step, and torch's hooks do not run then."""
    import ditron_train.megatron as plugin
    from ditron_train.megatron.plugin import failures

    class OptimizerCudaGraphWrapper:
        steps = 0

        def __call__(self) -> int:
            self.steps += 1
            return self.steps

    def fail() -> None:
        raise NotSupportedError("an op failed")

    module = SimpleNamespace(OptimizerCudaGraphWrapper=OptimizerCudaGraphWrapper)
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer.optimizer_cuda_graph", module)
    native, step = OptimizerCudaGraphWrapper.__call__, OptimizerCudaGraphWrapper()
    try:
        plugin.apply(features="pp")
        assert step() == 1
        monkeypatch.setattr(failures, "check_all", fail)
        with pytest.raises(NotSupportedError, match="an op failed"):
            step()
    finally:
        plugin.restore()
    assert OptimizerCudaGraphWrapper.__call__ is native and step() == 2
