"""Benchmark of Muon: Newton-Schulz iterations on one GPU, and whole steps, sharded by matrices on several.

Native is the published algorithm in torch's operators (cuBLAS products); the peer is ``torch.compile`` of it. The
limit is native's time over the ceiling of symmetry: half of two of the three products determines the other half,
nothing else is saved. TFLOP/s count the operations of the whole algorithm, whoever computes less of it. Iterations are
timed with the host ahead: its cost, several times the device's at small matrices where launches are single ones, does
not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist

from ditron_train.cpu.reference_muon import (
    reference_layer_wise_step,
    reference_newton_schulz,
    reference_shards,
    reference_step,
)
from ditron_train.optim import Muon, orthogonalize
from ditron_train.tools.arguments import add_common_arguments, check_sizes, choose_models
from ditron_train.tools.bench.roofline import newton_schulz_flops, symmetry_ceiling
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession, Sink, bench_session

__all__ = ["add_arguments", "run"]

_PARTS = ("newton_schulz", "muon_step")
_RATIOS = {"square": 1.0, "8:3": 8 / 3, "4:1": 4.0}
_SIZES = (1024, 2048, 4096, 8192, 16384)
_QKV = (512, 128, 128)  # rows of q, k and v in a group: 4 heads of 128 share one key and value head
_LR = 0.01
_LONG_S = 0.25  # about what one contender may take in one measurement
_NATIVE_FLOPS = 6e14  # a second, to guess how long it will take

# Matrices of one layer: rows and columns as stored, gate and up projection together.
_ATTENTION = [(8 * sum(_QKV), 4096), (4096, 4096)]
_FFN = [(2 * 14336, 4096), (4096, 14336)]
# Every matrix that Muon steps there; Mixtral's attention and each of its experts have the shapes of LLaMA-8B.
_MODEL_MATRICES = (
    ("LLaMA-8B q, o", 4096, 4096),
    ("LLaMA-8B k, v", 1024, 4096),
    ("LLaMA-8B fc1", 28672, 4096),
    ("LLaMA-8B fc2", 4096, 14336),
    ("Mixtral-8x7B router", 8, 4096),
)
_MODELS = {"LLaMA-8B": (_ATTENTION + _FFN, 8), "Mixtral-8x7B": (_ATTENTION + 8 * _FFN, 2)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench muon``."""
    add_common_arguments(parser)
    parser.add_argument("--part", action="append", choices=_PARTS, help="only this part (may be repeated)")
    parser.add_argument(
        "--shape",
        nargs=2,
        type=int,
        action="append",
        metavar=("ROWS", "COLUMNS"),
        help="matrices instead of the table's, and instead of a model's layer",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="layers of a model (default: 8, with experts 2; times scale with it)"
    )
    parser.add_argument(
        "--no-peer", action="store_true", help="leave torch.compile out, which takes a while to compile"
    )


def run(arguments: argparse.Namespace, sink: Sink | None = None) -> int:
    """Measures what the command line asks for, shows and writes it or gives it to ``sink``; returns 1 where bits
    differ.

    Raises:
        SettingError: A size below 1, or an unknown model.
    """
    with bench_session("muon", arguments, sink) as session:
        parts = arguments.part or _PARTS
        check_sizes("--shape", arguments.shape)
        check_sizes("--layers", arguments.layers and [[arguments.layers]])
        _check_models(arguments)
        if "newton_schulz" in parts and session.world_size == 1:
            for name, rows, columns in _matrices(arguments, session):
                session.add(_newton_schulz_row(session, name, rows, columns, with_peer=not arguments.no_peer))
                session.save()
        if "muon_step" in parts:
            for model, (layer, num_layers) in _models(arguments, session).items():
                session.add(_step_row(session, model, layer, arguments.layers or num_layers))
                session.save()
        return session.finish()


def _check_models(arguments: argparse.Namespace) -> None:
    choose_models(arguments.model, [*_RATIOS, *(entry[0].split()[0] for entry in _MODEL_MATRICES), *_MODELS])


