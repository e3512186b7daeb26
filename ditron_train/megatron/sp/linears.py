"""An attention's projections with Ulysses' exchanges in them, as megatron-core's local layers compute them (feature
``sp``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from ditron_train.megatron.compat import why_not_weight
from ditron_train.megatron.plugin.patching import is_redirected
from ditron_train.megatron.shared.forward_override import why_not_stand_in
from ditron_train.megatron.shared.wgrad import NativeWgrad, bias_of
from ditron_train.megatron.sp.exchange import AttentionShape
from ditron_train.sp import InputShards, LateWgrad, SPContext, output_projection, qkv_projection

__all__ = ["LocalLinears", "linears_of", "overlaps_tensor_parallelism", "reduced_output", "shards_of"]


def linears_of(layer: Any) -> Any:
    """``LocalLinears``, or ``TELinears`` for Transformer Engine's layers."""
    if isinstance(layer, RowParallelLinear) or not HAVE_TE:
        return LocalLinears
    from ditron_train.megatron.sp.te_attention import TELinears

    return TELinears


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
        layer.tp_group is not None and layer.tp_group.size() > 1 and layer.sequence_parallel and _is_ours(type(layer))
        for layer in layers
    )


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("ditron_train.") or is_redirected(kind)


class LocalLinears:
    """How the projections of the local spec are covered: their reasons against it, their input, their weight
    gradients."""

    @staticmethod
    def why_not(qkv: Any, out: Any, x: torch.Tensor) -> str | None:
        """Why these two layers cannot be fused with the exchanges, or None."""
        if not isinstance(qkv, ColumnParallelLinear):
            return f"projections are {type(qkv).__name__} and {type(out).__name__}"
        if overlaps_tensor_parallelism(qkv):
            return "the projections overlap with tensor parallel communication"
        if getattr(qkv, "skip_bias_add", False) and qkv.bias is not None:
            return "the bias of q, k and v is not added by their layer"
        if qkv.disable_grad_reduce and not qkv.sequence_parallel:
            return "the gradient of their input is added up elsewhere (disable_grad_reduce)"
        return why_not_stand_in(qkv) or why_not_weight(qkv.weight) or LocalLinears.why_not_out(out, x)

    @staticmethod
    def why_not_out(out: Any, x: torch.Tensor) -> str | None:
        """Why the output projection cannot be fused with its exchange, or None."""
        if not isinstance(out, RowParallelLinear):
            return f"the output projection is {type(out).__name__}"
        if overlaps_tensor_parallelism(out):
            return "the output projection overlaps with tensor parallel communication"
        if out.explicit_expert_comm or not out.input_is_parallel or out.config._cpu_offloading_context is not None:
            return "expert communication, an input that is not parallel, or CPU offloading is on"
        return why_not_stand_in(out) or why_not_weight(out.weight)

    @staticmethod
    def project_qkv(
        layer: Any,
        x: torch.Tensor,
        context: SPContext,
        shape: AttentionShape,
        row_table: torch.Tensor | None = None,
        late: LateWgrad | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """q, k and v of this rank's heads; ``row_table``, ``late``: as ``qkv_projection``."""
        wgrad, bias = NativeWgrad(layer.weight, layer.gradient_accumulation_fusion), bias_of(layer.weight, layer.bias)
        layout = shape.qkv_layout(context.world_size)
        options = dict(bias=bias, row_table=row_table, wgrad=wgrad, shards=shards_of(layer), late=late)
        return qkv_projection(x, layer.weight, context=context, layout=layout, **options)

    @staticmethod
    def project_out(
        layer: Any,
        attended: torch.Tensor,
        context: SPContext,
        shape: AttentionShape,
        row_table: torch.Tensor | None = None,
        late: LateWgrad | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's (output, bias) for [s, b, heads of this rank, d]."""
        wgrad = NativeWgrad(layer.weight, layer.gradient_accumulation_fusion)
        layout = shape.output_layout(context.world_size)
        out = output_projection(
            attended, layer.weight, context=context, layout=layout, row_table=row_table, wgrad=wgrad, late=late
        )
        out = reduced_output(layer, out)
        if layer.skip_bias_add:
            return out, layer.bias
        return (out if layer.bias is None else out + layer.bias), None
