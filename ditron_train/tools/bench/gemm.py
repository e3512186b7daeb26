"""Benchmark of the tile GEMM, alone, against cuBLAS: one rank's share of the published layers' products, forward and
dgrad.

The fused path is what AG-GEMM and GEMM-RS multiply with, without anything to wait for; native is ``torch.matmul``.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

from ditron_train.data import load_workloads
from ditron_train.gemm import matmul_nn, matmul_nt
from ditron_train.tools.arguments import add_common_arguments, add_shape_argument, check_sizes, choose_models
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession, bench_session

_TP = 8


class _Product(NamedTuple):
    """C [m, n] = A [m, k] @ B, as one rank computes it."""

    model: str
    m: int
    n: int
    k: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench gemm``."""
    add_common_arguments(parser)
    parser.add_argument(
        "--tp",
        type=int,
        default=_TP,
        help="whose share of a layer: ranks of tensor parallelism (default: %(default)s)",
    )
    add_shape_argument(parser, "products instead of the layers'")


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: A size below 1, or an unknown model.
    """
    with bench_session("gemm", arguments) as session:
        for product in _products(arguments, session):
            for layout in ("nt", "nn"):
                session.add(_row(session, product, layout))
        return session.finish()


def _products(arguments: argparse.Namespace, session: BenchSession) -> list[_Product]:
    check_sizes("--shape", arguments.shape)
    check_sizes("--tp", [[arguments.tp]])
    workloads, tp = load_workloads(), arguments.tp
    layers = [_Product(f"{s['model']} column", s["M"], s["N"] // tp, s["K"]) for s in workloads["ag_gemm"]["shapes"]]
    layers += [_Product(f"{s['model']} row", s["M"], s["N"], s["K"] // tp) for s in workloads["gemm_rs"]["shapes"]]
    wanted = choose_models(arguments.model, [layer.model.split()[0] for layer in layers])
    shapes = arguments.shape or ([(48, 32, 64)] if session.device.type == "cpu" else None)
    if shapes is not None:
        return [_Product("custom", *shape) for shape in shapes]
    return [layer for layer in layers if layer.model.split()[0] in wanted]


def _row(session: BenchSession, product: _Product, layout: str) -> Row:
    model, m, n, k = product
    dtype = session.dtype
    num_sets = session.num_input_sets((m * k + n * k) * dtype.itemsize)
    b_shape = (n, k) if layout == "nt" else (k, n)
    inputs = [
        (session.values((m, k), dtype, 2 * seed), session.values(b_shape, dtype, 2 * seed + 1))
        for seed in range(num_sets)
    ]

    def native(index: int) -> torch.Tensor:
        a, b = inputs[index % num_sets]
        return torch.matmul(a, b.t() if layout == "nt" else b)

    def fused(index: int) -> torch.Tensor:
        a, b = inputs[index % num_sets]
        return matmul_nt(a, b) if layout == "nt" else matmul_nn(a, b)

    equal = all(session.equal([fused(index)], [native(index)]) for index in range(num_sets))
    timings = session.measure({"native": native, "fused": fused})
    tflops = 2 * m * n * k / timings["fused"].median_us / 1e6
    shape = {"m": m, "n": n, "k": k}
    return session.row(f"gemm_{layout}", "forward", model, shape, timings, equal, world_size=1, tflops=tflops)
