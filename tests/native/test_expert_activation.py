"""What an expert does between its linear layers equals what ``TEGroupedMLP`` of the installed Megatron does there."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: E402
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.experts import TEGroupedMLP  # noqa: E402

from ditron_train.cpu.megatron_shim import CPU_CONFIG, megatron_on_cpu  # noqa: E402
from ditron_train.megatron.compat.activation import activate_experts  # noqa: E402

HAS_INTERLEAVING = hasattr(TEGroupedMLP, "_remove_glu_interleaving")
CASES: dict[str, dict[str, Any]] = {
    "swiglu": dict(activation_func=F.silu, bias_activation_fusion=True),
    "swiglu, clamp": dict(activation_func=F.silu, bias_activation_fusion=True, activation_func_clamp_value=0.5),
    "swiglu, apart": dict(activation_func=F.silu, activation_func_clamp_value=0.5),
    "geglu": dict(activation_func=quick_gelu, bias_activation_fusion=True, glu_linear_offset=1.0),
    "squared relu": dict(
        activation_func=squared_relu, gated_linear_unit=False, use_fused_weighted_squared_relu=True
    ),
    "gelu": dict(activation_func=F.gelu, gated_linear_unit=False),
    "swiglu, interleaved": dict(
        activation_func=F.silu, bias_activation_fusion=True, activation_func_clamp_value=0.5,
        moe_mlp_glu_interleave_size=4,
    ),
    "geglu, interleaved": dict(activation_func=quick_gelu, moe_mlp_glu_interleave_size=2),
}  # fmt: skip


class _Nothing(torch.nn.Module):
    """In the place of a linear layer: what it gets."""

    def forward(self, x: torch.Tensor, counts: Any) -> tuple[torch.Tensor, None]:
        return x, None


def _experts(case: dict[str, Any]) -> Any:
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, num_moe_experts=2, add_bias_linear=False,
        **{**CPU_CONFIG, "gated_linear_unit": True, "bias_activation_fusion": False, **case},
    )  # fmt: skip
    experts: Any = TEGroupedMLP.__new__(TEGroupedMLP)
    torch.nn.Module.__init__(experts)
    experts.config, experts.activation_func = config, config.activation_func
    experts.linear_fc1, experts.linear_fc2 = _Nothing(), _Nothing()
    experts.activation_recompute = experts.offload_expert_fc1 = experts.offload_moe_act = False
    experts._with_fused_impl = experts._use_grouped_tensor = False
    return experts


@pytest.mark.parametrize("name", CASES)
def test_the_activation_is_that_of_the_native_experts(name: str) -> None:
    case = CASES[name]
    if "moe_mlp_glu_interleave_size" in case and not HAS_INTERLEAVING:
        pytest.skip("there is no interleaving before 0.18")
    with megatron_on_cpu(), torch.compiler.set_stance("force_eager"):
        experts = _experts(case)
        torch.manual_seed(0)
        rows, probs = torch.randn(6, 32, dtype=torch.bfloat16), torch.rand(6)
        fused, native = (rows.clone().requires_grad_() for _ in range(2))
        expected, _ = experts(native, torch.tensor([2, 4]), probs)
        result = activate_experts(experts, fused, probs.unsqueeze(-1))
        weights = torch.randn(expected.shape)
        (expected * weights).sum().backward()
        (result * weights).sum().backward()
    assert torch.equal(result, expected) and torch.equal(fused.grad, native.grad)


def test_a_clamp_matters_where_megatron_applies_it() -> None:
    """Up to 0.19 the fused SwiGLU is not clamped, whatever the configuration says."""
    rows, probs = 4 * torch.randn(6, 32, dtype=torch.bfloat16), torch.rand(6, 1)
    with megatron_on_cpu(), torch.compiler.set_stance("force_eager"):
        clamped, plain = (activate_experts(_experts(CASES[name]), rows, probs) for name in ("swiglu, clamp", "swiglu"))
    is_clamped = "clamp_value" in inspect.signature(weighted_bias_swiglu_impl).parameters
    assert torch.equal(clamped, plain) == (not is_clamped)
