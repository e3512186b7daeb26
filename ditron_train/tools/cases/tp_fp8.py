"""Ops of tensor parallelism in an FP8 recipe: at the shapes of the same ops in bf16 that the recipe takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ditron_train.policy import Op
from ditron_train.policy.op import Call
from ditron_train.tools.cases.case import BenchCase, ModelSizes, Shape
from ditron_train.tools.cases.tp_gemm import GemmCase
from ditron_train.tools.fp8.recipes import why_not_aligned
from ditron_train.tools.results import FP8_PREFIX


class RecipeCase(BenchCase[Call, Any]):
    """An op in a recipe, at the shapes of AG-GEMM or GEMM-RS.

    Args:
        op: The op.
        row: What rows call it.
        gemm: The case in bf16 whose shapes it has.
        recipe: By Megatron's name.
    """

    def __init__(self, op: Op[Call, Any], row: str, gemm: GemmCase, recipe: str) -> None:
        super().__init__(op)
        self.row, self.gemm, self.recipe = row, gemm, recipe

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        shapes = self.gemm.shapes(world_size, on_gpu)
        return [shape for shape in shapes if self.unsupported_shape(shape, world_size) is None]

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        return self.gemm.traced_shape(world_size, on_gpu)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return self.gemm.shapes_of_model(model, world_size)

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        reason = self.gemm.unsupported_shape(shape, world_size)
        return reason or why_not_aligned(self.gemm.op.kind, shape, world_size, self.recipe)

    def columns(self, call: Call, context: Any, times_us: Mapping[str, float]) -> Mapping[str, Any]:
        return {"dtype": FP8_PREFIX + self.recipe}
