"""Estimates of Ulysses: the projections with their exchanges, forward and backward, natively and fused.

native    packs, exchanges and reorders part by part, overlapping with nothing
GEMM-A2A  some multiprocessors pull what the others have computed
A2A-GEMM  some push first, the others begin with rows that are there
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ditron_train.costs.estimate import Estimate
from ditron_train.costs.exchanges import Span, all_to_all_us, ring_us
from ditron_train.costs.products import cublas_us, num_waves, pass_us
from ditron_train.data.device_profiles import Machine
from ditron_train.data.rates import MachineRates
from ditron_train.gemm.configs import choose_config
from ditron_train.sp.transfer_sizes import NUM_PUSH, Pace, receive_programs, weighed_deal

_ITEMSIZE = 2
_PUSH_OF_LINK = 0.865  # of a copy engine's rate is the most that the programs of a GEMM push together
_PASSES = 2  # of what is exchanged: packed before, put in order behind


@dataclass(frozen=True)
class AttentionSizes:
    """Tokens of one rank; the width of the model, heads and groups of all ranks, and the width of a head."""

    tokens: int
    hidden: int
    heads: int
    groups: int
    channels: int

    @property
    def columns(self) -> int:
        """Of q, k and v together."""
        return (self.heads + 2 * self.groups) * self.channels

    @property
    def width(self) -> int:
        """Of what the attention gives."""
        return self.heads * self.channels


def exchanged_us(num_bytes: float, num_parts: int, span: Span, rates: MachineRates) -> float:
    """Native: all-to-alls of ``num_parts``, which hold ``num_bytes`` of a rank together, packed and put in order.

    The packing of a part overlaps with the part before; what is measured together is close to the sum.
    """
    if span.ranks == 1:
        return 0.0
    latency_us = all_to_all_us(0.0, span, rates)
    moved_us = all_to_all_us(num_bytes, span, rates) - latency_us
    return num_parts * latency_us + moved_us + _PASSES * pass_us(2 * num_bytes, rates, reorders=True)


def _pulled_us(gemm_us: float, sizes: tuple[int, int, int], machine: Machine, rates: MachineRates) -> float:
    """GEMM-A2A [m, k] @ [k, n], whose output changes places."""
    m, n, k = sizes
    num_pull = receive_programs(m, n, k, _ITEMSIZE)
    pull_us = rates.start_us + m * n * _ITEMSIZE / (num_pull * rates.pull_sm_gbps * 1e3)
    return max(gemm_us * machine.num_sms / (machine.num_sms - num_pull), pull_us) + rates.start_us


def _pushed_us(
    gemm_us: float, sizes: tuple[int, int, int], ranks: int, machine: Machine, rates: MachineRates
) -> float:
    """A2A-GEMM [m, k] @ [k, n], whose rows come from all ranks."""
    m, n, k = sizes
    config, programs = choose_config(m, n, k, torch.bfloat16, machine.target, machine.num_sms), machine.num_sms
    wave_us = gemm_us / num_waves(m, n, config, programs)
    pace = Pace(
        flop_per_us=2 * config.block_m * config.block_n * k * programs / wave_us,
        push_bytes_per_us=rates.gemm_push_sm_gbps * 1e3,
        link_bytes_per_us=_PUSH_OF_LINK * rates.link_gbps * 1e3,
        start_us=rates.start_us,
    )
    return weighed_deal(m, n, k, ranks, config, programs, _ITEMSIZE, NUM_PUSH, pace)[2] + rates.start_us


def exchange(num_bytes: float, num_parts: int, span: Span, rates: MachineRates) -> Estimate:
    """An exchange without a projection takes as long on both paths."""
    return Estimate.alike(exchanged_us(num_bytes, num_parts, span, rates))


def gathers(
    num_bytes: float, length: int, window: tuple[int, int] | None, span: Span, rates: MachineRates
) -> tuple[Estimate, Estimate]:
    """Forward and backward of an attention that gathers keys and values, ``num_bytes`` of all ranks together.

    Natively two gathers, each put in order; in backward also zeros, two additions, an order of ranks and a
    reduce-scatter for both. Fused, the rows that the rank needs that needs most of them: all, or those of a window
    before each of two chunks; and one addition. No overlap is counted.
    """
    moved_us = 2 * ring_us(num_bytes / 2, span, rates)
    native_us = moved_us + 2 * pass_us(num_bytes, rates, reorders=True)
    forward = Estimate.alike(native_us)
    backward = Estimate.alike(2 * native_us + pass_us(4 * num_bytes, rates))
    if span.nodes > 1:
        return forward, backward
    others = length * (span.ranks - 1) / span.ranks
    share = min(2 * window[0] / others, 1.0) if window is not None and window[0] >= 0 else 1.0
    fused_us = ring_us(num_bytes * share, span, rates)
    fused_back_us = 2 * fused_us + pass_us(2 * num_bytes, rates)
    return replace(forward, ditron_us=fused_us), replace(backward, ditron_us=fused_back_us)


def _of(gemm_us: float, passes_us: float, moved: Estimate, fused_us: float, span: Span) -> Estimate:
    """Fused inside a node; across nodes projections are Megatron's. ``passes_us``: natively around the exchange."""
    unfused = Estimate.alike(gemm_us + passes_us) + moved
    return unfused if span.nodes > 1 else replace(unfused, ditron_us=fused_us)


