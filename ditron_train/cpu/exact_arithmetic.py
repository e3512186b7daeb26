"""Exact CPU arithmetic: sums of products that do not depend on the order in which they are added.

torch's GEMM and Triton's interpreter add the same products in different orders, so on a CPU the fused path and
stock Megatron differ by roundings that a GPU run does not have. After `install`, both compute the same function:

- ``torch.mm`` and ``tl.dot`` compute the exact sum of the products and round it to fp32 once, then to the type of the
  result. Operands are cut into parts of at most 12 significant bits: bf16 and fp16 are one part, fp32 is two. Sums of
  thousands of their products are exact in fp64 if the exponents span less than some 15 bits. If they span more, the
  order of a sum changes the last bits of fp64, which practically never reach a result.
- ``torch.addmm`` rounds as cuBLAS does: the product to fp32, the scaled input to fp32, then one fused multiply-add.
- ``reduce_scatter_tensor`` and ``all_reduce`` add in the order of NCCL's ring and round to the type at every hop:
  rank ``d`` gets ``((x[d + 1] + x[d + 2]) + ...) + x[d]``. Gloo adds in another order.

An error in the order of a sum of products cannot be seen with it. Tests of these orders use integers, which are exact
in every order, or order-probe inputs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.cpu.interpreter import as_fp32

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_HIGH_BITS = np.uint32(0xFFFFF000)  # sign, exponent, and 11 of the 23 stored bits of the significand
#: What of Megatron-core names ``reduce_scatter_tensor`` by value.
_MEGATRON_MODULES = ("megatron.core.tensor_parallel.layers", "megatron.core.tensor_parallel.mappings")
_SUM = dist.ReduceOp.SUM
_replaced = contextlib.ExitStack()  # puts everything back
_libraries: list[torch.library.Library] = []  # at most one: without a reference to it, torch's own operators are back

#: A sum of products: fp64 sums of high x high, of high x low, and of low x low parts.
Totals = list[Any]


def install() -> None:
    """Makes products and sums over ranks of this process exact, by torch and in Triton's interpreter. Idempotent."""
    import triton.runtime.interpreter as interpreter

    if _libraries:
        return
    _libraries.append(torch.library.Library("aten", "IMPL"))
    _libraries[0].impl("mm", _mm, "CPU")
    _libraries[0].impl("addmm", _addmm, "CPU")
    builder = interpreter.InterpreterBuilder
    _replace(builder, "create_dot", functools.partialmethod(_dot, interpreter, builder.create_dot))
    scatter = functools.partial(_reduce_scatter, dist.reduce_scatter_tensor)
    for module in (sys.modules.get(name) for name in _MEGATRON_MODULES):
        if module is not None:
            _replace(module, "dist_reduce_scatter_func", scatter)
    _replace(dist, "reduce_scatter_tensor", scatter)
    _replace(dist, "all_reduce", functools.partial(_all_reduce, dist.all_reduce))


def uninstall() -> None:
    """Undoes `install`. Idempotent."""
    _libraries.clear()
    _replaced.close()


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.enter_context(mock.patch.object(owner, name, value))


def _parts(values: np.ndarray) -> list[np.ndarray]:
    """``values`` (fp32) as a sum of fp64 arrays, each of at most 12 significant bits."""
    high = (np.ascontiguousarray(values).view(np.uint32) & _HIGH_BITS).view(np.float32)
    with np.errstate(invalid="ignore"):
        low = np.where(np.isinf(values), np.float32(0), values - high)
    return [part.astype(np.float64) for part in ((high, low) if low.any() else (high,))]


def _add_products(totals: Totals, a: np.ndarray, b: np.ndarray) -> Totals:
    """``totals`` with those of ``a @ b`` (fp32) added."""
    totals = list(totals)
    for i, left in enumerate(_parts(a)):
        for j, right in enumerate(_parts(b)):
            totals[i + j] = totals[i + j] + left @ right
    return totals


def _rounded(totals: Totals) -> np.ndarray:
    """The fp32 value of a sum of products."""
    high, middle, low = totals
    with np.errstate(over="ignore"):
        result: np.ndarray = (high + (middle + low)).astype(np.float32)
    return result


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in fp32, for operands of ``_TYPES``."""
    operands = (tensor.detach().float().numpy() for tensor in (a, b))
    return torch.from_numpy(_rounded(_add_products([0.0, 0.0, 0.0], *operands)))


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype not in _TYPES:
        return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())
    return _product(a, b).to(a.dtype)


def _addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    if a.dtype not in _TYPES:
        return alpha * _mm(a, b) + (beta * c if beta else 0)
    alpha, beta = np.float32(alpha).item(), np.float32(beta).item()
    scaled = beta * c.float() if beta else torch.zeros((), dtype=torch.float32, device=c.device)
    return torch.add(scaled.double(), _product(a, b).double(), alpha=alpha).float().to(a.dtype)


def _dot(self: Any, interpreter: Any, native: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
    """``create_dot`` of the interpreter's builder. The result carries the sums that it was rounded from: the next
    ``tl.dot`` of a loop over K adds to them, and any other operation takes the fp32 value."""
    if accumulator.data.dtype != np.float32:
        return native(self, a, b, accumulator, *rest)
    totals = getattr(accumulator, "totals", None) or [accumulator.data.astype(np.float64), 0.0, 0.0]
    totals = _add_products(totals, as_fp32(a), as_fp32(b))
    result = interpreter.TensorHandle(_rounded(totals), accumulator.dtype.scalar)
    result.totals = totals
    return result


class _Done:
    """Stands for the handle of a collective that has ended."""

    def wait(self) -> bool:
        """Nothing to wait for."""
        return True


def _runs_natively(tensor: torch.Tensor, op: Any, group: Any) -> bool:
    """Whether gloo computes: it is no sum whose order can be seen, or it is one of several that are coalesced."""
    has_order = op == _SUM and tensor.is_floating_point() and dist.get_world_size(group) > 2
    coalescing = dist.distributed_c10d._world.pg_coalesce_state
    return not has_order or (group or dist.group.WORLD) in coalescing


def _ring_sum(shares: torch.Tensor, rank: int) -> torch.Tensor:
    """Sum over the first dimension in the order in which a ring delivers it to ``rank``."""
    world_size = len(shares)
    total = shares[(rank + 1) % world_size]
    for hop in range(2, world_size + 1):
        total = total + shares[(rank + hop) % world_size]
    return total


def _reduce_scatter(
    native: Any, output: torch.Tensor, input: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    if _runs_natively(input, op, group):
        return native(output, input, op=op, group=group, async_op=async_op)
    shares = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    dist.all_to_all_single(shares, input.contiguous(), group=group)
    output.copy_(_ring_sum(shares.view(-1, *output.shape), dist.get_rank(group)))
    return _Done() if async_op else None


def _all_reduce(native: Any, tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
    """A ring of one channel: a chunk for each rank, which ends at that rank and is sent to all."""
    if _runs_natively(tensor, op, group):
        return native(tensor, op=op, group=group, async_op=async_op)
    world_size, num_elements = dist.get_world_size(group), tensor.numel()
    gathered = torch.empty(world_size * num_elements, dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_into_tensor(gathered, tensor.detach().reshape(-1), group=group)
    shares = gathered.view(world_size, num_elements)
    bounds = [num_elements * rank // world_size for rank in range(world_size + 1)]
    chunks = [_ring_sum(shares[:, first:last], rank) for rank, (first, last) in enumerate(zip(bounds, bounds[1:]))]
    tensor.copy_(torch.cat(chunks).view(tensor.shape))
    return _Done() if async_op else None
