"""What the specs of FP8 ops have of the same ops in bf16: shapes, where a recipe takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ditron_train.policy import ModelSizes, OpSpec, Shape
from ditron_train.tools.fp8.recipes import why_not_aligned
from ditron_train.tools.results import FP8_PREFIX
from ditron_train.tp.choices import Op
from ditron_train.tp.spec import AG_GEMM, GEMM_RS

Call = TypeVar("Call")


class Fp8ShapedSpec(OpSpec[Call, Any]):
    """An op in a recipe, at the shapes of AG-GEMM or GEMM-RS.

    Args:
        op: Which of them.
        recipe: By Megatron's name.
        what: What the op is called.
    """

    def __init__(self, op: Op, recipe: str, what: str) -> None:
        self.op, self.recipe = op, recipe
        self.name = f"tp {what} {FP8_PREFIX}{recipe}"
        self._bf16 = AG_GEMM if op == "ag_gemm" else GEMM_RS

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        shapes = self._bf16.shapes(world_size, on_gpu)
        return [shape for shape in shapes if self.why_not_shape(shape, world_size) is None]

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        return self._bf16.traced_shape(world_size, on_gpu)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return self._bf16.shapes_of_model(model, world_size)

    def why_not_shape(self, shape: Shape, world_size: int) -> str | None:
        reason = self._bf16.why_not_shape(shape, world_size)
        return reason or why_not_aligned(self.op, shape, world_size, self.recipe)

    def columns(self, call: Call, context: Any, times_us: Mapping[str, float]) -> Mapping[str, Any]:
        return {"dtype": FP8_PREFIX + self.recipe}
