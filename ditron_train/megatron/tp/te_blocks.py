"""How FP8 operands with a scale for each block are stored and sent, by the version of Transformer Engine.

Of a tensor [rows, K] there are bytes and scales by rows, bytes and scales by columns. GEMMs take scales of rows as
[K / 128, rows], bytes of columns as [K, rows] and their scales as [rows / 128, K].

- Until 2.11 a quantizer is told that its result will be sent. The result is then stored like the tensor (COMPACT), so
  the ranks' parts are contiguous one after another, and are transposed for GEMMs.
- From 2.12 on everything is stored as GEMMs take it. Rows of one rank are an operand as they arrive; bytes of columns
  are put side by side.

Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch

from ditron_train.megatron.tp.te_coverage import BLOCK
from ditron_train.megatron.tp.te_passes import operand_like, refilled

#: A copy of a tensor: quantized along its rows, or along its columns.
Side = Literal["rowwise", "columnwise"]
ROWS: Side = "rowwise"
COLUMNS: Side = "columnwise"

_TOLD = "all_gather_usage"  # by which a quantizer is told, until 2.11
_FORM = "data_format"  # the field in which a tensor says how it is, until 2.11


@cache
def _form(quantizer_class: Any) -> Literal["compact", "ready"] | None:
    """How what this class quantizes is sent; None: in no way that is known here."""
    if _TOLD in inspect.signature(quantizer_class.__init__).parameters:
        return "compact"
    rows, columns = 2 * BLOCK, 3 * BLOCK
    dtypes = importlib.import_module("transformer_engine_torch").DType
    try:
        quantizer = quantizer_class(dtypes.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)
        of_columns = quantizer.get_columnwise_shape((rows, columns))
        scales = [quantizer.get_scale_shape((rows, columns), columnwise=one) for one in (False, True)]
    except (AttributeError, TypeError):  # the interface is another
        return None
    expected = [(columns, rows), (columns // BLOCK, rows), (rows // BLOCK, columns)]
    return "ready" if [tuple(one) for one in (of_columns, *scales)] == expected else None


def _quantizer_class() -> Any:
    return importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor").Float8BlockQuantizer


def unsupported_reason_form() -> str | None:
    """Why blocks of the Transformer Engine that is installed are not sent by the fused path, or None."""
    if _form(_quantizer_class()) is None:
        return "this version of Transformer Engine sends blocks in another form"
    return None


def travel_options(payload: bool) -> dict[str, bool]:
    """Keywords of ``Float8BlockQuantizer``, whose tensors are sent, or not."""
    return {_TOLD: payload} if _form(_quantizer_class()) == "compact" else {}


def quantized_to_travel(quantizer: Any, values: torch.Tensor) -> Any:
    """``values`` quantized by a layer's quantizer in the layout they are sent in."""
    if not hasattr(quantizer, _TOLD):
        return quantizer(values)
    as_before, quantizer.all_gather_usage = quantizer.all_gather_usage, True
    made = quantizer(values)
    quantizer.all_gather_usage = as_before
    return made


def is_sendable(operand: Any, sides: Sequence[Side]) -> bool:
    """Whether an operand holds these sides in the layout they are sent in."""
    fields = operand.get_metadata() if hasattr(operand, "get_metadata") else {}
    if _FORM in fields:
        payload = fields[_FORM].name == "COMPACT"
    else:
        payload = fields.get("is_2D_scaled") is False
    return payload and all(fields[f"{side}_data"] is not None for side in sides)


def sent(operand: Any, side: Side) -> list[torch.Tensor]:
    """Bytes and scales of one side as they are sent: matrices, one rank after another. Scales of rows
    are stored as GEMMs take them, so that those of each rank are an operand's as they arrive."""
    fields = operand.get_metadata()
    data, scales = fields[f"{side}_data"], fields[f"{side}_scale_inv"]
    if _FORM not in fields:
        return [data.flatten(1) if side == COLUMNS else data.view(-1, data.shape[-1]), scales]
    return [data.view(-1, data.shape[-1]), scales.t().contiguous() if side == ROWS else scales]


def rows_of(like: Any, data: torch.Tensor, scales: torch.Tensor) -> Any:
    """An operand of rows and of their scales, which are stored as GEMMs take them: [K / 128, rows], in memory of their
    own."""
    fields = {f"{ROWS}_data": data, f"{ROWS}_scale_inv": scales, **_ready(like)}
    return operand_like(like, data.shape, **fields, columnwise_data=None, columnwise_scale_inv=None)


def with_rows(operand: Any, data: torch.Tensor, scales: torch.Tensor) -> Any:
    """An operand of ``rows_of`` with other rows, as many."""
    return refilled(operand, **{f"{ROWS}_data": data, f"{ROWS}_scale_inv": scales})


def finish_columns(total: Any, world_size: int) -> None:
    """What was gathered by columns, as GEMMs take it: in memory of its own."""
    ready = _ready(total)
    if ready:
        total._transpose_columnwise_data()
        total._data_format = ready[_FORM]
    else:
        behind_each_other = total.get_metadata()[f"{COLUMNS}_data"]
        # Eight bytes at a time are copied faster than one; rows of a rank are a multiple of 128.
        side_by_side = torch.cat(behind_each_other.view(torch.int64).chunk(world_size), dim=1)
        total._columnwise_data = side_by_side.view(behind_each_other.dtype)


def _ready(operand: Any) -> dict[str, Any]:
    """The field that says that an operand is stored as GEMMs take it; none if all do."""
    form = operand.get_metadata().get(_FORM)
    return {} if form is None else {_FORM: type(form).GEMM_READY}
