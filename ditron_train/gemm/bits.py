"""Whether the tile GEMM's bits equal cuBLAS's at a shape: what is known beforehand, and a probe for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ditron_train.gemm.ops import matmul_nn, matmul_nt, matmul_tn
from ditron_train.gemm.revealing import HIDDEN_TERMS, revealing_matrix
from ditron_train.runtime.device import is_capturing, kernel_target, with_index
from ditron_train.runtime.errors import NotSupportedError

__all__ = ["Layout", "known_bits", "probe_bits"]

Layout = Literal["nt", "nn", "tn"]

# Measured on H200, cuBLAS of CUDA 13.0, bf16: 468 of 504 aligned shapes (M 128..8192, N 512..11008, K 256..14336)
# equal. The others have few output tiles and a long K, where cuBLAS splits K and so sums in another order.
_MANY_TILES = 132  # of 128 x 256: a full wave, where splitting K gains nothing
_SHORT_K = 4096


def known_bits(m: int, n: int, k: int, layout: Layout, dtype: torch.dtype, target: str = "sm_90") -> bool | None:
    """What measurements say about C [m, n] = A @ B with sums of length k, against ``torch.matmul``.

    Returns:
        True: equal at every measured shape of this kind. False: known to differ at shapes of this kind, or sums too
        short for ``probe_bits`` to see. None: not known, so ``probe_bits`` must decide (every unaligned shape, type or
        device that was not measured).
    """
    if m * n and 0 < k <= HIDDEN_TERMS and target != "interpreter":
        return False
    if target != "sm_90" or dtype != torch.bfloat16 or layout not in ("nt", "nn") or m % 8 or n % 8 or k % 8:
        return None
    if m * n == 0 or k == 0:
        return True
    num_tiles = -(-m // 128) * -(-n // 256)
    if num_tiles >= _MANY_TILES:
        return True
    if layout == "nt" and m <= 512 and n <= 1024 and k >= _SHORT_K:
        return False
    return None


@dataclass(frozen=True)
class _ProbeKey:
    m: int
    n: int
    k: int
    layout: str
    dtype: torch.dtype
    device: torch.device
    a_row_stride: int
    b_row_stride: int


_probed: dict[_ProbeKey, bool] = {}

_OPS = {"nt": matmul_nt, "nn": matmul_nn, "tn": matmul_tn}


def _reference(layout: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if layout == "nt":
        return torch.matmul(a, b.t())
    if layout == "nn":
        return torch.matmul(a, b)
    return torch.matmul(a.t(), b)


def _with_stride(matrix: torch.Tensor, row_stride: int) -> torch.Tensor:
    """The same values with ``row_stride`` elements between rows."""
    buffer = torch.empty(matrix.shape[0], row_stride, dtype=matrix.dtype, device=matrix.device)
    return buffer[:, : matrix.shape[1]].copy_(matrix)


def probe_bits(
    m: int,
    n: int,
    k: int,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    a_row_stride: int | None = None,
    b_row_stride: int | None = None,
) -> bool:
    """Whether one product equals ``torch.matmul``'s bit for bit; remembered for the process.

    Its values make every element a witness of the order of its sum (``gemm.revealing``). The first call for a shape
    computes both products and waits for the device.

    Args:
        m: Rows of the result.
        n: Columns of the result.
        k: Length of the sums.
        layout: ``nt`` (``matmul_nt``), ``nn`` or ``tn``.
        dtype: Type of operands and result.
        device: Where to compute.
        a_row_stride: Elements between rows of the first operand as stored; its columns where None.
        b_row_stride: The same for the second.

    Raises:
        NotSupportedError: An unknown layout, strides below the columns, no kernel for type or device, or a first call
            while a CUDA graph is being captured.
    """
    if layout not in _OPS:
        raise NotSupportedError(f"probe_bits: layout {layout!r} is not nt, nn or tn")
    a_shape = (k, m) if layout == "tn" else (m, k)
    b_shape = (n, k) if layout == "nt" else (k, n)
    device = with_index(device)
    key = _ProbeKey(m, n, k, layout, dtype, device, a_row_stride or a_shape[1], b_row_stride or b_shape[1])
    if key in _probed:
        return _probed[key]
    if key.a_row_stride < a_shape[1] or key.b_row_stride < b_shape[1]:
        raise NotSupportedError("probe_bits: a row stride is below the number of columns")
    kernel_target(device)
    if is_capturing(device):
        raise NotSupportedError(f"probe_bits: {m}x{n}x{k} {layout} was not probed before the CUDA graph capture began")
    along_k = "columns" if layout == "nt" else "rows"  # of b
    a = _with_stride(revealing_matrix(a_shape, dtype, device, seed=1, signed=None), key.a_row_stride)
    b = _with_stride(revealing_matrix(b_shape, dtype, device, seed=2, signed=along_k), key.b_row_stride)
    _probed[key] = torch.equal(_OPS[layout](a, b), _reference(layout, a, b))
    return _probed[key]
