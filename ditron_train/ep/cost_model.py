"""Estimates of a mixture of experts with even routing: dispatch, combine, grouped GEMMs, the layer.

native    permutes every (token, expert) copy, exchanges all copies, sorts them by expert; and back
fused     sends a token once to each rank; rows of the second product return while it is computed

Across nodes only the native path is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ditron_train.costs.estimate import Estimate
from ditron_train.costs.exchanges import Span, all_to_all_us, beside_us
from ditron_train.costs.fp8 import Product, Recipe, operands, product_rates
from ditron_train.costs.products import grouped_us, pass_us
from ditron_train.data.device_profiles import Machine
from ditron_train.data.rates import MachineRates

_ITEMSIZE = 2
_LAYOUT_US = 1.0  # of each expert: how many rows it gets is counted, exchanged and added up
_RETURN_US = 33.0  # from the experts' last row to the first on its way
_PLACE_SHARE = 0.3  # of the shorter one is what arriving rows and writing them out for each expert cost each other
# Of the shorter one is what a product and the return of its rows cost each other: 16 programs send.
_COMBINE_SHARE = 0.45
_ROUTER_RATE = 1 / 16  # of a bf16 GEMM's rate is that of one in fp32
# Natively under PyTorch's deterministic mode: a token's rows are added up one by one, in so many of the usual passes.
_DETERMINISTIC_SUM = 5.3


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
        """Bytes of one token."""
        return self.hidden * _ITEMSIZE

    @property
    def products(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Output and input features of an expert's two weights."""
        return (self.ffn * (2 if self.swiglu else 1), self.hidden), (self.hidden, self.ffn)


@dataclass(frozen=True)
class Load:
    """The work of a rank under a routing.

    Attributes:
        rows: Rows of each of its experts.
        copies: (token, expert) rows on the link of a rank.
        distinct: (token, rank) rows on the link of a rank.
        sent: (token, expert) rows that one rank sends, including those to itself.
    """

    rows: tuple[float, ...]
    copies: float
    distinct: float
    sent: float


@lru_cache(maxsize=256)
def even_load(experts: Experts, ranks: int) -> Load:
    """The load if all experts are equally likely."""
    local = experts.count // ranks
    sent = experts.tokens * experts.topk
    missed = math.comb(experts.count - local, experts.topk) / math.comb(experts.count, experts.topk)
    others = ranks - 1
    return Load((sent / local,) * local, sent * others / ranks, experts.tokens * (1 - missed) * others, sent)


def _copies_us(load: Load, experts: Experts, span: Span, rates: MachineRates) -> float:
    """Time of NCCL's all-to-all of the busiest rank's copies."""
    whole = load.copies * span.ranks / max(span.ranks - 1, 1)
    return all_to_all_us(whole * experts.row_bytes, span, rates)


def _passes_us(load: Load, experts: Experts, rates: MachineRates) -> tuple[float, float]:
    """Times to permute a rank's tokens into copies, or back, and to sort what arrived by expert."""
    sent = pass_us((load.sent + experts.tokens) * experts.row_bytes, rates)
    sorted_us = pass_us(2 * sum(load.rows) * experts.row_bytes, rates) if len(load.rows) > 1 else 0.0
    return sent, sorted_us


def dispatch(
    load: Load, experts: Experts, span: Span, rates: MachineRates, *, deterministic: bool = False
) -> Estimate:
    """Time from tokens to the rows of their experts; ``deterministic``: PyTorch fills new tensors."""
    layout_us = _LAYOUT_US * experts.count
    native_us = layout_us + _copies_us(load, experts, span, rates) + sum(_passes_us(load, experts, rates))
    native_us += pass_us(load.sent * experts.row_bytes, rates) if deterministic else 0.0
    if span.network is not None:
        return Estimate.alike(native_us)
    # Rows leave before the handle is known and arrive once; after it they are written out for each expert of the rank.
    placed_us = layout_us + pass_us(sum(load.rows) * experts.row_bytes, rates, reorders=True)
    fused_us = beside_us(placed_us, load.distinct * experts.row_bytes / (rates.link_gbps * 1e3), _PLACE_SHARE)
    return Estimate(native_us, fused_us)


def combine(load: Load, experts: Experts, span: Span, rates: MachineRates, *, deterministic: bool = False) -> Estimate:
    """Time of returning rows to their tokens and of the sums; ``deterministic``: in PyTorch's deterministic mode."""
    sums_us, sorted_us = _passes_us(load, experts, rates)
    passes = _DETERMINISTIC_SUM if deterministic else 1.0
    native_us = _copies_us(load, experts, span, rates) + sorted_us + passes * sums_us
    if span.network is not None:
        return Estimate.alike(native_us)
    fused_us = _RETURN_US + load.copies * experts.row_bytes / (rates.link_gbps * 1e3)
    fused_us += pass_us((load.sent + experts.tokens) * experts.row_bytes, rates)
    return Estimate(native_us, fused_us)


def expert_product(
    rows: Sequence[float],
    n: int,
    k: int,
    machine: Machine,
    rates: MachineRates,
    *,
    product: Product = "forward",
    fp8: Recipe | None = None,
) -> float:
    """Time in us of the products of each local expert [n, k] with its rows: forward, dgrad or wgrad."""
    counts = [max(round(row), 1) for row in rows]
    groups = [(n, k, count) if product == "wgrad" else (count, n, k) for count in counts]
    return grouped_us(groups, machine, product_rates(rates, fp8, product), operands(fp8))


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
) -> tuple[Estimate, Estimate, float]:
    """Time in us of forward or backward of a layer: dispatch and combine, the experts' products, and what both paths
    share (router, activation). ``fp8``: of the experts; tokens are sent in 16 bits."""
    (n1, k1), (n2, k2) = experts.products
    num_rows = sum(load.rows)
    alike_us = _router_us(experts, rates) * (2 if backward else 1)
    alike_us += pass_us(num_rows * (n1 + k2) * _ITEMSIZE * (2 if backward else 1), rates)
    if deterministic:
        alike_us += pass_us(num_rows * ((k1 + k2) if backward else (n1 + n2)) * _ITEMSIZE, rates)
    returning = combine(load, experts, span, rates, deterministic=deterministic)
    moved = dispatch(load, experts, span, rates, deterministic=deterministic) + returning
    passes: tuple[Product, ...] = ("dgrad", "wgrad") if backward else ("forward",)
    each = [
        expert_product(load.rows, n, k, machine, rates, product=product, fp8=fp8)
        for product in passes
        for n, k in experts.products
    ]
    products = Estimate.alike(sum(each))
    if not backward and span.network is None:  # the second product's rows return while it is computed
        hidden_us = each[1] + returning.ditron_us - beside_us(each[1], returning.ditron_us, _COMBINE_SHARE)
        products = replace(products, ditron_us=products.ditron_us - hidden_us)
    return moved, products, alike_us


def _router_us(experts: Experts, rates: MachineRates) -> float:
    flops = 2.0 * experts.tokens * experts.hidden * experts.count
    cast_us = pass_us(3 * experts.tokens * experts.row_bytes, rates)
    return cast_us + flops / (_ROUTER_RATE * rates.gemm_flop_per_us)
