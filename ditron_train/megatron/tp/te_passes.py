"""What a pass of a tensor parallel linear layer of Transformer Engine communicates and multiplies, overlapped.

Transformer Engine's linear layers gather, multiply and reduce-scatter by three functions of its own. The functions
here have their names and arguments, and replace them in a copy of its layers' code (``te_fp8``): outside a
pass they are the native ones, inside they are those of the pass (``te_tensor_passes``, ``te_block_passes``). So
everything else (quantizers and their scales, which copies of an operand are kept, main_grad, amax histories) is
Transformer Engine's own doing. Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformer_engine.pytorch.cpp_extensions as te_ops
import transformer_engine.pytorch.distributed as te_distributed

from ditron_train.runtime.groups import GroupCache
from ditron_train.tp.all_reduce import largest_of_ranks
from ditron_train.tp.context import TPContext


class Pass:
    """A pass in which nothing is overlapped; the others replace what they do otherwise.

    Attributes:
        features: Of this rank's weight [N, K]; (0, 0) if nobody has said it.
    """

    features: tuple[int, int] = (0, 0)

    def __init__(self, context: TPContext) -> None:
        self._context = context

    def gather(self, inp: Any, group: Any, async_op: bool = False, quantizer: Any = None) -> tuple[Any, Any]:
        """All ranks' rows, quantized if there is a quantizer, and what to wait for."""
        return te_distributed.gather_along_first_dim(inp, group, async_op, quantizer)

    def multiply(self, weight: Any, rows: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The product, and what else may come out of ``general_gemm``."""
        return tuple(te_ops.general_gemm(weight, rows, *args, **kwargs))

    def scatter(self, partial: Any, group: Any, async_op: bool = False) -> tuple[Any, Any]:
        """This rank's rows of the sum over ranks, and what to wait for."""
        return te_distributed.reduce_scatter_along_first_dim(partial, group, async_op)

    def reduce_amax(self, amax: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Makes ``amax`` the largest of the ranks of ``group``; False: native has to, as for another layer's group,
        whose forward is computed again while this pass reads what it has saved."""
        context: TPContext | None = getattr(self, "_context", None)  # of Ulysses' projections there is none
        if context is None or context.group is not group or amax.numel() != 1 or amax.dtype != torch.float32:
            return False
        largest_of_ranks(amax, context=context)
        return True

    def close(self) -> None:
        """Waits for what was started and not waited for: starts and waits are counted, and what the communication
        stream reads must not be freed under it."""


def like_quantized(like: Any, shape: torch.Size, **changed: Any) -> Any:
    """A quantized tensor as ``like`` if nothing is ``changed``."""
    fields = {**like.get_metadata(), **changed}
    if isinstance(like, torch.Tensor):
        fields.update(shape=shape, dtype=like.dtype)
    made: Any = type(like)
    return made(**fields)


def operand_like(like: Any, shape: torch.Size, **changed: Any) -> Any:
    """The same for one product: it keeps no copy of the quantizer, which takes longer to make than all else."""
    return like_quantized(like, shape, **changed, quantizer=None)


def refilled(operand: Any, **fields: Any) -> Any:
    """An operand of ``operand_like`` with other ``fields`` of the same shapes: a kernel that was launched has the
    addresses of the former, and making another takes the host ten times as long."""
    for name, value in fields.items():
        setattr(operand, f"_{name}", value)
    return operand


def product_key(operands: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What products of quantized ``operands`` by ``general_gemm`` depend on, addresses included; None if that is
    not known, or if it gives back more than the product, which it allocates."""
    options = [*args, *kwargs.values()]
    if kwargs.get("gelu") or (kwargs.get("grad") and kwargs.get("bias") is not None):
        return None
    fields = [value for operand in operands for name, value in operand.get_metadata().items() if name != "quantizer"]
    key: list[Hashable] = [tuple(kwargs)]
    for value in (*fields, *options):
        if isinstance(value, torch.Tensor):
            key.append((value.data_ptr(), value.shape, value.dtype))
        elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)) or _is_of_enumeration(value):
            key.append(value)
        else:
            return None
    return tuple(key)


