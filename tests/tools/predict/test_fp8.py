"""Estimates of ops in FP8 beside what docs/measurements/fp8.md holds (H200), and committed rows of H100s."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from ditron_train.costs.exchanges import one_node
from ditron_train.costs.fp8 import product_rates
from ditron_train.costs.products import cublas_us
from ditron_train.data.device_profiles import profile_named
from ditron_train.ep.cost_model import expert_product
from ditron_train.tools.results import read_results
from ditron_train.tp.choices import Problem
from ditron_train.tp.linear_costs import linear_backward, linear_forward, op_estimate

ROOT = Path(__file__).parents[3]
H200 = profile_named("h200")
WHERE = (H200.machine, H200.rates)
E4M3 = torch.float8_e4m3fn
# Below 150 us the host's launches are what was measured, so such calls are left out; times in us.
# M, N, K: Transformer Engine's product added up fast, and with a split accumulator
PRODUCTS = [(8192, 7168, 8192, 634, 678), (8192, 8192, 3584, 321, 353)]
# M, N, K of a rank of two: natively, fused
OPS = [
    ("ag_gemm", 8192, 28672, 8192, 2748, 2692),
    ("ag_gemm", 8192, 5120, 8192, 693, 524),
    ("gemm_rs", 8192, 8192, 14336, 1604, 1357),
    ("gemm_rs", 8192, 8192, 4096, 752, 512),
]
# M, N, K of both ranks; forward and backward
LINEARS = [("column", 8192, 57344, 8192, 9030, 8911), ("row", 8192, 8192, 28672, 4642, 4218)]
# experts, rows, N, K: forward and dgrad with one scale a tensor, then with blocks; natively
EXPERTS = [
    (16, 4096, 4096, 7168, 2559, 2682, 2900, 2960),
    (16, 4096, 7168, 2048, 1359, 1386, 1588, 1495),
    (32, 2048, 4096, 7168, 2644, 2783, 3009, 3054),
    (32, 2048, 7168, 2048, 1407, 1468, 1647, 1604),
    (64, 1024, 4096, 7168, 2763, 3035, 3238, 3212),
    (64, 512, 4096, 7168, 1590, 1723, 1853, 1934),
    (64, 512, 7168, 2048, 951, 1082, 1095, 1129),
    (8, 2048, 28672, 4096, 2549, 2855, 2993, 2990),
]


def errors_of_ops() -> list[float]:
    found = []
    for m, n, k, fast, split in PRODUCTS:
        found.append(cublas_us(m, n, k, *WHERE, E4M3) / fast - 1)
        rates = product_rates(H200.rates, "delayed", "dgrad")
        found.append(cublas_us(m, n, k, H200.machine, rates, E4M3) / split - 1)
    for op, m, n, k, native, fused in OPS:
        seen = op_estimate(Problem(op, m, n, k, "nt", E4M3, 2), *WHERE)
        found += [seen.native_us / native - 1, seen.ditron_us / fused - 1]
    for kind, m, n, k, native, fused in LINEARS:
        both = [one(kind, m, n, k, one_node(2), *WHERE, "tensorwise") for one in (linear_forward, linear_backward)]
        seen = both[0] + both[1]
        found += [seen.native_us / native - 1, seen.ditron_us / fused - 1]
    return found


def errors_of_experts() -> list[float]:
    found = []
    for count, rows, n, k, *measured in EXPERTS:
        cases = [(recipe, dgrad) for recipe in ("delayed", "blockwise") for dgrad in (False, True)]
        for (recipe, dgrad), us in zip(cases, measured, strict=True):
            sizes = (k, n) if dgrad else (n, k)
            product = "dgrad" if dgrad else "forward"
            found.append(expert_product([rows] * count, *sizes, *WHERE, product=product, fp8=recipe) / us - 1)
    return found


def errors_on_h100() -> list[float]:
    """Of the committed rows of two H100s, by rates that were measured there, not fitted to them."""
    h100, found = profile_named("h100"), []
    where = (h100.machine, h100.rates)
    for row in read_results(ROOT / "benchmarks" / "results" / "H100-80GB-HBM3x2" / "tp.json")[1]:
        is_other = row.fp8 is None or row.op == "transformer_layer"
        if is_other or (row.op in ("ag_gemm", "gemm_rs") and row.fp8 == "blockwise"):
            continue  # an op of blocks alone is no op of the model's
        m, n, k = row.shape.values()
        if row.op.endswith("_linear"):
            passes = (linear_forward, linear_backward)
            both = [one(row.op.split("_")[0], m, n, k, one_node(2), *where, row.fp8) for one in passes]
            seen = both[0] + both[1]
        else:
            local = (n // 2, k) if row.op == "ag_gemm" else (n, k // 2)
            seen = op_estimate(Problem(row.op, m, *local, "nt", E4M3, 2), *where)
        found += [seen.native_us / row.native_us - 1, seen.ditron_us / row.ditron_us - 1]
    assert len(found) == 24
    return found


@pytest.mark.parametrize(
    ("errors", "median", "worst"),
    [(errors_of_ops, 0.05, 0.15), (errors_of_experts, 0.09, 0.2), (errors_on_h100, 0.04, 0.15)],
)
def test_what_was_measured_in_fp8(errors, median: float, worst: float) -> None:
    found = [abs(error) for error in errors()]
    assert statistics.median(found) < median and max(found) < worst
