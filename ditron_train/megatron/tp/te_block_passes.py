"""The passes of layers whose FP8 operands have a scale for each block of 128 or 128 x 128 values (recipe blockwise).

A tensor's bytes and its scales are sent together, by rows for the products with W and by columns for the weight
gradient: neither can be made from the other. All products are Transformer Engine's own, for the rows of one rank or of
a block of ranks at a time; its bits do not depend on the number of rows. How operands are stored and sent differs from
version to version (``te_blocks``). Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine.pytorch.cpp_extensions as te_ops

from ditron_train.megatron.tp import te_tensor_passes as tensorwise
from ditron_train.megatron.tp.te_blocks import (
    COLUMNS,
    ROWS,
    Side,
    finish_columns,
    is_sendable,
    quantized_to_travel,
    rows_of,
    sent,
    with_rows,
)
from ditron_train.megatron.tp.te_passes import Pass, Sharded, like_quantized, product_key
from ditron_train.tp.context import TPContext
from ditron_train.tp.gather import PendingParts, start_gather_of_parts
from ditron_train.tp.reduce_scatter import scatter_as_computed

#: Of one that fills the GPU, some 50 us, and of one that is worth the host's time if it may not be recorded.
_FLOPS_OF_A_PRODUCT, _FLOPS_OF_A_LAUNCH = 5e10, 3e11


def _num_products(rows: int, n: int, k: int, world_size: int, flops: float = _FLOPS_OF_A_LAUNCH) -> int:
    """In how many products of ``flops`` or more, of as many ranks' rows each, [rows, k] @ [k, n] is multiplied as it
    is communicated; two at least, so that one is sent while the other is multiplied."""
    most = 2.0 * rows * n * k / flops
    divisors = [count for count in range(2, world_size + 1) if world_size % count == 0]
    return max([count for count in divisors if count <= most], default=min(divisors, default=1))


def _start(
    operand: Any, sides: Sequence[Side], context: TPContext, *, num_flagged_first: int, num_columns: int | None = None
) -> PendingParts:
    """A gather of the bytes of each side and their scales; ``num_columns``: columns of the product of the parts that
    are consumed rank by rank."""
    parts = [part for side in sides for part in sent(operand, side)]
    num_blocks = None
    if num_columns is not None:
        rows, k = parts[0].shape
        num_blocks = _num_products(rows * context.world_size, num_columns, k, context.world_size)
        if num_blocks < context.world_size:
            _scales_of_block(context, parts[1], num_blocks)  # it may have to grow before the gather starts
    return start_gather_of_parts(parts, context=context, num_flagged_first=num_flagged_first, num_blocks=num_blocks)


def _scales_of_block(context: TPContext, own: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Where the scales of a block of ranks' rows are stored side by side; those of one rank's are ``own`` [K / 128,
    rows]."""
    num_ranks = context.world_size // num_blocks
    return context.scratch("scales", (own.shape[0], num_ranks * own.shape[1]), own.dtype)


def _total(like: Any, shape: Sequence[int], sides: Sequence[Side], started: PendingParts) -> Any:
    """A quantized tensor of ``shape`` of what all ranks have sent, in the layout it is sent in."""
    fields: dict[str, Any] = {}
    for side in (ROWS, COLUMNS):
        fields.update({f"{side}_data": None, f"{side}_scale_inv": None})
    for side, data, scales in zip(sides, started.totals[::2], started.totals[1::2]):
        fields.update({f"{side}_data": data, f"{side}_scale_inv": scales})
    return like_quantized(like, torch.Size(shape), **fields)


