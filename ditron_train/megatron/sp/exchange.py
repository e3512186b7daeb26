"""The two exchanges around one attention: by ops of ``ditron_train.sp``, or by all-to-alls of the process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ditron_train.megatron.sp.nodes import NodesContext
from ditron_train.sp import HeadsLayout, SPContext, heads_exchange, output_layout, qkv_layout, sequence_exchange
from ditron_train.sp.native import all_to_alls_of, exchange_natively


@dataclass(frozen=True)
class AttentionShape:
    """One self-attention on one tensor parallel rank, before its heads are spread over the context parallel group."""

    num_heads: int
    num_groups: int
    head_dim: int
    value_head_dim: int

    def qkv_layout(self, world_size: int) -> HeadsLayout:
        """Raises NotSupportedError if heads do not divide, as native does."""
        return qkv_layout(
            self.num_heads, self.num_groups, self.head_dim, world_size, value_head_dim=self.value_head_dim
        )

    def output_layout(self, world_size: int) -> HeadsLayout:
        """Layout of the attention's output."""
        return output_layout(self.num_heads, self.value_head_dim, world_size)


class Exchange:
    """The two exchanges of one attention: by ops, or (``context`` None) by all-to-alls of the process group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        shape: AttentionShape,
        context: SPContext | NodesContext | None,
        row_table: torch.Tensor | None = None,
    ) -> None:
        assert context is not None or row_table is None, "all-to-alls here know no packed sequences"
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._shape = shape
        self._context = context
        self._row_table = row_table

    def to_heads(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v [s / W, b, heads, d] -> [s, b, heads / W, d], in the order of the sequence."""
        if self._context is not None:
            layout = self._shape.qkv_layout(self._world_size)
            if isinstance(self._context, NodesContext):
                return self._context.to_heads(parts, layout, self._row_table)
            return heads_exchange(parts, context=self._context, layout=layout, row_table=self._row_table)
        return exchange_natively(all_to_alls_of(self._group, parts[0].device), True, *parts)

    def to_sequence(self, attended: torch.Tensor) -> torch.Tensor:
        """[s, b, heads / W * d] -> [s / W, b, heads * d]."""
        attended = attended.view(*attended.shape[:-1], -1, self._shape.value_head_dim)
        if self._context is not None:
            layout = self._shape.output_layout(self._world_size)
            if isinstance(self._context, NodesContext):
                return self._context.to_sequence(attended, layout, self._row_table).flatten(-2)
            (result,) = sequence_exchange((attended,), context=self._context, layout=layout, row_table=self._row_table)
            return result.flatten(-2)
        (result,) = exchange_natively(all_to_alls_of(self._group, attended.device), False, attended)
        return result.flatten(2)
