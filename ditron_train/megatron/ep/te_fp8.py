"""Transformer Engine's experts in FP8 with one scale an expert: all forward products of a layer in one kernel (part of
feature ``ep``).

Quantizers, scales, what is kept for backward and all gradients are left to Transformer Engine: the code of its own
``GroupedLinear`` runs, in a copy in which two functions of its forward are replaced. Quantised rows of all experts lie
side by side in memory, and are multiplied at once where a layer's experts have rows enough for cuBLAS's usual order of
sums. Imported only where Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from ditron_train.ep.arguments import ExpertScales
from ditron_train.ep.expert_functions import FEWEST_ROWS
from ditron_train.ep.group_gemm import group_gemm, row_tiles
from ditron_train.megatron.shared.other_names import called, with_names
from ditron_train.runtime.outside_compile import outside_compile

__all__ = ["OneProduct", "grouped_base", "multiplying_at_once", "why_not_code"]

_SCALE_STEP = 64  # fp32: cuBLAS takes scales at whole 16 bytes alone, allocations begin at 256

_active: ContextVar[OneProduct | None] = ContextVar("ditron_train_experts_product", default=None)


class OneProduct:
    """One forward of a layer of experts."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None

    def split(self, tensor: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Any]) -> list[Any]:
        """``split_quantize`` of Transformer Engine, the bytes of all parts side by side."""
        if not all(type(quantizer) is Float8CurrentScalingQuantizer for quantizer in quantizers):
            found: list[Any] = tex.split_quantize(tensor, splits, quantizers)
            return found
        tensor = tensor.contiguous()
        self._rows = torch.empty(tensor.shape, dtype=torch.uint8, device=tensor.device)
        scales = torch.ones(len(splits), _SCALE_STEP, dtype=torch.float32, device=tensor.device)
        parts = zip(tensor.split(splits), self._rows.split(splits), scales, quantizers, strict=True)
        found = [_quantised(part, data, scale[:1], quantizer) for part, data, scale, quantizer in parts]
        self._scales = scales[:, 0].contiguous()
        return found

    def multiply(self, weights: Sequence[Any], splits: Sequence[int], out: torch.Tensor) -> bool:
        """Puts the products of what was split into ``out``; False where they have to be Transformer Engine's."""
        rows, scales, self._rows, self._scales = self._rows, self._scales, None, None
        if rows is None or scales is None or not _have_usual_order(splits) or out.dtype != torch.bfloat16:
            return False
        parts = [weight.get_metadata() for weight in weights]
        if any(part.get("data") is None or part["fp8_dtype"] != tex.DType.kFloat8E4M3 for part in parts):
            return False
        x, of_weights = rows.view(torch.float8_e4m3fn), torch.cat([part["fp8_scale_inv"].view(1) for part in parts])
        on_host = torch.tensor(splits, dtype=torch.int64, pin_memory=x.is_cuda)
        tiles = row_tiles(on_host.to(x.device, non_blocking=True), x.shape[0])
        matrices = [part["data"].view(torch.float8_e4m3fn) for part in parts]
        out.data = group_gemm(x, matrices, tiles, scales=ExpertScales(scales, of_weights))  # its caller holds ``out``
        return True


def _have_usual_order(splits: Sequence[int]) -> bool:
    """Whether cuBLAS is known to add up the products of all experts in the order of K."""
    rows = [count for count in splits if count]
    return bool(rows) and min(rows) >= FEWEST_ROWS


def _quantised(part: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, quantizer: Any) -> Any:
    made = quantizer.make_empty(part.shape, dtype=part.dtype, device=part.device)
    made._data, made._scale_inv = data, scale
    return quantizer.update_quantized(part, made) if len(part) else made


class _Extension:
    """``transformer_engine_torch`` as the code of the forward asks for it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tex, name)

    @staticmethod
    def split_quantize(
        tensor: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Any], **options: Any
    ) -> list[Any]:
        """See `OneProduct`; newer versions have options, which are off in what is covered."""
        active = _active.get()
        found: list[Any]
        if active is None or any(options.values()):
            found = tex.split_quantize(tensor, splits, quantizers, **options)
        else:
            found = active.split(tensor, splits, quantizers)
        return found


def _grouped_gemm(weights: Sequence[Any], rows: Sequence[Any], out: list[torch.Tensor], *args: Any, **kw: Any) -> Any:
    """``general_grouped_gemm`` of Transformer Engine as its forward calls it, or one kernel."""
    active, asked = _active.get(), {name: value for name, value in kw.items() if name in _PLAIN}
    if active is not None and asked == _PLAIN and active.multiply(weights, kw["m_splits"], out[0]):
        return out, None, None
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    return general_grouped_gemm(weights, rows, out, *args, **kw)


#: Of the options of a forward's call what one kernel does.
_PLAIN = {"single_output": True, "use_bias": False, "use_split_accumulator": False}


@contextlib.contextmanager
def multiplying_at_once() -> Iterator[None]:
    """Inside, the forward of a layer on ``grouped_base`` multiplies all its experts in one kernel."""
    token = _active.set(OneProduct())
    try:
        yield
    finally:
        _active.reset(token)


def _module() -> Any:
    return importlib.import_module("transformer_engine.pytorch.module.grouped_linear")


@cache
def why_not_code() -> str | None:
    """Why the code of Transformer Engine's ``GroupedLinear`` cannot run with other functions, or None."""
    native = _module()
    function = getattr(native, "_GroupedLinear", None)
    if function is None:
        return "this version of Transformer Engine has experts of another build"
    wanted = {
        native.GroupedLinear.forward: {"_GroupedLinear"},
        function.forward: {"tex", "split_quantize", "general_grouped_gemm"},
    }
    missing = sorted(name for code, names in wanted.items() for name in names - called(code))
    return f"this version of Transformer Engine does not call {', '.join(missing)}" if missing else None


@cache
def _forward() -> Any:
    """The forward of ``GroupedLinear`` with another function of autograd, whose backward is the native one."""
    native = _module()
    run = with_names(native._GroupedLinear.forward, {"tex": _Extension(), "general_grouped_gemm": _grouped_gemm})
    made = type("GroupedAtOnce", (native._GroupedLinear,), {"forward": staticmethod(run)})
    return with_names(native.GroupedLinear.forward, {"_GroupedLinear": outside_compile(made)})


def grouped_base() -> type:
    """What a subclass of megatron-core's grouped linear layers has behind them among its bases, so that it stands
    between their forward and Transformer Engine's."""
    native = _module().GroupedLinear

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = native.forward if _active.get() is None else _forward()
        return run(self, *args, **kwargs)

    return type("GroupedAtOnceLinear", (native,), {"forward": forward, "__module__": native.__module__})
