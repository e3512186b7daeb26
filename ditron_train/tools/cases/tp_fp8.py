"""Ops of tensor parallelism in an FP8 recipe: at the shapes of the same ops in bf16 that the recipe takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ditron_train.policy import Op
from ditron_train.policy.op import Call
from ditron_train.tools.cases.case import Shape
from ditron_train.tools.cases.tp_gemm import GemmCase, GemmShapedCase
from ditron_train.tools.fp8.recipes import unsupported_reason_aligned
from ditron_train.tools.results import FP8_PREFIX
from ditron_train.tools.timing import Timing


class RecipeCase(GemmShapedCase[Call]):
    """An op in a recipe, at the shapes of AG-GEMM or GEMM-RS that the recipe takes.

    Args:
        op, row, gemm: As of `GemmShapedCase`.
        recipe: By Megatron's name.
    """

    def __init__(self, op: Op[Call, Any], row: str, gemm: GemmCase, recipe: str) -> None:
        super().__init__(op, row, gemm)
        self.recipe = recipe

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        shapes = super().shapes(world_size, on_gpu)
        return [shape for shape in shapes if self.unsupported_shape(shape, world_size) is None]

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        reason = super().unsupported_shape(shape, world_size)
        return reason or unsupported_reason_aligned(self.gemm.op.kind, shape, world_size, self.recipe)

    def columns(self, call: Call, context: Any, timings: Mapping[str, Timing]) -> Mapping[str, Any]:
        return {"dtype": FP8_PREFIX + self.recipe}
