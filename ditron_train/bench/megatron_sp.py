"""The attention layer of ``bench sp``: Megatron's self-attention with Transformer Engine's ``a2a``, native and with ``sp``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module

from ditron_train.bench.rows import Row
from ditron_train.bench.session import BenchSession
from ditron_train.megatron import apply, restore
from ditron_train.testing import megatron_cpu

__all__ = ["attention_rows"]

_LENGTHS = (16384, 32768, 65536)


def _build(session: BenchSession, ours: bool) -> torch.nn.Module:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8192,
        num_attention_heads=64,
        num_query_groups=8,
        context_parallel_size=session.world_size,
        cp_comm_type="a2a",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_with_transformer_engine_spec().submodules.self_attention
    megatron_cpu.seed(1234)
    layer = build_module(apply(spec, "sp", policy="force") if ours else spec, config=config, layer_number=1, cp_comm_type="a2a")
    return layer.cuda(session.device).to(torch.bfloat16)


def attention_rows(session: BenchSession) -> Iterator[Row]:
    """Forward, and forward + backward, of the layer at each length that fits (deterministic attention takes much memory)."""
    parallel_state.initialize_model_parallel(context_parallel_size=session.world_size)
    try:
        layers = {"native": _build(session, False), "ditron": _build(session, True)}
        layers["ditron"].load_state_dict(layers["native"].state_dict())
        for length in _LENGTHS:
            yield from _rows_of(session, layers, length)
    finally:
        restore()
        parallel_state.destroy_model_parallel()


def _rows_of(session: BenchSession, layers: dict[str, torch.nn.Module], length: int) -> Iterator[Row]:
    generator = torch.Generator(session.device).manual_seed(session.rank)
    shape = (length // session.world_size, 1, 8192)
    x, grad = (torch.empty(shape, device=session.device, dtype=torch.bfloat16).normal_(generator=generator) for _ in range(2))

    def forward(name: str) -> list[torch.Tensor]:
        with torch.no_grad():
            return [layers[name](x, attention_mask=None)[0]]

    def forward_backward(name: str) -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y, _ = layers[name](leaf, attention_mask=None)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *layers[name].parameters()], grad)]

    for direction, body in (("forward", forward), ("forward_backward", forward_backward)):
        what = f"attention layer, {direction}, {length} tokens"
        if not all(session.attempt(f"{what}, {name}", lambda index, n=name: body(n)) for name in ("native", "ditron")):
            torch.cuda.empty_cache()
            continue
        equal = session.equal(body("ditron"), body("native"))
        timings = session.measure({name: lambda index, n=name: body(n) for name in layers})
        yield Row(
            op="attention_layer",
            direction=direction,
            model="64 heads, 8 groups",
            world_size=session.world_size,
            dtype="bfloat16",
            shape={"seqlen": length, "hidden": 8192, "heads": 64, "groups": 8},
            native_us=timings["native"].median_us,
            ditron_us=timings["ditron"].median_us,
            bitwise_equal=equal,
            comm_sms=8,
            spread=max(timing.spread for timing in timings.values()),
        )