def _multiply_arrivals(
    begun: ColumnForward | RowBackward, like: Any, weight: Any, shape: Sequence[int], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The product, of ``shape``, of the rows of all ranks, which the pass has started to gather, for those of each
    block of ranks as they arrive."""
    context, started = begun._context, begun._started
    assert started is not None, "rows are multiplied once"
    total, fields = started.totals[0], like.get_metadata()
    num_own = fields[f"{ROWS}_data"].numel()
    kwargs["out"] = out = torch.empty(shape, dtype=kwargs["out_dtype"], device=total.device)
    flat, operands = out.view(total.shape[0], -1), list[Any]()

    def each(block: int, parts: list[torch.Tensor]) -> None:
        data, scales = parts
        num_rows, num_ranks = len(data), data.numel() // num_own
        if num_ranks > 1:
            of_ranks = scales.chunk(num_ranks)
            side_by_side = _scales_of_block(context, of_ranks[0], context.world_size // num_ranks)
            scales = torch.cat(of_ranks, dim=1, out=side_by_side)
        if not operands:
            operands.append(rows_of(like, data, scales))
        rows = with_rows(operands[0], data, scales)
        share = flat[block * num_rows : (block + 1) * num_rows]
        te_ops.general_gemm(weight, rows, *args, **{**kwargs, "out": share})

    key = product_key((weight,), (*args, fields["fp8_dtype"]), kwargs)
    begun._started = None  # if anything fails before, ``close`` waits
    started.consume(each, key)
    return out


class ColumnForward(Pass):
    """Y = AG(X) @ W^T: rows are sent while W is quantized, and are multiplied as they arrive."""

    def __init__(self, context: TPContext) -> None:
        super().__init__(context)
        self._started: PendingParts | None = None

    def gather(self, inp: Any, group: Any, async_op: bool = False, quantizer: Any = None) -> tuple[Any, Any]:
        if not is_sendable(inp, (ROWS,)):
            return super().gather(inp, group, async_op, quantizer)
        self._started = _start(inp, (ROWS,), self._context, num_flagged_first=2, num_columns=self.features[0] or None)
        return Sharded(inp), None

    def multiply(self, weight: Any, rows: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if not isinstance(rows, Sharded):
            return super().multiply(weight, rows, *args, **kwargs)
        size = rows.rows.get_metadata()[f"{ROWS}_data"].shape
        num_columns = weight.get_metadata()[f"{ROWS}_data"].shape[0]
        shape = (size[0] * self._context.world_size, *size[1:-1], num_columns)
        return _multiply_arrivals(self, rows.rows, weight, shape, *args, **kwargs), None, None, None

    def close(self) -> None:
        if self._started is not None:
            self._started.wait()


class RowForward(tensorwise.RowForward):
    """Y = RS(X @ W^T): the rows of each rank are sent while the next are multiplied.

    X is copied to where it always is: so the products are the same whenever this weight is multiplied, and are
    recorded. A copy takes the device a hundredth of what the product takes it, and products would take the host longer
    than natively.
    """

    def scatter(self, partial: Any, group: Any, async_op: bool = False) -> tuple[Any, Any]:
        weight, rows, args, kwargs = partial
        context, fields = self._context, rows.get_metadata()
        data, num_columns = fields[f"{ROWS}_data"], weight.get_metadata()[f"{ROWS}_data"].shape[0]
        num_rows, k = data.shape[:-1].numel(), data.shape[-1]
        num_products = _num_products(num_rows, num_columns, k, context.world_size, _FLOPS_OF_A_PRODUCT)
        share, scales = num_rows // num_products, fields[f"{ROWS}_scale_inv"]
        in_shares = scales.unflatten(1, (num_products, -1)).transpose(0, 1)  # as GEMMs take those of each share
        flat = context.scratch("rows", (num_rows, k), data.dtype)
        ready = context.scratch("scales", in_shares.shape, scales.dtype)
        parts: list[Any] = []

        def compute(place: slice, out: torch.Tensor) -> None:
            assert place.stop - place.start == share, "shares are equal"
            of_share = flat[place], ready[place.start // share]
            if not parts:
                parts.append(rows_of(rows, *of_share))
            te_ops.general_gemm(weight, with_rows(parts[0], *of_share), *args, **{**kwargs, "out": out})

        def place_rows() -> None:
            flat.copy_(data.view(num_rows, k))
            ready.copy_(in_shares)

        key = product_key((weight,), (*args, flat, ready, fields["fp8_dtype"]), kwargs)
        options: dict[str, Any] = dict(context=context, num_products=num_products, key=key, before=place_rows)
        return scatter_as_computed(compute, (*data.shape[:-1], num_columns), kwargs["out_dtype"], **options), None


class ColumnBackward(tensorwise.ColumnBackward):
    """dX = RS(dY @ W) during dW = dY^T @ AG(X), whose gather, by columns, overlaps with dY @ W."""

    def gather(self, inp: Any, group: Any, async_op: bool = False, quantizer: Any = None) -> tuple[Any, Any]:
        if not is_sendable(inp, (COLUMNS,)):
            return Pass.gather(self, inp, group, async_op, quantizer)
        self._started = started = _start(inp, (COLUMNS,), self._context, num_flagged_first=0)
        data, scales = started.totals
        num_columns = scales.shape[-1]  # 128 of a column have a scale
        total = _total(inp, (data.numel() // num_columns, num_columns), (COLUMNS,), started)
        return total, _Finishing(self, total, self._context.world_size)


class _Finishing:
    """What native code waits for: all columns, as GEMMs take them."""

    def __init__(self, gathering: ColumnBackward, total: Any, world_size: int) -> None:
        self._gathering, self._total, self._world_size = gathering, total, world_size

    def wait(self) -> None:
        """Again it does nothing."""
        self._gathering.wait()
        total, self._total = self._total, None
        if total is not None:
            finish_columns(total, self._world_size)


class RowBackward(tensorwise.RowBackward):
    """dX = AG(dY) @ W for the rows of each rank as they arrive, while dY by columns is sent for dW."""

    def gather(self, inp: Any, group: Any, async_op: bool = False, quantizer: Any = None) -> tuple[Any, Any]:
        """As natively, this rank's rows are quantized in the layout they are sent in."""
        sides = [ROWS, COLUMNS] if quantizer.columnwise_usage else [ROWS]
        if not quantizer.rowwise_usage or (not hasattr(inp, "get_metadata") and not quantizer.is_quantizable(inp)):
            return Pass.gather(self, inp, group, async_op, quantizer)
        if not hasattr(inp, "get_metadata"):
            inp = quantized_to_travel(quantizer, inp)
        if not is_sendable(inp, sides):
            return Pass.gather(self, inp, group, async_op, quantizer)
        self._started = started = _start(
            inp, sides, self._context, num_flagged_first=2, num_columns=self.features[1] or None
        )
        self._rows, self._total = inp, _total(inp, started.totals[0].shape, sides, started)
        if not self._needs_dgrad:
            self.wait()
            self._finish()
        return self._total, None

    def _finish(self) -> None:
        if self._total.get_metadata()[f"{COLUMNS}_data"] is not None:
            finish_columns(self._total, self._context.world_size)

    def multiply(self, weight: Any, rows: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        started = self._started
        if rows is not self._total or started is None:
            return Pass.multiply(self, weight, rows, *args, **kwargs)
        shape = (started.totals[0].shape[0], weight.get_metadata()[f"{COLUMNS}_data"].shape[0])
        dgrad = _multiply_arrivals(self, self._rows, weight, shape, *args, **kwargs)
        self._finish()
        return dgrad, None, None, None
