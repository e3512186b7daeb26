"""What a tensor needs before a kernel can read or write it through a tensor descriptor (TMA)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

#: Types of FP8 operands.
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

_ALIGNMENT_BYTES = 16


class Operand(NamedTuple):
    """What of a tensor decides whether there is a kernel for it."""

    dtype: torch.dtype
    device: torch.device


class TensorScales(NamedTuple):
    """What the values of FP8 operands are multiplied by, one number a tensor: fp32 of one element each, on their
    device. Transformer Engine calls it the inverse scale."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def addresses(self) -> tuple[int, int]:
        """For the keys of launches."""
        return self.a.data_ptr(), self.b.data_ptr()


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of products of ``dtype``: bf16 of FP8 operands, else their own."""
    return torch.bfloat16 if dtype in FP8_DTYPES else dtype


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a 2-D tensor can be described as it is: unit inner stride, base and row stride in whole 16 bytes."""
    if tensor.data_ptr() % _ALIGNMENT_BYTES or (tensor.stride(1) != 1 and tensor.shape[1] != 1):
        return False
    if tensor.shape[0] == 1:
        return True
    row_stride = tensor.stride(0)
    return row_stride >= tensor.shape[1] and row_stride * tensor.element_size() % _ALIGNMENT_BYTES == 0


_compared: set[tuple[Hashable, ...]] = set()
_MOST_COMPARED = 4096  # of some 2 KB each


def addresses_of(
    tensors: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[int, ...] | None:
    """Where these tensors are; None unless they are contiguous and of this kind. There may be many, and a module's
    stay where they are: of those at the same addresses as before the first one alone is looked at."""

    def is_of_kind(tensor: torch.Tensor) -> bool:
        kind = tensor.shape, tensor.dtype, tensor.device
        return kind == (shape, dtype, device) and tensor.is_contiguous()

    addresses = tuple(map(torch.Tensor.data_ptr, tensors))
    key = (addresses, shape, dtype, device)
    if key not in _compared or not is_of_kind(tensors[0]):
        if not all(map(is_of_kind, tensors)):
            return None
        if len(_compared) >= _MOST_COMPARED:
            _compared.clear()
        _compared.add(key)
    return addresses


def padded_columns(num_columns: int, dtype: torch.dtype) -> int:
    """Columns with which a row is whole 16 bytes, as descriptors need it."""
    return num_columns + -num_columns % (_ALIGNMENT_BYTES // dtype.itemsize)


def empty_aligned(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised [num_rows, num_columns] that can be described: a view of a wider buffer if rows need
    padding."""
    padded = padded_columns(num_columns, dtype)
    buffer = torch.empty(num_rows, padded, dtype=dtype, device=device)
    return buffer if padded == num_columns else buffer[:, :num_columns]


def aligned_operand(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the 2-D tensor itself if it can be described, else a copy that can be.

    A copy has equal values, so results do not change; it costs one pass over the tensor and its memory.
    """
    if is_aligned(tensor):
        return tensor
    copy = empty_aligned(tensor.shape[0], tensor.shape[1], tensor.dtype, tensor.device)
    return copy.copy_(tensor)


def make_descriptor(tensor: torch.Tensor, block: Sequence[int]) -> TensorDescriptor:
    """Host descriptor of an aligned, not empty 2-D tensor, read or written in blocks of ``block`` elements."""
    num_rows, num_columns = tensor.shape
    # the row stride of a single row is never used, but the descriptor checks it
    row_stride = tensor.stride(0) if num_rows > 1 else padded_columns(num_columns, tensor.dtype)
    return TensorDescriptor(tensor, [num_rows, num_columns], [row_stride, 1], list(block))
