"""Experts split over tensor parallel ranks: what lies between the movement over the expert parallel group and the
experts.

Each tensor parallel rank has tokens of its own and a slice of every expert, so rows are gathered over that group
before the experts and reduce-scattered behind them, by megatron-core's own functions. Natively they are sorted by
expert behind the gather; ours come sorted from the movement, so what changes places is the chunks of one rank and one
expert. Where sums depend on where a row lies, they take native's places first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

__all__ = ["ExpertSlices", "all_true", "exchange_counts"]

#: A sum of two is the same in either order. Of more ranks NCCL may add in an order that depends on where in the buffer
#: a row lies.
_RANKS_IN_ANY_PLACE = 2


def all_true(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``flag`` is true on every rank of ``group`` (collective)."""
    least = torch.tensor([int(flag)], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return bool(least.item())


def exchange_counts(
    sources: torch.Tensor | None, shape: tuple[int, int], group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor | None:
    """The rows of every tensor parallel rank by source rank and local expert (collective, with a host sync).

    Args:
        sources: ``[source ranks, num_local_experts]`` rows of this rank, or None where it has no room for them.
        shape: Of ``sources``.
        group: Over which the experts are split.
        device: Of the group's messages.

    Returns:
        int64 ``[ranks, *shape]`` on the CPU, or None on every rank if any had none to tell.
    """
    mine = torch.full(shape, -1) if sources is None else sources
    told = [torch.empty(shape, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, mine.to(device, torch.int64).contiguous(), group=group)
    counts = torch.stack(told).cpu()
    return None if bool((counts < 0).any()) else counts


class ExpertSlices:
    """Gathers the rows of one step over the tensor parallel group, and returns the experts' results.

    Args:
        counts: int64 ``[ranks, source ranks, num_local_experts]`` on the CPU, of ``exchange_counts``.
        group: Over which the experts are split.
        fused: Whether ``moe_permute_fusion`` is on; rows then change places on the device.
        device: Of the rows.
    """

    def __init__(self, counts: torch.Tensor, group: dist.ProcessGroup, *, fused: bool, device: torch.device) -> None:
        self._group, self._fused, self._device = group, fused, device
        self._rows_of_ranks = counts.sum((1, 2)).tolist()
        self.tokens_per_expert = counts.sum((0, 1))
        mine = counts[dist.get_rank(group)].T  # [expert, source rank]
        self._mine = mine if len(counts) > _RANKS_IN_ANY_PLACE and 1 not in mine.shape else None
        self._chunks = counts if self._mine is not None else counts.sum(1, keepdim=True)

    def _move(
        self, rows: torch.Tensor, sizes: torch.Tensor, order: tuple[int, ...], probs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Chunks of ``sizes``, an array of them, in the order of that array with its axes permuted."""
        numbers = torch.arange(sizes.numel()).view(sizes.shape).permute(order).ravel()
        if self._fused:
            sizes, numbers = sizes.to(self._device), numbers.to(self._device)
        return sort_chunks_by_idxs(rows, sizes.ravel(), numbers, probs=probs, fused=self._fused)

    def gather(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[this rank's, hidden]`` in [expert, source rank, token] order and their ``probs`` become those of the
        whole group in [expert, tensor parallel rank, source rank, token] order."""
        if self._mine is not None:
            rows, probs = self._move(rows, self._mine, (1, 0), probs)
        rows, probs = (
            gather_from_sequence_parallel_region(part, group=self._group, output_split_sizes=self._rows_of_ranks)
            for part in (rows, probs)
        )
        if len(self.tokens_per_expert) == 1:
            return rows, probs
        return self._move(rows, self._chunks, (2, 0, 1), probs)

    def scatter(self, rows: torch.Tensor, sum_dtype: torch.dtype) -> torch.Tensor:
        """The experts' partial results in the order of ``gather`` become this rank's rows, added up in
        ``sum_dtype``."""
        if len(self.tokens_per_expert) > 1:
            rows, _ = self._move(rows, self._chunks.permute(2, 0, 1), (1, 2, 0))
        summed = reduce_scatter_to_sequence_parallel_region(
            rows.to(sum_dtype), group=self._group, input_split_sizes=self._rows_of_ranks
        ).to(rows.dtype)
        return summed if self._mine is None else self._move(summed, self._mine.T, (1, 0))[0]