def qkv_forward(sizes: AttentionSizes, span: Span, machine: Machine, rates: MachineRates) -> Estimate:
    """The first projection, then q, k and v to the ranks of their heads."""
    gemm_us = cublas_us(sizes.tokens, sizes.columns, sizes.hidden, machine, rates)
    if span.ranks == 1:
        return Estimate.alike(gemm_us)
    num_bytes = sizes.tokens * sizes.columns * _ITEMSIZE
    split_us = pass_us(2 * num_bytes, rates) if sizes.groups < sizes.heads else 0.0  # q is between k and v
    fused_us = _pulled_us(gemm_us, (sizes.tokens, sizes.columns, sizes.hidden), machine, rates)
    return _of(gemm_us, split_us, exchange(num_bytes, 3, span, rates), fused_us, span)


def output_forward(sizes: AttentionSizes, span: Span, machine: Machine, rates: MachineRates) -> Estimate:
    """What was attended back to the ranks of its tokens, then the second projection."""
    gemm_us = cublas_us(sizes.tokens, sizes.hidden, sizes.width, machine, rates)
    if span.ranks == 1:
        return Estimate.alike(gemm_us)
    moved = exchange(sizes.tokens * sizes.width * _ITEMSIZE, 1, span, rates)
    shape = (sizes.tokens, sizes.hidden, sizes.width)
    return _of(gemm_us, 0.0, moved, _pushed_us(gemm_us, shape, span.ranks, machine, rates), span)


def qkv_backward(sizes: AttentionSizes, span: Span, machine: Machine, rates: MachineRates) -> Estimate:
    """dq, dk and dv back, then dgrad and wgrad of the first projection."""
    dgrad_us = cublas_us(sizes.tokens, sizes.hidden, sizes.columns, machine, rates)
    wgrad_us = cublas_us(sizes.columns, sizes.hidden, sizes.tokens, machine, rates)
    if span.ranks == 1:
        return Estimate.alike(dgrad_us + wgrad_us)
    num_bytes = sizes.tokens * sizes.columns * _ITEMSIZE
    shape = (sizes.tokens, sizes.hidden, sizes.columns)
    fused_us = _pushed_us(dgrad_us, shape, span.ranks, machine, rates) + wgrad_us
    joined_us = pass_us(2 * num_bytes, rates)
    return _of(dgrad_us + wgrad_us, joined_us, exchange(num_bytes, 3, span, rates), fused_us, span)


def output_backward(sizes: AttentionSizes, span: Span, machine: Machine, rates: MachineRates) -> Estimate:
    """dgrad of the second projection to the ranks of the heads, then wgrad."""
    dgrad_us = cublas_us(sizes.tokens, sizes.width, sizes.hidden, machine, rates)
    wgrad_us = cublas_us(sizes.hidden, sizes.width, sizes.tokens, machine, rates)
    if span.ranks == 1:
        return Estimate.alike(dgrad_us + wgrad_us)
    moved = exchange(sizes.tokens * sizes.width * _ITEMSIZE, 1, span, rates)
    fused_us = _pulled_us(dgrad_us, (sizes.tokens, sizes.width, sizes.hidden), machine, rates) + wgrad_us
    return _of(dgrad_us + wgrad_us, 0.0, moved, fused_us, span)
