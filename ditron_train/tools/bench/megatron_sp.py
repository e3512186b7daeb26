"""The attention layer of ``bench sp``: Megatron's self-attention with Transformer Engine's ``a2a``, native and with
``sp``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import build_module

from ditron_train.cpu import megatron_shim as megatron_cpu
from ditron_train.gemm.configs import choose_config
from ditron_train.megatron import apply
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.device import kernel_target
from ditron_train.runtime.device import num_sms as num_sms_of
from ditron_train.sp import transfer_sizes as tuning
from ditron_train.tools.bench.layer_passes import LayerPasses, contenders
from ditron_train.tools.fp8.recipes import fp8_options
from ditron_train.tools.layer_config import layer_config
from ditron_train.tools.results import FP8_PREFIX, Row
from ditron_train.tools.session import BenchSession

_LENGTHS = (16384, 32768, 65536)
_TRACED_LENGTH = 16384
_MOST_ROWS = 8192  # of a rank: more, and the deterministic backward of the attention does not fit in 140 GB
_DETERMINISM = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def _build(session: BenchSession, fused: bool, fp8: str | None) -> torch.nn.Module:
    sizes = dict(hidden_size=8192, num_attention_heads=64, num_query_groups=8, normalization="RMSNorm")
    parallel = dict(context_parallel_size=session.world_size, cp_comm_type="a2a")
    config = layer_config(torch.bfloat16, **sizes, **parallel, **fp8_options(fp8))
    spec = get_gpt_layer_with_transformer_engine_spec().submodules.self_attention
    megatron_cpu.seed(1234)
    layer = build_module(
        apply(spec, "sp", policy="force") if fused else spec, config=config, layer_number=1, cp_comm_type="a2a"
    )
    return layer.cuda(session.device).to(torch.bfloat16)


def _pair(session: BenchSession, deterministic: bool, fp8: str | None = None) -> dict[str, torch.nn.Module]:
    """Native and fused, with the same weights."""
    # What the attentions do in backward: they read the environment once, when they are built.
    with mock.patch.dict(os.environ, {_DETERMINISM: "0" if deterministic else "1"}):
        layers = {"native": _build(session, False, fp8), "fused": _build(session, True, fp8)}
    layers["fused"].load_state_dict(layers["native"].state_dict())
    return layers


class _Given(torch.autograd.Function):
    """Stands where an exchange is: hands ``outputs`` on, and backwards ``grad``, and moves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grad: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.grad, ctx.num_outputs = grad, len(outputs)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("a stand-in for an exchange")
        return ctx.grad, *(None,) * (1 + ctx.num_outputs)


class _WithoutExchanges:
    """The native layer with nothing moved between ranks: its norm, projections and attention, on data of their own.

    Args:
        layers: Native and fused, whose attention of the whole sequence is called.
        values: Makes a random tensor of a shape.
        length: Tokens of all ranks.
        world_size: Ranks.
    """

    def __init__(
        self, layers: dict[str, Any], values: Callable[..., torch.Tensor], length: int, world_size: int
    ) -> None:
        self._native, self._attend = layers["native"], layers["fused"].core_attention.attend
        self.parameters = self._native.parameters
        self._parts = [values(length, 1, heads // world_size, 128) for heads in (64, 8, 8)]
        self._gathered = values(length // world_size, 1, 8192)
        self._grad_mixed = values(length // world_size, 1, 10240)
        self._grad_attended = values(length, 1, 8192 // world_size)

    def __call__(self, x: torch.Tensor, attention_mask: None) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = _Given.apply(self._native.linear_qkv(x)[0], self._grad_mixed, *self._parts)
        (gathered,) = _Given.apply(self._attend(*parts), self._grad_attended, self._gathered)
        return self._native.linear_proj(gathered)


def attention_rows(session: BenchSession, fp8: str | None = None) -> Iterator[Row]:
    """Forward, and forward + backward, of the layer at each length that fits.

    Bits are compared with deterministic attention (its backward takes memory that grows with the square of the length:
    if it does not fit, the length is left out), times with the attention that Megatron uses by default. The limit
    is the time of the same layer without any exchange.
    """
    with megatron_cpu.parallel_groups(context_parallel_size=session.world_size):
        exact, fast = _pair(session, True, fp8), _pair(session, False, fp8)
        for length in _LENGTHS:
            if length > _MOST_ROWS * session.world_size:
                continue
            yield from _rows_of(session, exact, fast, length, fp8)


def _comm_sms(session: BenchSession, m: int) -> int:
    """The most that a projection of m local rows keeps for moving data: all of it pulls, or pushes before it
    multiplies."""
    target, num_sms = kernel_target(session.device), num_sms_of(session.device)
    config = choose_config(m, 8192, 8192, torch.bfloat16, target, num_sms)
    push, _ = tuning.deal_of(m, 8192, 8192, session.world_size, config, num_sms, 2)
    return max(push, tuning.receive_programs(m, 10240, 8192, 2))


def _values(session: BenchSession) -> Callable[..., torch.Tensor]:
    """Makes random tensors, one after the other."""
    generator = torch.Generator(session.device).manual_seed(session.rank)
    return lambda *shape: torch.empty(shape, device=session.device, dtype=torch.bfloat16).normal_(generator=generator)


def _passes(layers: dict[str, Any], values: Callable[..., torch.Tensor], num_rows: int) -> LayerPasses:
    x, grad = values(num_rows, 1, 8192), values(num_rows, 1, 8192)
    return LayerPasses(layers["native"].config, x, grad, attention_mask=None)


@contextlib.contextmanager
def attention_contenders(
    session: BenchSession, fp8: str | None = None
) -> Iterator[dict[str, Callable[[int], list[torch.Tensor]]]]:
    """Forward and backward of the layer, ``native`` and ``fused``, on the same values."""
    with megatron_cpu.parallel_groups(context_parallel_size=session.world_size):
        layers = _pair(session, False, fp8)
        passes = _passes(layers, _values(session), _TRACED_LENGTH // session.world_size)
        yield contenders(passes.forward_backward, layers)


def _rows_of(
    session: BenchSession,
    exact: dict[str, torch.nn.Module],
    fast: dict[str, torch.nn.Module],
    length: int,
    fp8: str | None,
) -> Iterator[Row]:
    values, num_rows = _values(session), length // session.world_size
    for direction, run in _passes(fast, values, num_rows).both():
        what, compared = f"attention layer, {direction}, {length} tokens", contenders(run, exact)
        if not all(session.attempt(f"{what}, {name}", body) for name, body in compared.items()):
            torch.cuda.empty_cache()
            continue
        equal = session.equal_layer("sp", compared["fused"], compared["native"])
        torch.cuda.empty_cache()
        limit = _WithoutExchanges(fast, values, length, session.world_size)
        timings = session.measure(contenders(run, {**fast, "limit": limit}))
        yield session.row(
            "attention_layer", direction, "64 heads, 8 groups",
            {"seqlen": length, "hidden": 8192, "heads": 64, "groups": 8},
            timings, equal,
            dtype=torch.bfloat16 if fp8 is None else FP8_PREFIX + fp8,
            comm_sms=_comm_sms(session, num_rows),
            limit_us=timings["limit"].median_us,
        )  # fmt: skip