def _is_of_enumeration(value: Any) -> bool:
    """Whether it is one of Python's, or of those of C++ that Transformer Engine has."""
    return isinstance(value, Enum) or hasattr(type(value), "__members__")


class Sharded:
    """This rank's rows of what is gathered as it is multiplied."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def clear(self) -> None:
        """Nothing to release: only this rank's rows are held, which belong to another tensor."""


class Unreduced(NamedTuple):
    """A product that is multiplied as it is reduced: what ``general_gemm`` was called with."""

    weight: Any
    rows: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_active: ContextVar[Pass | None] = ContextVar("ditron_train_te_pass", default=None)


@contextlib.contextmanager
def passing(active: Pass | None) -> Iterator[None]:
    """Inside, ``gather``, ``multiply`` and ``scatter`` are those of ``active``; at the end it is closed."""
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)
        if active is not None:
            active.close()


def gather(inp: Any, process_group: Any, async_op: bool = False, quantizer: Any = None) -> tuple[Any, Any]:
    """``gather_along_first_dim`` of Transformer Engine, or of the pass."""
    active = _active.get()
    if active is None:
        return te_distributed.gather_along_first_dim(inp, process_group, async_op, quantizer)
    return active.gather(inp, process_group, async_op, quantizer)


def multiply(A: Any, B: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """``general_gemm`` of Transformer Engine, or of the pass."""
    active = _active.get()
    return (
        tuple(te_ops.general_gemm(A, B, *args, **kwargs)) if active is None else active.multiply(A, B, *args, **kwargs)
    )


def scatter(inp: Any, tp_group: Any, async_op: bool = False) -> tuple[Any, Any]:
    """``reduce_scatter_along_first_dim`` of Transformer Engine, or of the pass."""
    active = _active.get()
    if active is None:
        return te_distributed.reduce_scatter_along_first_dim(inp, tp_group, async_op)
    return active.scatter(inp, tp_group, async_op)


class _Done(dist.Work):
    """What a quantizer waits for when the amax is reduced in the order of the stream."""

    def wait(self, timeout: Any = None) -> bool:
        """At once."""
        return True


class AmaxGroup(dist.ProcessGroup):
    """The tensor parallel group as a quantizer asks it for the largest amax: by the pass, outside of one natively.

    Transformer Engine asks from C++, by the virtual ``allreduce`` of a quantizer's ``amax_reduction_group``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """See ``ProcessGroup``; a quantizer asks for the maximum."""
        active = _active.get()
        if active is not None and len(tensors) == 1 and active.reduce_amax(tensors[0], self._group):
            return _DONE
        return self._group.allreduce(tensors, opts)


_DONE = _Done()  # one for all: nobody else keeps it while C++ waits
_amax_groups: GroupCache[dist.ProcessGroup, AmaxGroup] = GroupCache()


def reduce_amax_in_passes(layer: Any) -> None:
    """Has the quantizers of ``layer`` that reduce their amax over its tensor parallel group do so by the pass."""
    group = layer.tp_group
    for quantizers in layer.quantizers.values():
        for quantizer in quantizers:
            if getattr(quantizer, "with_amax_reduction", False) and quantizer.amax_reduction_group is group:
                quantizer.amax_reduction_group = _amax_group(group)


def _amax_group(group: dist.ProcessGroup) -> AmaxGroup:
    if group not in _amax_groups:
        _amax_groups[group] = AmaxGroup(group)
    return _amax_groups[group]


def giving_group(native: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The function of Transformer Engine's by which a pass of a layer gives a quantizer the group to reduce its amax
    over, or None: inside a pass of this package the amax is reduced by it."""

    def give(quantizer: Any, amax_reduction_group: Any) -> None:
        is_native = amax_reduction_group is None or _active.get() is None
        native(quantizer, amax_reduction_group if is_native else _amax_group(amax_reduction_group))

    return give


#: By the names under which Transformer Engine's layers call them.
STAND_INS = {"gather_along_first_dim": gather, "general_gemm": multiply, "reduce_scatter_along_first_dim": scatter}
