"""Estimates of tensor parallel linear layers, forward and backward, on the groups of a node and across nodes.

    column   forward: all-gather, GEMM. Backward: the gather again with dgrad, the reduce-scatter with wgrad
    row      forward: GEMM, reduce-scatter. Backward: all-gather, dgrad, wgrad

Across nodes only the native path is estimated: no fused op was measured on two machines.
"""

from __future__ import annotations

from typing import Literal

from ditron_train.costs.estimate import Estimate
from ditron_train.costs.exchanges import Span, beside_us, copied_us, ring_us
from ditron_train.costs.fp8 import Product, Recipe, operands, product_rates
from ditron_train.costs.products import FP8_TARGETS, cublas_us, pass_us
from ditron_train.data.device_profiles import Machine
from ditron_train.data.rates import MachineRates
from ditron_train.tp.choices import Layout, Op, Problem, choose, predict

Kind = Literal["column", "row"]
_ITEMSIZE = 2


def op_estimate(problem: Problem, machine: Machine, rates: MachineRates) -> Estimate:
    """Time of an AG-GEMM or GEMM-RS inside a node, run as ``tp.choices`` chooses."""
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
    return Estimate.alike(gemm_us + ring_us(num_bytes, span, rates))


def linear_forward(
    kind: Kind, m: int, n: int, k: int, span: Span, machine: Machine, rates: MachineRates, fp8: Recipe | None = None
) -> Estimate:
    """Time of the forward of a layer of N x K features, all ranks' together, on ``m`` tokens of all ranks."""
    if kind == "column":
        return _op("ag_gemm", m, n // span.ranks, k, "nt", span, machine, rates, fp8)
    return _op("gemm_rs", m, n, k // span.ranks, "nt", span, machine, rates, fp8)


def reduced(m: int, n: int, k: int, span: Span, machine: Machine, rates: MachineRates) -> Estimate:
    """Time of a row layer's forward, or a column layer's dgrad, without sequence parallelism: a GEMM, then an
    all-reduce; ``k``: of all ranks together."""
    return _op("gemm_ar", m, n, k // span.ranks, "nt", span, machine, rates)


def linear_backward(
    kind: Kind, m: int, n: int, k: int, span: Span, machine: Machine, rates: MachineRates, fp8: Recipe | None = None
) -> Estimate:
    """Time of both gradients of the same layer; elements gathered in FP8 have one byte, those of sums two."""
    ranks, dtype = span.ranks, operands(fp8)
    of_wgrad = product_rates(rates, fp8, "wgrad")
    if kind == "row":
        wgrad_us = cublas_us(n, k // ranks, m, machine, of_wgrad, dtype)
        # with scales of blocks the transpose travels, too: its scales are others
        again_us = ring_us(m * n, span, rates) if fp8 == "blockwise" else 0.0
        dgrad = _op("ag_gemm", m, k // ranks, n, "nn", span, machine, rates, fp8, "dgrad")
        return dgrad + Estimate.alike(wgrad_us + again_us)
    dgrad_us = cublas_us(m, k, n // ranks, machine, product_rates(rates, fp8, "dgrad"), dtype)
    wgrad_us = cublas_us(n // ranks, k, m, machine, of_wgrad, dtype)
    if ranks == 1:
        return Estimate.alike(dgrad_us + wgrad_us)
    gathered, summed = m * k * dtype.itemsize, m * k * _ITEMSIZE
    gather_us, scatter_us = ring_us(gathered, span, rates), ring_us(summed, span, rates)
    native_us = beside_us(dgrad_us, gather_us, rates.nccl_share) + beside_us(wgrad_us, scatter_us, rates.nccl_share)
    if span.network is not None or (fp8 is not None and machine.target not in FP8_TARGETS):
        return Estimate.alike(native_us)
    reduce_us = pass_us((ranks + 1) * m // ranks * k * _ITEMSIZE, rates)
    first_us = beside_us(dgrad_us, copied_us(gathered, ranks, rates), rates.copy_share)
    fused_us = first_us + beside_us(wgrad_us, copied_us(summed, ranks, rates), rates.copy_share) + reduce_us
    return Estimate(native_us, fused_us)
