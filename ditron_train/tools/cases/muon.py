"""Muon as tools measure it: Newton-Schulz iterations of one matrix, and whole steps, sharded by matrices.

Stock Megatron is the published algorithm in torch's operators (`ditron_train.optim.reference`). Operations are those
of the whole algorithm, whoever computes less of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.optim.muon import Muon
from ditron_train.optim.newton_schulz import orthogonalize
from ditron_train.optim.reference import (
    reference_layer_wise_step,
    reference_newton_schulz,
    reference_shards,
    reference_step,
)
from ditron_train.policy import Function, Op
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.values import normal_values
from ditron_train.tools.cases.case import BenchCase, ModelSizes, RunEnvironment, Shape
from ditron_train.tools.timing import Timing

_RATIOS = {"square": 1.0, "8:3": 8 / 3, "4:1": 4.0}
_SIZES = (1024, 2048, 4096, 8192, 16384)
_QKV = (512, 128, 128)  # rows of q, k and v in a group: 4 heads of 128 share one key and value head
_LR = 0.01
_LONG_S = 0.25  # about what one contender may take in one measurement
_NATIVE_FLOPS = 6e14  # a second, to guess how long it will take

# Matrices of one layer: rows and columns as stored, gate and up projection together.
_ATTENTION = ((8 * sum(_QKV), 4096), (4096, 4096))
_FFN = ((2 * 14336, 4096), (4096, 14336))
# Every matrix that Muon steps there; Mixtral's attention and each of its experts have the shapes of LLaMA-8B.
_MODEL_MATRICES = (
    ("LLaMA-8B q, o", 4096, 4096),
    ("LLaMA-8B k, v", 1024, 4096),
    ("LLaMA-8B fc1", 28672, 4096),
    ("LLaMA-8B fc2", 4096, 14336),
    ("Mixtral-8x7B router", 8, 4096),
)
_TINY = ((8 * sum(_QKV) // 64, 64), (64, 64), (448, 64), (64, 224))

Sizes = tuple[int, int]


def newton_schulz_flops(rows: int, columns: int, num_steps: int = 5) -> float:
    """Operations of the whole algorithm: X @ X^T, A @ A and B @ X, each computed whole; 2 for a multiply-add."""
    m, n = min(rows, columns), max(rows, columns)
    return num_steps * 2.0 * m * m * (2 * n + m)


def symmetry_ceiling(rows: int, columns: int) -> float:
    """How much faster the algorithm can get if half of each symmetric product suffices and nothing else changes.

    (2n + m) / (1.5n + 0.5m) with m <= n: 1.5 for square matrices, towards 1.33 for long ones.
    """
    m, n = min(rows, columns), max(rows, columns)
    return (2 * n + m) / (1.5 * n + 0.5 * m)


def _most(flops: float) -> int:
    """Repetitions of what takes native this many operations."""
    return max(1, int(_LONG_S * _NATIVE_FLOPS / flops))


def matrix_shape(model: str, rows: int, columns: int) -> Shape:
    """One matrix."""
    return Shape(model, {"m": rows, "n": columns})


class MatrixCall(NamedTuple):
    """A gradient, fp32 [m, n]."""

    matrix: torch.Tensor
    group: dist.ProcessGroup


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(reference_newton_schulz)


class OrthogonalizeOp(Op[MatrixCall, None]):
    """Five steps of one matrix on one GPU. Its products are chosen by an op of their own."""

    name = "muon orthogonalize"

    def inputs(self, call: MatrixCall) -> Sequence[torch.Tensor]:
        return (call.matrix,)

    def native(self, call: MatrixCall) -> Function:
        return lambda matrix: [reference_newton_schulz(matrix)]

    def fused(self, call: MatrixCall, context: None) -> Function:
        return lambda matrix: [orthogonalize(matrix)]


class OrthogonalizeCase(BenchCase[MatrixCall, None]):
    """The limit is Megatron's time over the ceiling of symmetry."""

    row = "newton_schulz"

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        """Of one process."""
        if world_size > 1:
            return []
        table = [
            matrix_shape(f"{name} {size}", size, int(size * ratio) // 128 * 128 or size)
            for name, ratio in _RATIOS.items()
            for size in (_SIZES if on_gpu else (64,))
        ]
        return [*table, *(matrix_shape(*entry) for entry in (_MODEL_MATRICES if on_gpu else ()))]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return [matrix_shape("custom", *sizes) for sizes in model.matrices.values()] if world_size == 1 else []

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> MatrixCall:
        return MatrixCall(
            normal_values(tuple(shape.sizes.values()), torch.float32, environment.device, seed), environment.group
        )

    def most_repetitions(self, shape: Shape, world_size: int) -> int:
        return _most(newton_schulz_flops(shape.sizes["m"], shape.sizes["n"]))

    def columns(self, call: MatrixCall, context: None, timings: Mapping[str, Timing]) -> dict[str, Any]:
        rows, columns = call.matrix.shape
        return {
            "dtype": torch.bfloat16,
            "limit_us": timings["native"].median_us / symmetry_ceiling(rows, columns),
            "tflops": newton_schulz_flops(rows, columns) / timings["fused"].median_us / 1e6,
            "spread": max(timings["native"].spread, timings["fused"].spread),  # not that of the peer
        }

    def peers(self, call: MatrixCall, context: None) -> Mapping[str, Callable[[], object]]:
        return {} if is_interpreter() else {"torch.compile": lambda: _compiled()(call.matrix)}


def step_shape(model: str, layer: Sequence[Sizes], num_layers: int) -> Shape:
    """``num_layers`` layers of the matrices ``layer``, the first of which is the QKV projection's."""
    sizes = {"num_layers": num_layers, "num_matrices": num_layers * len(layer)}
    return Shape(model, sizes, {"layer": tuple(map(tuple, layer))})


def _qkv(layer: Sequence[Sizes]) -> tuple[int, int, int] | None:
    """Rows of q, k and v in a group of the first matrix, if it divides into groups."""
    return _QKV if layer[0][0] % sum(_QKV) == 0 else None


def _step_flops(shape: Shape) -> float:
    """Operations of all iterations; q, k and v are orthogonalised apart."""
    layer = shape.options["layer"]
    qkv, flops = _qkv(layer), 0.0
    for rows, columns in layer:
        parts = [rows // sum(qkv) * part for part in qkv] if qkv is not None and rows == layer[0][0] else [rows]
        flops += sum(newton_schulz_flops(part, columns) for part in parts)
    return shape.sizes["num_layers"] * flops


class StepCall(NamedTuple):
    """All matrices of a model, twice, and their gradients.

    Attributes:
        shape: Which.
        params: What the fused step changes.
        native: What Megatron's step changes.
        momenta: Of Megatron's step, of this rank's matrices.
        shards: Which matrices each rank steps natively.
        gradients: Of every matrix.
        group: Ranks that share out the matrices.
    """

    shape: Shape
    params: list[torch.nn.Parameter]
    native: list[torch.Tensor]
    momenta: dict[int, torch.Tensor]
    shards: list[list[int]]
    gradients: list[torch.Tensor]
    group: dist.ProcessGroup


class MuonStepOp(Op[StepCall, Muon]):
    """A step of all matrices; with several ranks each steps its own and sends them, natively after all are done. Both
    paths have a state, so both are called equally often before a comparison."""

    name = "muon step"

    def make_context(self, call: StepCall) -> Muon:
        """The optimizer."""
        layer = call.shape.options["layer"]
        qkv, qkv_rows = _qkv(layer), layer[0][0]
        return Muon(
            call.params,
            lr=_LR,
            split_qkv=qkv is not None,
            is_qkv_fn=lambda param: param.shape[0] == qkv_rows,
            qkv_split_shapes=qkv,
            shard_group=call.group if dist.get_world_size(call.group) > 1 else None,
        )

    def inputs(self, call: StepCall) -> Sequence[torch.Tensor]:
        """The gradients, which the parameters have."""
        return call.gradients

    def native(self, call: StepCall) -> Function:
        layer = call.shape.options["layer"]
        qkv, qkv_rows = _qkv(layer), layer[0][0]

        def one(index: int) -> None:
            param = call.native[index]
            split = qkv if param.shape[0] == qkv_rows else None
            reference_step(param, call.momenta[index], call.gradients[index], lr=_LR, qkv=split)

        def step(*gradients: torch.Tensor) -> list[torch.Tensor]:
            if len(call.shards) > 1:
                reference_layer_wise_step(call.native, one, call.shards, call.group)
            else:
                for index in call.shards[0]:
                    one(index)
            return call.native

        return step

    def fused(self, call: StepCall, context: Muon) -> Function:

        def step(*gradients: torch.Tensor) -> list[torch.Tensor]:
            context.step()
            return [param.detach() for param in call.params]

        return step


class MuonStepCase(BenchCase[StepCall, Muon]):
    """Against a step of the published algorithm."""

    row = "muon_step"
    num_sets = 1  # of matrices, which fill the memory

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        if not on_gpu:
            return [step_shape("tiny", _TINY, 2)]
        return [step_shape("LLaMA-8B", _ATTENTION + _FFN, 8), step_shape("Mixtral-8x7B", _ATTENTION + 8 * _FFN, 2)]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return [step_shape("custom", list(model.matrices.values()), 1)]

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> StepCall:
        sizes = shape.options["layer"] * shape.sizes["num_layers"]
        first = 10_000 * seed
        params = [
            torch.nn.Parameter(normal_values(one, torch.float32, environment.device, first + index))
            for index, one in enumerate(sizes)
        ]
        native = [param.detach().clone() for param in params]
        for index, param in enumerate(params):
            param.grad = normal_values(param.shape, torch.float32, environment.device, first + 1000 + index)
        shards = reference_shards(native, environment.world_size)
        momenta = {index: torch.zeros_like(native[index]) for index in shards[environment.rank]}
        gradients = [param.grad for param in params if param.grad is not None]
        return StepCall(shape, params, native, momenta, shards, gradients, environment.group)

    def most_repetitions(self, shape: Shape, world_size: int) -> int:
        return _most(_step_flops(shape) / world_size)

    def columns(self, call: StepCall, context: Muon, timings: Mapping[str, Timing]) -> dict[str, Any]:
        return {"dtype": torch.float32, "tflops": _step_flops(call.shape) / timings["fused"].median_us / 1e6}


ORTHOGONALIZE, MUON_STEP = OrthogonalizeCase(OrthogonalizeOp()), MuonStepCase(MuonStepOp())
CASES: Sequence[BenchCase[Any, Any]] = (ORTHOGONALIZE, MUON_STEP)