def _matrices(arguments: argparse.Namespace, session: BenchSession) -> list[tuple[str, int, int]]:
    if arguments.shape:
        return [("custom", rows, columns) for rows, columns in arguments.shape]
    sizes = _SIZES if session.device.type == "cuda" else (64,)
    table = [
        (f"{name} {size}", size, int(size * ratio) // 128 * 128 or size)
        for name, ratio in _RATIOS.items()
        for size in sizes
    ]
    if session.device.type == "cuda":
        table += _MODEL_MATRICES
    return [entry for entry in table if not arguments.model or entry[0].split()[0] in arguments.model]


def _models(arguments: argparse.Namespace, session: BenchSession) -> dict[str, tuple[list[tuple[int, int]], int]]:
    if arguments.shape:
        return {"custom": ([(rows, columns) for rows, columns in arguments.shape], 1)}
    if session.device.type == "cpu":
        return {"tiny": ([(8 * sum(_QKV) // 64, 64), (64, 64), (448, 64), (64, 224)], 2)}
    return {name: model for name, model in _MODELS.items() if not arguments.model or name in arguments.model}


def _normal(shape: tuple[int, ...], session: BenchSession, seed: int) -> torch.Tensor:
    generator = torch.Generator(session.device).manual_seed(seed)
    return torch.empty(shape, device=session.device).normal_(generator=generator)


def _most(flops: float) -> int:
    """Repetitions of what takes native this many operations."""
    return max(1, int(_LONG_S * _NATIVE_FLOPS / flops))


def _newton_schulz_row(session: BenchSession, name: str, rows: int, columns: int, *, with_peer: bool) -> Row:
    grads = [_normal((rows, columns), session, seed) for seed in range(session.num_input_sets(4 * rows * columns))]

    def pick(index: int) -> torch.Tensor:
        return grads[index % len(grads)]

    def ours(index: int) -> torch.Tensor:
        return orthogonalize(pick(index))

    contenders: dict[str, Callable[[int], object]] = {
        "native": lambda index: reference_newton_schulz(pick(index)),
        "ditron": ours,
    }
    if with_peer and session.device.type == "cuda":
        compiled = torch.compile(reference_newton_schulz)
        if session.attempt("torch.compile", lambda index: compiled(pick(index))):
            contenders["peer"] = lambda index: compiled(pick(index))
    equal = all(session.equal([ours(i)], [reference_newton_schulz(pick(i))]) for i in range(len(grads)))
    flops = newton_schulz_flops(rows, columns)
    timings = session.measure(contenders, most=_most(flops))
    native_us = timings["native"].median_us
    return session.row(
        "newton_schulz", "forward", name, {"m": rows, "n": columns}, timings, equal,
        dtype=torch.bfloat16,
        limit_us=native_us / symmetry_ceiling(rows, columns),
        peer="torch.compile" if "peer" in timings else None,
        peer_us=timings["peer"].median_us if "peer" in timings else None,
        tflops=flops / timings["ditron"].median_us / 1e6,
        spread=max(timings["native"].spread, timings["ditron"].spread),
    )  # fmt: skip


def _step_row(session: BenchSession, model: str, layer: list[tuple[int, int]], num_layers: int) -> Row:
    """A step of all matrices; with several ranks each steps its own and sends them, natively after all are done."""
    shapes = layer * num_layers
    qkv_rows = layer[0][0]
    qkv = _QKV if qkv_rows % sum(_QKV) == 0 else None
    ours = [torch.nn.Parameter(_normal(shape, session, seed)) for seed, shape in enumerate(shapes)]
    native = [param.detach().clone() for param in ours]
    for seed, param in enumerate(ours):
        param.grad = _normal(param.shape, session, 1000 + seed)
    group = dist.group.WORLD
    optimizer = Muon(
        ours, lr=_LR, split_qkv=qkv is not None, is_qkv_fn=lambda param: param.shape[0] == qkv_rows,
        qkv_split_shapes=qkv, shard_group=group if session.world_size > 1 else None,
    )  # fmt: skip
    shards = reference_shards(native, session.world_size)
    momenta = {index: torch.zeros_like(native[index]) for index in shards[session.rank]}

    def native_one(index: int) -> None:
        split = qkv if native[index].shape[0] == qkv_rows else None
        grad = ours[index].grad
        assert grad is not None, "set above"
        reference_step(native[index], momenta[index], grad, lr=_LR, qkv=split)

    def native_step(index: int) -> list[torch.Tensor]:
        if session.world_size > 1:
            reference_layer_wise_step(native, native_one, shards, group)  # type: ignore[arg-type]
        else:
            for own in shards[0]:
                native_one(own)
        return native

    def our_step(index: int) -> list[torch.Tensor]:
        optimizer.step()
        return [param.detach() for param in ours]

    equal = session.equal(our_step(0), native_step(0))
    flops = num_layers * sum(_layer_flops(shape, qkv if shape[0] == qkv_rows else None) for shape in layer)
    timings = session.measure({"native": native_step, "ditron": our_step}, most=_most(flops / session.world_size))
    return session.row(
        "muon_step", "forward", model, {"num_layers": num_layers, "num_matrices": len(shapes)}, timings, equal,
        dtype=torch.float32,
        tflops=flops / timings["ditron"].median_us / 1e6,
    )  # fmt: skip


def _layer_flops(shape: tuple[int, int], qkv: tuple[int, ...] | None) -> float:
    """Operations of one matrix's iteration; q, k and v are orthogonalised apart."""
    if qkv is None:
        return newton_schulz_flops(*shape)
    groups = shape[0] // sum(qkv)
    return sum(newton_schulz_flops(groups * rows, shape[1]) for rows in qkv)
