"""The native side of ``bench ep``: megatron-core's alltoall dispatcher and MoE layer, beside the same with ``ep``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import build_module

from ditron_train.cpu import megatron_shim as megatron_cpu
from ditron_train.megatron import apply, restore
from ditron_train.megatron.ep.dispatcher import DitronMoEAlltoAllTokenDispatcher

__all__ = ["DispatcherPair", "expert_parallel_world", "layer_pair", "moe_config", "zipf_routing"]


@contextmanager
def expert_parallel_world() -> Iterator[None]:
    """Megatron's groups with all ranks in one expert-parallel group; without a GPU megatron-core is made to run
    there."""
    if not torch.cuda.is_available():
        megatron_cpu.install()
    elif not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router asks whether it is None, and the name exists only with TE
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    megatron_cpu.seed(1234)
    try:
        yield
    finally:
        restore()
        parallel_state.destroy_model_parallel()
        megatron_cpu.uninstall()


def moe_config(
    *,
    hidden: int,
    ffn_hidden: int,
    num_experts: int,
    topk: int,
    dtype: torch.dtype,
    fused: bool | None = None,
    **others: Any,
) -> TransformerConfig:
    """A MoE layer as it is trained: SwiGLU, router in fp32; fused permutation where Transformer Engine is installed.

    ``others`` are fields of ``TransformerConfig`` that replace these.
    """
    on_cpu = not torch.cuda.is_available()
    fields = dict(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=ffn_hidden,
        moe_ffn_hidden_size=ffn_hidden,
        num_attention_heads=1,
        num_moe_experts=num_experts,
        moe_router_topk=topk,
        moe_router_dtype="fp32",
        moe_router_pre_softmax=topk == 1,  # megatron-core insists: the softmax of one score is 1
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=HAVE_TE,
        moe_permute_fusion=HAVE_TE if fused is None else fused,
        expert_model_parallel_size=dist.get_world_size(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=HAVE_TE,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=on_cpu,
    )
    return TransformerConfig(**{**fields, **others})


def zipf_routing(
    num_tokens: int, num_experts: int, topk: int, *, exponent: float, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A routing map and its probabilities: expert i is drawn in proportion to (i' + 1) ** -exponent, i' a shuffle of
    i.

    Returns:
        bool [num_tokens, num_experts] with ``topk`` True a row; fp32 probabilities, 0 where not routed.
    """
    order = torch.randperm(
        num_experts, generator=torch.Generator().manual_seed(1)
    )  # the same popular experts on every rank
    popularity = (order + 1.0).pow(-exponent).log().to(device)
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.empty(num_tokens, num_experts, device=device).uniform_(1e-6, 1 - 1e-6, generator=generator)
    scores = popularity - (-uniform.log()).log()  # Gumbel: sampling without replacement
    routed = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device=device)
    routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
    probs = torch.where(routed, uniform, 0.0)
    return routed, probs / probs.sum(1, keepdim=True)


class DispatcherPair:
    """A native and one of our dispatchers for the same configuration, driven method by method as ``MoELayer`` does."""

    def __init__(self, config: TransformerConfig) -> None:
        local = config.num_moe_experts // dist.get_world_size()
        first = dist.get_rank() * local
        arguments = (local, list(range(first, first + local)))
        keywords = dict(config=config, pg_collection=get_default_pg_collection())
        self.native = MoEAlltoAllTokenDispatcher(*arguments, **keywords)
        self.ditron = DitronMoEAlltoAllTokenDispatcher(*arguments, **keywords)

    def __getitem__(self, name: str) -> MoEAlltoAllTokenDispatcher:
        return {"native": self.native, "ditron": self.ditron}[name]

    def dispatch(
        self, name: str, x: torch.Tensor, routed: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens to the experts' rows: rows, tokens per expert, probabilities."""
        dispatcher = self[name]
        return dispatcher.dispatch_postprocess(
            *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routed, probs))
        )

    def combine(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The experts' rows back to tokens."""
        dispatcher = self[name]
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))


def layer_pair(config: TransformerConfig, device: torch.device) -> dict[str, torch.nn.Module]:
    """The MoE layer, native and with ``ep``, with equal weights."""
    spec = get_moe_module_spec(use_te=HAVE_TE, num_experts=config.num_moe_experts, moe_grouped_gemm=HAVE_TE)
    layers = {}
    for name, tree in (("native", spec), ("ditron", apply(spec, ("ep",)))):
        megatron_cpu.seed(1234)
        layers[name] = build_module(tree, config=config, layer_number=1).to(device)
    layers["ditron"].load_state_dict(layers["native"].state_dict())
    return layers
