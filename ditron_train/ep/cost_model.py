"""Estimates of a mixture of experts: who sends how much for a routing, dispatch, combine, grouped GEMMs, the layer.

native    permutes every (token, expert) copy, exchanges all of them, sorts them by expert; and back
fused     a token leaves once for each rank; the second product's rows return while it is computed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ditron_train.costs import (
    Estimate,
    Recipe,
    Span,
    all_to_all_us,
    beside_us,
    grouped_us,
    operands,
    pass_us,
    product_rates,
    rail_us,
)
from ditron_train.runtime.profiles import Machine
from ditron_train.runtime.rates import MachineRates, NetworkRates

_ITEMSIZE = 2
_LAYOUT_US = 1.0  # of each expert: how many rows it gets is counted, exchanged and added up
_RETURN_US = 33.0  # from the experts' last row to the first on its way
_ADDED = 12  # bytes of memory traffic for each of a row that PyTorch's operators add to its token's sum, in fp32
_PLACE_SHARE = 0.3  # of the shorter one is what arriving rows and writing them out for each expert cost each other
_COMBINE_SHARE = (
    0.45  # of the shorter one is what a product and the return of its rows cost each other: 16 programs send
)
_ROUTER_RATE = 1 / 16  # of a bf16 GEMM's rate is that of one in fp32
_FUSED_HOST = 0.65  # of the host's time natively: fewer calls
# Natively under PyTorch's deterministic mode: a token's rows are added up one by one, in so many of the usual passes.
_DETERMINISTIC_SUM = 5.3
_SAMPLED_TOKENS = 2048  # of a rank: the shares of a skewed routing are known within a percent from so many


@dataclass(frozen=True)
class Experts:
    """A MoE layer: tokens of each rank, widths, experts of all ranks, and how many of them a token takes."""

    tokens: int
    hidden: int
    ffn: int
    count: int
    topk: int
    swiglu: bool = True

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return self.hidden * _ITEMSIZE

    @property
    def products(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Output and input features of an expert's two weights."""
        return (self.ffn * (2 if self.swiglu else 1), self.hidden), (self.hidden, self.ffn)


@dataclass(frozen=True)
class Load:
    """What a routing makes the busiest rank do.

    Attributes:
        rows: Of each of its experts.
        copies: (token, expert) rows on the link of the rank that sends or receives most.
        distinct: (token, rank) rows there.
        sent: (token, expert) rows that one rank sends, its own among them.
    """

    rows: tuple[float, ...]
    copies: float
    distinct: float
    sent: float


@lru_cache(maxsize=256)
def even_load(experts: Experts, ranks: int) -> Load:
    """Every expert is as likely as the others."""
    local = experts.count // ranks
    sent = experts.tokens * experts.topk
    missed = math.comb(experts.count - local, experts.topk) / math.comb(experts.count, experts.topk)
    others = ranks - 1
    return Load((sent / local,) * local, sent * others / ranks, experts.tokens * (1 - missed) * others, sent)


