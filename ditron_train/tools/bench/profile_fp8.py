"""What ``bench profile`` measures in FP8: products with a scale of a tensor or of blocks, casts, transposes.

By Transformer Engine where it is installed, as its layers run them, else by ``torch._scaled_mm`` and torch's casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ditron_train.costs import CAST_BYTES, Recipe
from ditron_train.gemm.main_grad import product_of_transformer_engine
from ditron_train.runtime.logs import get_logger
from ditron_train.tools.session import BenchSession

Call = Callable[[int], object]
Calls = dict[tuple[str, str, tuple[tuple[str, int], ...]], Call]

_E4M3 = torch.float8_e4m3fn
_BLOCK = 128
_FIRST_CAPABILITY = (8, 9)  # of GPUs with FP8


class Fp8Library(Protocol):
    """Casts, which move ``cast_bytes`` for each element, and products [m, k] @ [n, k].T of values quantised before."""

    cast_bytes: Mapping[Recipe, int]

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, *, gradient: bool
    ) -> Callable[[], object]:
        """The forward product, or, as the gradients', one of sums in parts; of blocks, of a weight's gradient."""

    def cast(self, x: torch.Tensor, recipe: Recipe) -> Callable[[], object]:
        """To quantise ``x``."""


class TransformerEngine:
    """Its ``general_gemm`` and quantizers; rows and their transposes are cast at once."""

    cast_bytes: Mapping[Recipe, int] = CAST_BYTES

    def __init__(self) -> None:
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

        self._of_blocks: Any = Float8BlockQuantizer
        self._of_tensors: Any = Float8CurrentScalingQuantizer
        self._multiply: Any = product_of_transformer_engine()
        self._kind = tex.DType.kFloat8E4M3

    def _quantizer(self, recipe: Recipe, device: torch.device, dimensions: int = 1) -> Any:
        if recipe == "blockwise":
            return self._of_blocks(self._kind, rowwise=True, columnwise=True, block_scaling_dim=dimensions)
        return self._of_tensors(self._kind, device)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, *, gradient: bool
    ) -> Callable[[], object]:
        """See `Fp8Library`."""
        by_rows, options = recipe == "blockwise" and gradient, dict(out_dtype=torch.bfloat16)
        first = self._quantizer(recipe, x.device)(x.t().contiguous() if by_rows else x)
        second = self._quantizer(recipe, x.device, 1 if by_rows else 2)(weight.t().contiguous() if by_rows else weight)
        layout = dict(layout="NT", grad=True) if by_rows else {}
        split = gradient or recipe == "blockwise"
        return lambda: self._multiply(second, first, **options, **layout, use_split_accumulator=split)

    def cast(self, x: torch.Tensor, recipe: Recipe) -> Callable[[], object]:
        """See `Fp8Library`."""
        quantizer = self._quantizer(recipe, x.device)
        return lambda: quantizer(x)


class Torch:
    """``torch._scaled_mm`` and casts without a second, transposed result."""

    cast_bytes: Mapping[Recipe, int] = {"tensorwise": 3, "blockwise": 3}

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, *, gradient: bool
    ) -> Callable[[], object]:
        """See `Fp8Library`."""
        (m, k), n, one = x.shape, weight.shape[0], torch.ones((), device=x.device)
        scales = one, one
        if recipe == "blockwise":
            rows = n if gradient else n // _BLOCK  # a weight's gradient has scales of 1 x 128 on both sides
            by_rows = one.expand(k // _BLOCK, m).contiguous().t()
            scales = by_rows, one.expand(k // _BLOCK, rows).contiguous()
        a, b = x.to(_E4M3), weight.to(_E4M3).t()
        return lambda: torch._scaled_mm(
            a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=recipe != "blockwise" and not gradient
        )

    def cast(self, x: torch.Tensor, recipe: Recipe) -> Callable[[], object]:
        """See `Fp8Library`."""
        out = torch.empty_like(x, dtype=_E4M3)
        return lambda: out.copy_(x)


def fp8_library(device: torch.device) -> Fp8Library | None:
    """What FP8 is measured with; None on a GPU without it."""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
            return None
        if product_of_transformer_engine() is not None:
            return TransformerEngine()
    return Torch()


def fp8_calls(
    session: BenchSession,
    library: Fp8Library,
    gemms: Sequence[tuple[int, int, int]],
    tensor_shapes: Sequence[tuple[int, int]],
) -> Calls:
    """Products of ``gemms`` (m, n, k), and casts and transposes of ``tensor_shapes`` (rows, columns). What the library
    refuses is left out, on all ranks, and a log line says why."""
    calls: Calls = {}
    kinds: dict[str, tuple[Recipe, bool]] = {
        "fp8_forward": ("tensorwise", False), "fp8_gradient": ("tensorwise", True),
        "fp8_block": ("blockwise", False), "fp8_block_wgrad": ("blockwise", True),
    }  # fmt: skip
    for m, n, k in gemms:
        x, weight = (session.values(shape, torch.bfloat16, seed) for seed, shape in enumerate(((m, k), (n, k))))
        for op, (recipe, gradient) in kinds.items():
            call = _tried(session, op, partial(library.product, x, weight, recipe, gradient=gradient))
            if call is not None:
                calls[op, "forward", (("m", m), ("n", n), ("k", k))] = call
    recipes: tuple[Recipe, ...] = ("tensorwise", "blockwise")
    for shape in tensor_shapes:
        values = session.values(shape, torch.bfloat16, 0)
        for recipe in recipes:
            call = _tried(session, f"casts, {recipe}", partial(library.cast, values, recipe))
            if call is not None:
                num_bytes = library.cast_bytes[recipe] * values.numel()
                calls["fp8_cast", "forward", (("num_bytes", num_bytes),)] = call
        rows = values.to(_E4M3)
        out = torch.empty_like(rows.t(), memory_format=torch.contiguous_format)
        sizes = (("num_bytes", 2 * rows.nbytes),)
        calls["fp8_transpose", "forward", sizes] = lambda index, out=out, rows=rows: out.copy_(rows.t())
    return calls


def _tried(session: BenchSession, what: str, make: Callable[[], Callable[[], object]]) -> Call | None:
    """A call that has run once on every rank, or None."""
    reason, call = "another rank cannot", None
    try:
        call = make()
        call()
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        reason, call = str(error).partition("\n")[0], None
    if not session.agree(call is not None) or call is None:
        get_logger("bench").info("not measured, %s: %s", what, reason)
        return None
    return lambda index: call()
