"""The passes of layers whose FP8 operands have one scale a tensor (recipes tensorwise and delayed).

Bytes are sent and stored side by side, and the scale is the same on all ranks (or this rank's own, of an operand that
is not gathered). Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch.cpp_extensions as te_ops

from ditron_train.gemm.operands import TensorScales
from ditron_train.megatron.tp.te_passes import (
    Pass,
    Sharded,
    Unreduced,
    like_quantized,
    operand_like,
    product_key,
    refilled,
)
from ditron_train.tp.ag_gemm import ag_gemm
from ditron_train.tp.context import TPContext
from ditron_train.tp.gather import start_all_gather
from ditron_train.tp.gemm_rs import gemm_rs
from ditron_train.tp.reduce_scatter import start_reduce_scatter

_DTYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


def operands(rows: Any, weight: Any) -> tuple[torch.Tensor, torch.Tensor, TensorScales]:
    """The data of two quantized tensors as torch's FP8, and their scales."""
    parts = [operand.get_metadata() for operand in (rows, weight)]
    x, w = (part["data"].view(_DTYPES[part["fp8_dtype"].name]) for part in parts)
    return x, w, TensorScales(*(part["fp8_scale_inv"] for part in parts))


def _with_data(like: Any, data: torch.Tensor, quantizer: Any) -> Any:
    """A quantized tensor of ``data`` with the type and the scale of ``like``."""
    return like_quantized(like, data.shape, data=data, data_transpose=None, quantizer=quantizer)


class _Gathering(Pass):
    """A pass in which rows are gathered while something else runs."""

    def __init__(self, context: TPContext) -> None:
        super().__init__(context)
        self._started: Any = None  # a ``PendingGather``; of blocks a ``PendingParts``

    def _start(self, rows: Any, quantizer: Any, *, flags_each_rank: bool) -> Any:
        """All ranks' rows, where they will be."""
        data = rows.get_metadata()["data"]
        self._started = started = start_all_gather(data, context=self._context, flags_each_rank=flags_each_rank)
        shape = (data.shape[0] * self._context.world_size, *data.shape[1:])
        return _with_data(rows, started.rows.view(shape), quantizer)

    def wait(self) -> None:
        """Until all rows are there; again it does nothing."""
        started, self._started = self._started, None
        if started is not None:
            started.wait()

    def close(self) -> None:
        self.wait()


class ColumnForward(Pass):
    """Y = AG(X) @ W^T: rows are multiplied as they arrive."""

    def gather(self, inp: Any, group: Any, async_op: bool = False, quantizer: Any = None) -> tuple[Any, Any]:
        return Sharded(inp), None

    def multiply(self, weight: Any, rows: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if not isinstance(rows, Sharded):
            return super().multiply(weight, rows, *args, **kwargs)
        x, w, scales = operands(rows.rows, weight)
        y = ag_gemm(x, w, context=self._context, scales=scales, bias=kwargs.get("bias"))
        return y, None, None, None


class RowForward(Pass):
    """Y = RS(X @ W^T): rows are sent as they are multiplied."""

    def multiply(self, weight: Any, rows: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return Unreduced(weight, rows, args, kwargs), None, None, None

    def scatter(self, partial: Any, group: Any, async_op: bool = False) -> tuple[Any, Any]:
        x, w, scales = operands(partial.rows, partial.weight)
        return gemm_rs(x, w, context=self._context, scales=scales), None


class ColumnBackward(_Gathering):
    """dX = RS(dY @ W) during dW = dY^T @ AG(X), whose gather overlaps with dY @ W: as natively, but no multiprocessor
    moves data."""

    def __init__(self, context: TPContext) -> None:
        super().__init__(context)
        self._scatter: _StartedScatter | None = None

    def gather(self, inp: Any, group: Any, async_op: bool = False, quantizer: Any = None) -> tuple[Any, Any]:
        return self._start(inp, quantizer, flags_each_rank=False), self

    def scatter(self, partial: Any, group: Any, async_op: bool = False) -> tuple[Any, Any]:
        self.wait()  # one at a time; it also orders this stream behind the communication stream
        self._scatter = _StartedScatter(partial, self._context)
        return self._scatter.out, self._scatter

    def close(self) -> None:
        super().close()
        if self._scatter is not None:
            self._scatter.wait()


class _StartedScatter:
    """A reduce-scatter that was started; it may be waited for more than once."""

    def __init__(self, partial: torch.Tensor, context: TPContext) -> None:
        self._started = start_reduce_scatter(partial, context=context)
        self._is_over, self.out = False, self._started.out

    def wait(self) -> None:
        """Until ``out`` is there."""
        if not self._is_over:
            self._is_over = True
            self._started.wait()


class RowBackward(_Gathering):
    """dX = AG(dY) @ W: Transformer Engine's own product for the rows of each rank, as they arrive. A kernel with a
    split accumulator takes a quarter longer than cuBLAS, whose bits do not depend on the number of rows.

    Args:
        context: The group's.
        needs_dgrad: Whether dX is computed at all.
    """

    def __init__(self, context: TPContext, needs_dgrad: bool) -> None:
        super().__init__(context)
        self._needs_dgrad = needs_dgrad
        self._total: Any = None

    def gather(self, inp: Any, group: Any, async_op: bool = False, quantizer: Any = None) -> tuple[Any, Any]:
        """As natively, this rank's rows are quantized without their transpose."""
        if not hasattr(inp, "get_metadata"):
            rowwise, columnwise = quantizer.rowwise_usage, quantizer.columnwise_usage
            quantizer.set_usage(rowwise=True, columnwise=False)
            inp = quantizer(inp)
            quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
        self._total = self._start(inp, quantizer, flags_each_rank=True)
        if not self._needs_dgrad:
            self.wait()
        return self._total, None

    def multiply(self, weight: Any, rows: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        started = self._started
        if rows is not self._total or started is None:
            return super().multiply(weight, rows, *args, **kwargs)
        num_columns = weight.get_metadata()["data_transpose"].shape[0]
        num_rows, device = started.rows.shape[0], started.rows.device
        out = torch.empty(num_rows, num_columns, dtype=kwargs["out_dtype"], device=device)
        self._started = None  # if there is no memory for ``out``, ``close`` waits
        kwargs["out"] = out
        shares: list[Any] = []

        def each(place: slice, part: torch.Tensor) -> None:
            if not shares:
                shares.append(operand_like(rows, part.shape, data=part, data_transpose=None))
            share = refilled(shares[0], data=part)
            te_ops.general_gemm(weight, share, *args, **{**kwargs, "out": out[place]})

        started.consume(each, product_key((weight, rows), args, kwargs))
        return out, None, None, None
