"""Whether a library's products of any number of rows are the sums in order, row by row.

A row of ``x @ w.T`` depends on that row of x alone, but which kernel computes it, and so the order of its sum, depends
on the number of rows. So a few rows are multiplied once by the tile GEMM, which adds in order at any size; at each
number of rows the library multiplies the same rows over and over, and every row of its product has to be one of those.
No communication, and a few products per number of rows and weight shape, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from ditron_train.gemm.ops import matmul_nn, matmul_nt
from ditron_train.gemm.order_probe import HIDDEN_TERMS, order_probe_matrix
from ditron_train.policy.op import ProofPart

_ROWS = 128  # that differ
_MOST_BLOCK = 512  # rows of the weight that differ
_COMPARED_ROWS = 2048  # at a time: the comparison takes a byte for each element


class ProductProof:
    """The products of one weight shape [N, K] in forward and dgrad.

    Args:
        shape: N, K.
        dtype, device: Of all operands.
        by_te: Whether the library is Transformer Engine, else torch.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, by_te: bool) -> None:
        (n, k), self._by_te = shape, by_te and HAVE_TE
        self._shape = shape
        block = next((one for one in range(min(_MOST_BLOCK, n), 2 * HIDDEN_TERMS, -1) if n % one == 0), n)
        with torch.inference_mode(False):
            self._x = order_probe_matrix((_ROWS, k), dtype, device, seed=311, signed=None)
            self._weight_block = order_probe_matrix((block, k), dtype, device, seed=312, signed="columns")
            grad = order_probe_matrix((n, _ROWS), dtype, device, seed=313, signed="rows", row_block=block)
            self._grad = grad.t().contiguous()
            weight = self._weight()
            self._y, self._dgrad = matmul_nt(self._x, weight), matmul_nn(self._grad, weight)

    def parts(self, *, takes_library_dgrad: bool) -> list[ProofPart]:
        """Whether the library's products of so many rows (of all ranks, as both products have them) are bitwise
        identical to the fused path's, in parts of which any rank may take any.

        Args:
            takes_library_dgrad: Whether the fused path's dgrad is torch's product, not the tile GEMM's.
        """
        work = float(self._shape[0] * self._shape[1])
        forward = ProofPart(self._forward_holds, work)
        if not takes_library_dgrad:
            return [forward, ProofPart(self._dgrad_holds, work)]
        # Torch's product is that of both paths then.
        return [forward, ProofPart(self._libraries_agree, 2 * work)] if self._by_te else [forward]

    def _forward_holds(self, rows: int) -> torch.Tensor:
        return _rows_equal(self._forward(_repeated(self._x, rows), self._weight()), self._y)

    def _dgrad_holds(self, rows: int) -> torch.Tensor:
        return _rows_equal(self._dgrad_product(_repeated(self._grad, rows), self._weight()), self._dgrad)

    def _libraries_agree(self, rows: int) -> torch.Tensor:
        grad, weight = _repeated(self._grad, rows), self._weight()
        return (_words(torch.matmul(grad, weight)) == _words(self._dgrad_product(grad, weight))).all()

    def _weight(self) -> torch.Tensor:
        n, k = self._shape
        return self._weight_block.repeat(n // len(self._weight_block), 1)

    def _forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self._by_te:
            return torch.matmul(x, weight.t())
        import transformer_engine.pytorch.cpp_extensions as te_ops

        product, *_ = te_ops.general_gemm(weight, x, out_dtype=x.dtype)
        return product

    def _dgrad_product(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self._by_te:
            return torch.matmul(grad, weight)
        import transformer_engine.pytorch.cpp_extensions as te_ops

        product, *_ = te_ops.general_gemm(weight, grad, layout="NN", grad=True, out_dtype=grad.dtype)
        return product


def _repeated(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return rows.repeat(-(-num_rows // len(rows)), 1)[:num_rows]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def _rows_equal(product: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Whether row i of ``product`` has the bits of row ``i % len(expected)`` of ``expected``."""
    found, wanted = _words(product), _words(expected)
    equal = torch.ones((), dtype=torch.bool, device=product.device)
    for first in range(0, len(found), _COMPARED_ROWS):
        part = found[first : first + _COMPARED_ROWS]
        whole = len(part) // len(wanted) * len(wanted)
        equal &= (part[:whole].unflatten(0, (-1, len(wanted))) == wanted).all()
        equal &= (part[whole:] == wanted[: len(part) - whole]).all()
    return equal
