"""What the model says where figures are published: AG-GEMM on 8, 16 and 32 GPUs of two clusters.

The published op overlaps across nodes, which this package's does not yet. So the fused column here is a model of such
an op: rows of other nodes arrive once at each GPU by its adapter and go on inside by copy engine, beside the GEMM.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from ditron_train.costs import Span, cublas_us, one_node, ring_us
from ditron_train.data import load_workloads
from ditron_train.runtime.profiles import Profile, profile_named
from ditron_train.runtime.rates import NetworkRates

_PER_NODE = 8
_PROFILES = {"h800": "h800", "hopper96": "h20"}
_ITEMSIZE = 2


@dataclass(frozen=True)
class Published:
    """One figure: the speedup over cuBLAS and NCCL that is published, and the model's."""

    cluster: str
    scaling: str
    model: str
    gpus: int
    published: float
    predicted: float


def _overlapped_us(m: int, n: int, k: int, span: Span, profile: Profile) -> float:
    rates = profile.rates
    gemm_us = cublas_us(m, n // span.ranks, k, profile.machine, rates)
    shard_bytes = m * k * _ITEMSIZE / span.ranks
    arrived_us = (span.ranks - 1) * shard_bytes / (rates.link_gbps * 1e3) + (span.per_node - 1) * rates.chunk_us
    if span.network is not None:
        by_network_us = (span.nodes - 1) * shard_bytes / (span.network.gpu_gbps * span.network.reached * 1e3)
        arrived_us = max(arrived_us, by_network_us + span.network.latency_us)
    last_us = gemm_us / span.ranks  # of the rows that come last
    return max(gemm_us, rates.start_us + arrived_us + last_us) + rates.copy_share * min(gemm_us, arrived_us)


def published_figures() -> Iterator[Published]:
    """Every published figure whose shape is published, too. Weak scaling: as many rows for each node."""
    workloads = load_workloads()
    shapes = {one["model"]: one for one in workloads["ag_gemm"]["shapes"]}
    results = workloads["paper_results"]
    for name, models in results["ag_gemm_speedup_vs_cublas_nccl"].items():
        cluster = name.split("_")[0]
        scaling = "weak" if "weak" in name else "strong"
        profile = profile_named(_PROFILES[cluster])
        network = NetworkRates(results["clusters"][cluster]["network_gbps_a_gpu_one_way"])
        for model, speedups in models.items():
            for nodes, speedup in zip((1, 2, 4), speedups) if model in shapes else ():
                shape = shapes[model]
                m = shape["M"] * (nodes if scaling == "weak" else 1)
                ranks = nodes * _PER_NODE
                span = one_node(ranks) if nodes == 1 else Span(ranks, _PER_NODE, network)
                n, k = shape["N"], shape["K"]
                gemm_us = cublas_us(m, n // ranks, k, profile.machine, profile.rates)
                native_us = gemm_us + ring_us(m * k * _ITEMSIZE, span, profile.rates)
                predicted = native_us / _overlapped_us(m, n, k, span, profile)
                yield Published(cluster, scaling, model, ranks, speedup, predicted)


def published_part() -> str:
    """A table, a line a model, and the median difference by number of GPUs."""
    figures = list(published_figures())
    lines = [
        "| cluster | scaling | model | 8 GPUs: published, predicted | 16 GPUs | 32 GPUs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = dict.fromkeys((one.cluster, one.scaling, one.model) for one in figures)
    for row in rows:
        cells = [f"{x.published:.2f}, {x.predicted:.2f}" for x in figures if (x.cluster, x.scaling, x.model) == row]
        lines.append(f"| {' | '.join((*row, *cells))} |")
    medians = {
        gpus: statistics.median(abs(x.predicted / x.published - 1) for x in figures if x.gpus == gpus)
        for gpus in (8, 16, 32)
    }
    words = ", ".join(f"{100 * value:.0f} % on {gpus} GPUs" for gpus, value in medians.items())
    return "\n".join([*lines, "", f"Median difference: {words}."])
