"""Estimates of tensor parallel linear layers, forward and backward, on the groups of a node and across nodes.

    column   forward: all-gather, GEMM. Backward: the gather anew beside dgrad, the reduce-scatter beside wgrad
    row      forward: GEMM, reduce-scatter. Backward: all-gather, dgrad, wgrad

Across nodes Megatron's path is NCCL's, and the fused path goes along rails where that is quicker (`tp.nodes`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ditron_train.costs import (
    FP8_TARGETS,
    Estimate,
    Product,
    Recipe,
    Span,
    beside_us,
    copied_us,
    cublas_us,
    one_node,
    operands,
    pass_us,
    product_rates,
    rail_us,
    ring_us,
)
from ditron_train.runtime.profiles import Machine
from ditron_train.runtime.rates import MachineRates, NetworkRates
from ditron_train.tp.choices import Layout, Op, Problem, choose, predict

Kind = Literal["column", "row"]
_ITEMSIZE = 2


def op_estimate(problem: Problem, machine: Machine, rates: MachineRates) -> Estimate:
    """AG-GEMM or GEMM-RS inside a node, as `tp.choices` runs it."""
    return predict(problem, choose(problem, machine), machine, rates)


def _op(
    op: Op,
    m: int,
    n: int,
    k: int,
    layout: Layout,
    span: Span,
    machine: Machine,
    rates: MachineRates,
    fp8: Recipe | None = None,
    product: Product = "forward",
) -> Estimate:
    """``n`` and ``k`` as one rank sees them."""
    dtype, rates = operands(fp8), product_rates(rates, fp8, product)
    gemm_us = cublas_us(m, n, k, machine, rates, dtype)
    if span.ranks == 1:
        return Estimate.alike(gemm_us)
    if span.nodes == 1 and (fp8 is None or machine.target in FP8_TARGETS):
        problem = Problem(op, m, n, k, layout if fp8 is None else "nt", dtype, span.ranks)
        return op_estimate(problem, machine, rates)
    passes = 2 if op == "gemm_ar" else 1  # scattered, then gathered
    num_bytes = m * k * dtype.itemsize if op == "ag_gemm" else passes * m * n * _ITEMSIZE
    exchange_us = ring_us(num_bytes, span, rates)
    native_us = ours_us = gemm_us + exchange_us
    if span.network is not None and fp8 is None and op != "gemm_ar":
        by_rails_us = _by_rails(op, m, n, k, span, span.network, machine, rates, keeps=layout == "nn")
        ours_us = min(by_rails_us, native_us)
    return Estimate(native_us, ours_us, gemm_us, exchange_us)


def _by_rails(
    op: Op,
    m: int,
    n: int,
    k: int,
    span: Span,
    network: NetworkRates,
    machine: Machine,
    rates: MachineRates,
    keeps: bool,
) -> float:
    """AG-GEMM or GEMM-RS over nodes, one node's rows, or the block of rows of one node, after another.

    Rows that have come are gathered inside and multiplied; products, and gathered rows where it ``keeps`` them, are
    put together last. A block's sums cross a border under the next block's product; the first one's come home last.
    """
    done_us, rows, own_rows = 0.0, m // span.nodes, m // span.ranks
    if op == "ag_gemm":
        inside_us = _op(op, rows, n, k, "nt", one_node(span.per_node), machine, rates).ditron_us
        for node in range(span.nodes):
            done_us = max(done_us, node * rail_us(own_rows * k * _ITEMSIZE, network)) + inside_us
        kept_us = 2 * pass_us(2 * m * k * _ITEMSIZE, rates) if keeps else 0.0
        return done_us + pass_us(2 * m * n * _ITEMSIZE, rates) + kept_us
    block_us, own_bytes = cublas_us(rows, n, k, machine, rates), own_rows * n * _ITEMSIZE
    inside_us = copied_us(own_bytes * span.per_node, span.per_node, rates)
    inside_us += pass_us((span.per_node + 2) * own_bytes, rates)
    for block in range(span.nodes):
        done_us = max((block + 1) * block_us, done_us) + inside_us + rail_us(own_bytes, network)
    return done_us + inside_us


def linear_forward(
    kind: Kind, m: int, n: int, k: int, span: Span, machine: Machine, rates: MachineRates, fp8: Recipe | None = None
) -> Estimate:
    """A layer of N x K features before they are divided over the ranks, on ``m`` tokens of all ranks."""
    if kind == "column":
        return _op("ag_gemm", m, n // span.ranks, k, "nt", span, machine, rates, fp8)
    return _op("gemm_rs", m, n, k // span.ranks, "nt", span, machine, rates, fp8)


def reduced(m: int, n: int, k: int, span: Span, machine: Machine, rates: MachineRates) -> Estimate:
    """Without sequence parallelism a row layer's forward, or a column layer's dgrad: GEMM, then an all-reduce; ``k``
    before it is divided over the ranks."""
    return _op("gemm_ar", m, n, k // span.ranks, "nt", span, machine, rates)


def linear_backward(
    kind: Kind, m: int, n: int, k: int, span: Span, machine: Machine, rates: MachineRates, fp8: Recipe | None = None
) -> Estimate:
    """Both gradients of the same layer; what is gathered in FP8 is of one byte, sums are of two."""
    ranks, dtype = span.ranks, operands(fp8)
    of_wgrad = product_rates(rates, fp8, "wgrad")
    if kind == "row":
        wgrad_us = cublas_us(n, k // ranks, m, machine, of_wgrad, dtype)
        # with scales of blocks the transpose travels, too: its scales are others
        again_us = ring_us(m * n, span, rates) if fp8 == "blockwise" else 0.0
        rest = Estimate(wgrad_us + again_us, wgrad_us + again_us, wgrad_us, again_us)
        return _op("ag_gemm", m, k // ranks, n, "nn", span, machine, rates, fp8, "dgrad") + rest
    dgrad_us = cublas_us(m, k, n // ranks, machine, product_rates(rates, fp8, "dgrad"), dtype)
    wgrad_us = cublas_us(n // ranks, k, m, machine, of_wgrad, dtype)
    if ranks == 1:
        return Estimate.alike(dgrad_us + wgrad_us)
    gathered, summed = m * k * dtype.itemsize, m * k * _ITEMSIZE
    gather_us, scatter_us = ring_us(gathered, span, rates), ring_us(summed, span, rates)
    native_us = beside_us(dgrad_us, gather_us, rates.nccl_share) + beside_us(wgrad_us, scatter_us, rates.nccl_share)
    estimate = Estimate(native_us, native_us, dgrad_us + wgrad_us, gather_us + scatter_us)
    if span.network is not None:
        if fp8 is not None:
            return estimate
        summed_us = _by_rails("gemm_rs", m, k, n // ranks, span, span.network, machine, rates, keeps=False)
        ours_us = beside_us(summed_us, gather_us, rates.nccl_share) + wgrad_us
        return replace(estimate, ditron_us=min(ours_us, native_us))
    fold_us = pass_us((ranks + 1) * m // ranks * k * _ITEMSIZE, rates)
    first_us = beside_us(dgrad_us, copied_us(gathered, ranks, rates), rates.copy_share)
    ours_us = first_us + beside_us(wgrad_us, copied_us(summed, ranks, rates), rates.copy_share) + fold_us
    return Estimate(native_us, ours_us, dgrad_us + wgrad_us, gather_us + scatter_us)
