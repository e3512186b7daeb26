"""Rows of experts in FP8 as tools measure them. Imported only if Transformer Engine is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ditron_train.megatron.ep.fp8_rows_spec import FP8_ROWS, STEP, Fp8RowsCall
from ditron_train.megatron.ep.te_quantise import RowsKind
from ditron_train.runtime.values import normal_values
from ditron_train.tools.cases.case import BenchCase, RunEnvironment, Shape
from ditron_train.tools.cases.ep_layers import MoeCase
from ditron_train.tools.timing import Timing


class Fp8RowsCase(MoeCase[Fp8RowsCall, None]):
    """Against Transformer Engine's quantizing of one expert after the other."""

    row, has_rows = "split_quantize", False

    def shapes_of_layer(self, layer: Shape) -> list[Shape]:
        """Inputs of both linear layers [rows, K], and gradients of their results [rows, N], evenly
        routed."""
        if layer.options["zipf"]:
            return []
        hidden, ffn_hidden = layer.sizes["hidden"], layer.sizes["ffn_hidden"]
        return [
            Shape(layer.model, {**layer.sizes, "n": n, "k": k}, {**layer.options, "are_grads": are_grads})
            for n, k in ((2 * ffn_hidden, hidden), (hidden, ffn_hidden))
            for are_grads in (False, True)
        ]

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> Fp8RowsCall:
        n, k, are_grads = shape.sizes["n"], shape.sizes["k"], shape.options["are_grads"]
        columns, width = (n, k) if are_grads else (k, n)
        num_experts = shape.sizes["num_experts"] // environment.world_size
        num_rows = max(STEP, shape.sizes["tokens_per_rank"] * shape.sizes["topk"] // num_experts // STEP * STEP)
        x = normal_values(
            (num_experts * num_rows, columns), torch.bfloat16, environment.device, 1000 * seed + environment.rank
        )
        kind = RowsKind(columns, "E5M2" if are_grads else "E4M3", False, 0.0)
        return Fp8RowsCall(x, num_experts, environment.group, kind, width, are_grads)

    def no_row_reason(self, call: Fp8RowsCall) -> str | None:
        return self.op.unsupported_reason(call)

    def columns(self, call: Fp8RowsCall, context: None, timings: Mapping[str, Timing]) -> Mapping[str, Any]:
        return {"dtype": "fp8_tensorwise"}


def fp8_cases(recipe: str) -> list[BenchCase[Any, Any]]:
    """What tools compare in a recipe."""
    return [Fp8RowsCase(FP8_ROWS)] if recipe == "tensorwise" else []
