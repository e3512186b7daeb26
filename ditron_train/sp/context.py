"""``SPContext``: who owns the symmetric memory of Ulysses sequence parallelism on one group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.stream.op_context import OpContext, context_of
from ditron_train.symm.arena import SymmetricTensor


class SPContext(OpContext):
    """Buffers and channels of one sequence parallel (Megatron: context parallel) group; constructed collectively.

    All layers share three buffers: ``to_heads`` (what an exchange sends to the attention), ``staged`` (the same if
    a GEMM makes it) and ``to_sequence`` (what the output projection multiplies, or the projected q, k, v's gradient).
    What ops return is outside of them.

    Args:
        group: The process group (``None``: WORLD).
        device: Where activations live.
        first_epoch: For tests of the epoch's wrap.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, first_epoch: int = 0) -> None:
        super().__init__(group, device, first_epoch=first_epoch)
        fields = (
            "operation",
            "rows",
            "groups",
            "width0",
            "width1",
            "width2",
            "k",
            "dtype",
            "block_m",
            "block_n",
            "packed",
        )
        self.heads_channel = self.add_channel("sp.to_heads", self.world_size * 1024, fields)
        self.sequence_channel = self.add_channel("sp.to_sequence", self.world_size * 1024, fields)

    def heads_buffer(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> SymmetricTensor:
        """Where peers store what belongs to this rank's heads: slots of source ranks."""
        return self.roomy("sp.to_heads", num_rows, num_columns, dtype)

    def staged_buffer(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> SymmetricTensor:
        """Where this rank leaves products that peers read: slots of destination ranks."""
        return self.roomy("sp.staged", num_rows, num_columns, dtype)

    def sequence_buffer(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> SymmetricTensor:
        """Where peers store what belongs to this rank's part of the sequence: columns of source ranks."""
        return self.roomy("sp.to_sequence", num_rows, num_columns, dtype)


def get_sp_context(group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> SPContext:
    """The context of ``group`` (``None``: WORLD), made at the first call, which is collective over the group."""
    return context_of(SPContext, group, device)
