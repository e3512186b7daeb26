"""An attention's two projections with Ulysses' exchanges in them (part of feature ``sp``).

``linears`` and ``te_linears`` say what is particular to megatron-core's local layers and to Transformer Engine's.

Hooks on an attention's projections: if these are fused with their exchanges, what comes out of the one and into
the other is of all rows and this rank's heads, which is not what a hook sees natively (part of feature ``sp``).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from ditron_train.megatron.plugin.patching import is_redirected
from ditron_train.megatron.shared.forward_override import unsupported_reason_stand_in
from ditron_train.megatron.shared.module_hooks import has_hooks
from ditron_train.megatron.sp.exchange import AttentionShape
from ditron_train.megatron.sp.spec import route_projections
from ditron_train.sp import InputShards, LateWgrad, SPContext, output_projection, qkv_projection
from ditron_train.sp.head_norms import Norms
from ditron_train.symm.exchange import exchange

_OF_QKV = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")  # that see q, k and v or their gradient


_OF_OUT = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")  # that see the attended values or their gradient


#: Whether, when an attention was first called, such hooks were there on some ranks of its group and not on others.
_differ: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def unsupported_reason_hooks_of_qkv(qkv: Any) -> str | None:
    """Why the QKV projection is not fused with its exchange for the sake of hooks on it, or None."""
    return "hooks on the QKV projection look at q, k and v" if has_hooks(qkv, _OF_QKV) else None


def unsupported_reason_hooks_of_out(out: Any) -> str | None:
    """Why the output projection is not fused with its exchange for the sake of hooks on it, or None."""
    return "hooks on the output projection look at its input" if has_hooks(out, _OF_OUT) else None


def unsupported_reason_hooks_of_ranks(attention: Any) -> str | None:
    """Why no projection of ``attention`` is fused for the sake of hooks that only some ranks have, as when the first
    alone logs, or None; collective at its first call."""
    differ = _differ.get(attention)
    if differ is None:
        mine = has_hooks(getattr(attention, "linear_qkv", None), _OF_QKV), has_hooks(attention.linear_proj, _OF_OUT)
        gathered = exchange(attention.core_attention.exchange_group, mine)
        differ = _differ[attention] = len(set(gathered)) > 1
    return "some ranks have hooks on the projections, others have none" if differ else None


def forget_hooks() -> None:
    """Ask all ranks again."""
    _differ.clear()


class _SequenceShards:
    """Sequence parallelism: every tensor parallel rank holds its rows [s / (W * T), b, hidden]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """All-gather over the tensor parallel group."""
        total = x.new_empty(x.shape[0] * self._group.size(), *x.shape[1:])
        return _when(dist.all_gather_into_tensor(total, x.contiguous(), group=self._group, async_op=True), total)

    def start_reduce(self, grad: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Reduce-scatter over the tensor parallel group."""
        own = grad.new_empty(grad.shape[0] // self._group.size(), *grad.shape[1:])
        return _when(dist.reduce_scatter_tensor(own, grad.contiguous(), group=self._group, async_op=True), own)


class _Replicas:
    """No sequence parallelism: every tensor parallel rank holds all of the input."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """It is there."""
        return lambda: x

    def start_reduce(self, grad: torch.Tensor) -> Callable[[], torch.Tensor]:
        """All-reduce over the tensor parallel group."""
        return _when(dist.all_reduce(grad, group=self._group, async_op=True), grad)


def _when(work: dist.Work, result: torch.Tensor) -> Callable[[], torch.Tensor]:
    def finish() -> torch.Tensor:
        work.wait()
        return result

    return finish


def shards_of(layer: Any) -> InputShards | None:
    """How the input of the column parallel ``layer`` (local or Transformer Engine's) is held over its tensor parallel
    group."""
    group = layer.tp_group
    if group is None or group.size() == 1:
        return None
    return _SequenceShards(group) if layer.sequence_parallel else _Replicas(group)


def reduced_output(layer: Any, out: torch.Tensor) -> torch.Tensor:
    """The partial sums of the row parallel ``layer``, added up over its tensor parallel group as native does."""
    group = layer.tp_group
    if group is None or group.size() == 1:
        return out
    reduce = (
        reduce_scatter_to_sequence_parallel_region
        if layer.sequence_parallel
        else reduce_from_tensor_model_parallel_region
    )
    return reduce(out, group=group)


def overlaps_tensor_parallelism(*layers: Any) -> bool:
    """Whether one of these layers has its tensor parallel communication overlapped by feature ``tp``: it cannot have
    both."""
    return any(
        layer.tp_group is not None and layer.tp_group.size() > 1 and layer.sequence_parallel and _is_fused(type(layer))
        for layer in layers
    )


def _is_fused(kind: type) -> bool:
    return kind.__module__.startswith("ditron_train.") or is_redirected(kind)


class Projections(ABC):
    """The projections of one kind of layers: what speaks against them, their input, bias and weight gradients."""

    rounds_bias_once: ClassVar[bool] = False  # whether the bias of q, k and v is added inside the product

    qkv_kinds: ClassVar[tuple[type[torch.nn.Module], ...]]
    out_kind: ClassVar[type[torch.nn.Module]]

    def unsupported_reason(self, qkv: Any, out: Any, x: torch.Tensor) -> str | None:
        """Why these two layers cannot be fused with the exchanges, or None."""
        return self._unsupported_reason_front(qkv, x) or self.unsupported_reason_out(out, x)

    def _unsupported_reason_front(self, qkv: Any, x: torch.Tensor) -> str | None:
        """Why the QKV projection cannot be fused with its exchange, or None."""
        if not isinstance(qkv, self.qkv_kinds):
            return f"the QKV projection is {type(qkv).__name__}"
        if overlaps_tensor_parallelism(qkv):
            return "the projections overlap with tensor parallel communication"
        reason = (
            self._unsupported_reason_qkv(qkv)
            or unsupported_reason_stand_in(qkv)
            or unsupported_reason_hooks_of_qkv(qkv)
        )
        return reason or self._unsupported_reason_layer(qkv, x)

    def unsupported_reason_out(self, out: Any, x: torch.Tensor) -> str | None:
        """Why the output projection cannot be fused with its exchange, or None."""
        if not isinstance(out, self.out_kind):
            return f"the output projection is {type(out).__name__}"
        if overlaps_tensor_parallelism(out):
            return "the output projection overlaps with tensor parallel communication"
        reason = (
            self._unsupported_reason_out(out)
            or unsupported_reason_stand_in(out)
            or unsupported_reason_hooks_of_out(out)
        )
        return reason or self._unsupported_reason_layer(out, x)

    def route(
        self,
        group: dist.ProcessGroup,
        shape: AttentionShape,
        input_shape: tuple[int, ...],
        layers: tuple[Any, Any],
        like: torch.Tensor,
        norms: Norms = (),
    ) -> SPContext | None:
        """The context to run the projections (QKV, output) of an input of ``input_shape`` [s / W, b, hidden] with,
        which is ``like`` or has its type and device; or None. ``norms``: as ``qkv_projection``."""
        qkv, out = layers
        bias = self._qkv_bias(qkv) if self.rounds_bias_once else None
        return route_projections(group, shape, input_shape, qkv.weight, out.weight, like, bias, norms)

    def project_qkv(
        self,
        layer: Any,
        x: torch.Tensor,
        context: SPContext,
        shape: AttentionShape,
        row_table: torch.Tensor | None = None,
        late: LateWgrad | None = None,
        norms: Norms = (),
    ) -> tuple[torch.Tensor, ...]:
        """q, k and v of this rank's heads; ``row_table``, ``late``, ``norms``: as ``qkv_projection``."""
        options: dict[str, Any] = dict(
            bias=self._qkv_bias(layer), wgrad=self._wgrad(layer), shards=shards_of(layer), late=late,
            rounds_once=self.rounds_bias_once, norms=norms,
        )  # fmt: skip
        layout = shape.qkv_layout(context.world_size)
        rows = self._qkv_input(layer, x)
        return qkv_projection(rows, layer.weight, context=context, layout=layout, row_table=row_table, **options)

    def project_out(
        self,
        layer: Any,
        attended: torch.Tensor,
        context: SPContext,
        shape: AttentionShape,
        row_table: torch.Tensor | None = None,
        late: LateWgrad | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's (output, bias) for [s, b, heads of this rank, d]."""
        options: dict[str, Any] = dict(row_table=row_table, wgrad=self._wgrad(layer), late=late)
        layout = shape.output_layout(context.world_size)
        out = output_projection(attended, layer.weight, context=context, layout=layout, **options)
        return self._with_bias(layer, reduced_output(layer, out))

    @abstractmethod
    def _unsupported_reason_qkv(self, layer: Any) -> str | None:
        """What of the QKV projection is not covered."""

    @abstractmethod
    def _unsupported_reason_out(self, layer: Any) -> str | None:
        """What of the output projection is not covered."""

    def _unsupported_reason_layer(self, layer: Any, x: torch.Tensor) -> str | None:
        """What of any layer of this kind is not covered in this call."""
        return None

    def _qkv_input(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """What is multiplied."""
        return x

    @abstractmethod
    def _qkv_bias(self, layer: Any) -> torch.Tensor | None:
        """What is added to q, k and v."""

    @abstractmethod
    def _wgrad(self, layer: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """Computes the weight gradient of one call."""

    @abstractmethod
    def _with_bias(self, layer: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the output projection returns."""