@lru_cache(maxsize=256)
def skewed_load(experts: Experts, ranks: int, exponent: float, order: tuple[int, ...]) -> Load:
    """Expert i is drawn in proportion to (``order[i]`` + 1) ** -``exponent``, without replacement; from a sample."""
    tokens = min(experts.tokens, _SAMPLED_TOKENS)
    scores = -exponent * np.log(np.asarray(order) + 1.0)
    noise = np.random.default_rng(0).gumbel(size=(tokens, experts.count))
    chosen = np.argpartition(-(scores + noise), experts.topk - 1, axis=1)[:, : experts.topk]
    scale = experts.tokens / tokens
    of_expert = np.bincount(chosen.ravel(), minlength=experts.count) * scale
    of_rank = of_expert.reshape(ranks, -1)
    busiest = int(of_rank.sum(1).argmax())
    reached = np.zeros((tokens, ranks), dtype=bool)
    np.put_along_axis(reached, chosen // (experts.count // ranks), True, axis=1)
    distinct = reached.sum(0) * scale  # of one rank's tokens, alike on all

    def busiest_link(amounts: np.ndarray) -> float:
        received = amounts.max() * (ranks - 1)
        return float(max(received, amounts.sum() - amounts.min()))

    rows = tuple(of_rank[busiest] * ranks)
    return Load(rows, busiest_link(of_rank.sum(1)), busiest_link(distinct), experts.tokens * experts.topk)


def _copies_us(load: Load, experts: Experts, span: Span, rates: MachineRates) -> float:
    """NCCL's all-to-all of the busiest rank's copies."""
    whole = load.copies * span.ranks / max(span.ranks - 1, 1)
    return all_to_all_us(whole * experts.row_bytes, span, rates)


def _passes_us(load: Load, experts: Experts, rates: MachineRates) -> tuple[float, float]:
    """To permute a rank's tokens into copies, or back; and to sort what arrived by expert."""
    sent = pass_us((load.sent + experts.tokens) * experts.row_bytes, rates)
    sorted_us = pass_us(2 * sum(load.rows) * experts.row_bytes, rates) if len(load.rows) > 1 else 0.0
    return sent, sorted_us


def dispatch(
    load: Load,
    experts: Experts,
    span: Span,
    rates: MachineRates,
    *,
    host_is_ahead: bool = False,
    deterministic: bool = False,
) -> Estimate:
    """Tokens to the rows of their experts; on its own it takes no less than the host needs to enqueue it.

    ``deterministic``: PyTorch fills what it allocates before it is written.
    """
    exchange_us = _copies_us(load, experts, span, rates)
    layout_us = _LAYOUT_US * experts.count
    native_us = layout_us + exchange_us + sum(_passes_us(load, experts, rates))
    native_us += pass_us(load.sent * experts.row_bytes, rates) if deterministic else 0.0
    # Rows leave ahead of the layout and arrive once; behind it they are written out for each expert of the rank.
    placed_us = layout_us + pass_us(sum(load.rows) * experts.row_bytes, rates, reorders=True)
    ours_us = beside_us(placed_us, load.distinct * experts.row_bytes / (rates.link_gbps * 1e3), _PLACE_SHARE)
    if span.network is not None:
        ours_us = _by_rails_us(load, experts, span, span.network, rates)[0]
    whole = Estimate(native_us, ours_us, 0.0, exchange_us)
    return whole if host_is_ahead else whole.at_least(rates.host_moe_us, _FUSED_HOST * rates.host_moe_us)


def combine(load: Load, experts: Experts, span: Span, rates: MachineRates, *, deterministic: bool = False) -> Estimate:
    """Rows of the experts back to their tokens, and their sums; ``deterministic`` as PyTorch's mode."""
    exchange_us = _copies_us(load, experts, span, rates)
    sums_us, sorted_us = _passes_us(load, experts, rates)
    native_us = exchange_us + sorted_us + sums_us * (_DETERMINISTIC_SUM if deterministic else 1.0)
    ours_us = _RETURN_US + load.copies * experts.row_bytes / (rates.link_gbps * 1e3)
    ours_us += pass_us((load.sent + experts.tokens) * experts.row_bytes, rates)
    if span.network is not None:
        ours_us = _by_rails_us(load, experts, span, span.network, rates)[1]
    return Estimate(native_us, ours_us, 0.0, exchange_us).at_least(rates.host_moe_us / 6, 0.0)


def _by_rails_us(
    load: Load, experts: Experts, span: Span, network: NetworkRates, rates: MachineRates
) -> tuple[float, float]:
    """Dispatch and combine over nodes: a token crosses to a node once and is fanned out inside; every row of an expert
    returns inside, crosses, and is added up by PyTorch's operators. What is sent or arrives is put in order."""
    row, rows = experts.row_bytes, sum(load.rows)
    inside, link = (span.per_node - 1) / span.per_node, rates.link_gbps * 1e3
    others = experts.count - experts.count // span.nodes
    missed = math.comb(others, experts.topk) / math.comb(experts.count, experts.topk)
    crossing = experts.tokens * (1 - missed) * (span.nodes - 1) * row
    ordered_us = pass_us(2 * rows * row, rates, reorders=True)
    placed_us = _LAYOUT_US * experts.count + pass_us(rows * row, rates, reorders=True)
    arriving_us = load.distinct * span.ranks / (span.ranks - 1) * inside * row / link
    there_us = pass_us(2 * crossing, rates, reorders=True) + rail_us(crossing, network)
    there_us += beside_us(placed_us, arriving_us, _PLACE_SHARE) + ordered_us
    returned = load.sent * row
    back_us = ordered_us + _RETURN_US + inside * rows * row / link + pass_us(2 * returned, rates, reorders=True)
    back_us += rail_us(returned * (span.nodes - 1) / span.nodes, network) + pass_us(_ADDED * returned, rates)
    return there_us, back_us


def expert_product(
    rows: Sequence[float],
    n: int,
    k: int,
    machine: Machine,
    rates: MachineRates,
    *,
    wgrad: bool = False,
    dgrad: bool = False,
    fp8: Recipe | None = None,
) -> Estimate:
    """A product of each local expert [n, k] with its rows: forward or dgrad, or the weights' gradients."""
    counts = [max(round(one), 1) for one in rows]
    groups = [(n, k, one) if wgrad else (one, n, k) for one in counts]
    of_pass = product_rates(rates, fp8, "wgrad" if wgrad else "dgrad" if dgrad else "forward")
    alike = Estimate.alike(grouped_us(groups, machine, of_pass, operands(fp8)))
    least_us = rates.host_expert_us * len(counts)
    return alike.at_least(least_us, _FUSED_HOST * least_us)


def moe_layer(
    load: Load,
    experts: Experts,
    span: Span,
    machine: Machine,
    rates: MachineRates,
    *,
    backward: bool,
    fp8: Recipe | None = None,
    deterministic: bool = False,
) -> Estimate:
    """Router, dispatch, both products with what stands between them, combine; with ``backward`` that alone. ``fp8`` is
    the experts': tokens travel in 16 bits. ``deterministic``: as `dispatch`; products' results are filled, too."""
    (n1, k1), (n2, k2) = experts.products
    rows, num_rows = load.rows, sum(load.rows)
    router_us = _router_us(experts, rates)
    between = pass_us(num_rows * (n1 + k2) * _ITEMSIZE * (2 if backward else 1), rates)
    if deterministic:
        between += pass_us(num_rows * ((k1 + k2) if backward else (n1 + n2)) * _ITEMSIZE, rates)
    sending = dispatch(load, experts, span, rates, host_is_ahead=True, deterministic=deterministic)
    returning = combine(load, experts, span, rates, deterministic=deterministic)
    first = expert_product(rows, n1, k1, machine, rates, dgrad=backward, fp8=fp8)
    second = expert_product(rows, n2, k2, machine, rates, dgrad=backward, fp8=fp8)
    moved = sending + returning
    if span.nodes > 1 and moved.ditron_us > moved.native_us:
        moved = moved.natively()
    whole = Estimate.alike(router_us + between) + moved + first + second
    if backward:
        gradients = expert_product(rows, n1, k1, machine, rates, wgrad=True, fp8=fp8)
        gradients += expert_product(rows, n2, k2, machine, rates, wgrad=True, fp8=fp8)
        return (whole + Estimate.alike(router_us) + gradients).at_least(*host_us(rates, 2.0))
    hidden_us = second.ditron_us + returning.ditron_us
    hidden_us -= beside_us(second.ditron_us, returning.ditron_us, _COMBINE_SHARE)
    whole += Estimate(0.0, -hidden_us if span.nodes == 1 else 0.0, 0.0)
    return whole.at_least(*host_us(rates, 1.0))


def _router_us(experts: Experts, rates: MachineRates) -> float:
    flops = 2.0 * experts.tokens * experts.hidden * experts.count
    cast_us = pass_us(3 * experts.tokens * experts.row_bytes, rates)
    return cast_us + flops / (_ROUTER_RATE * rates.gemm_flop_per_us)


def host_us(rates: MachineRates, passes: float) -> tuple[float, float]:
    """What the host needs to enqueue a layer's parts but its products, one by one; ours in fewer calls. A small layer
    takes no less. ``passes``: 1 forward, 2 backward."""
    return 2.2 * passes * rates.host_moe_us, 2.2 * _FUSED_HOST * passes * rates.host_moe_us
