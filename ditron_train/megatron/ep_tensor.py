"""Experts split over tensor parallel ranks: what lies between the movement over the expert parallel group and the experts.

Each tensor parallel rank has tokens of its own and a slice of every expert, so rows are gathered over that group before the
experts and reduce-scattered behind them, by megatron-core's own functions. Natively they are sorted by expert behind the
gather; ours come sorted from the movement, so what changes places is the chunks of one rank and one expert.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

__all__ = ["MOST_SLICES", "ExpertSlices", "all_alike", "exchange_counts"]

#: Of more ranks NCCL may add in an order that depends on where in the buffer a row lies, and there ours and native's rows differ.
MOST_SLICES = 2


def all_alike(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``flag`` is true on every rank of ``group`` (collective)."""
    least = torch.tensor([int(flag)], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return bool(least.item())


def exchange_counts(
    tokens_per_expert: torch.Tensor | None, num_local_experts: int, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor | None:
    """The rows of every tensor parallel rank by local expert (collective, with a host sync).

    Args:
        tokens_per_expert: int64 ``[num_local_experts]`` of this rank, or None where it has no room for its rows.
        num_local_experts: Experts of a rank.
        group: Over which the experts are split.
        device: Of the group's messages.

    Returns:
        int64 ``[ranks, num_local_experts]`` on the CPU, or None on every rank if any had none to tell.
    """
    mine = torch.full((num_local_experts,), -1) if tokens_per_expert is None else tokens_per_expert
    told = [torch.empty(num_local_experts, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, mine.to(device, torch.int64), group=group)
    counts = torch.stack(told).cpu()
    return None if bool((counts < 0).any()) else counts


class ExpertSlices:
    """Gathers the rows of one step over the tensor parallel group, and returns the experts' results.

    Args:
        counts: int64 ``[ranks, num_local_experts]`` on the CPU, of ``exchange_counts``.
        group: Over which the experts are split.
        fused: Whether ``moe_permute_fusion`` is on; rows then change places on the device.
        device: Of the rows.
    """

    def __init__(self, counts: torch.Tensor, group: dist.ProcessGroup, *, fused: bool, device: torch.device) -> None:
        self._group, self._fused = group, fused
        self._rows_of_ranks = counts.sum(1).tolist()
        self._chunks = counts.to(device) if fused else counts
        chunk_numbers = torch.arange(counts.numel(), device=self._chunks.device)
        self._by_expert = chunk_numbers.view(counts.shape).T.ravel()
        self._by_rank = chunk_numbers.view(counts.T.shape).T.ravel()
        self.tokens_per_expert = counts.sum(0)

    def gather(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[this rank's, hidden]`` in [expert, source rank, token] order and their ``probs`` become those of the whole
        group in [expert, tensor parallel rank, source rank, token] order."""
        rows, probs = (
            gather_from_sequence_parallel_region(part, group=self._group, output_split_sizes=self._rows_of_ranks)
            for part in (rows, probs)
        )
        if len(self.tokens_per_expert) == 1:
            return rows, probs
        return sort_chunks_by_idxs(rows, self._chunks.ravel(), self._by_expert, probs=probs, fused=self._fused)

    def scatter(self, rows: torch.Tensor, sum_dtype: torch.dtype) -> torch.Tensor:
        """The experts' partial results in the order of ``gather`` become this rank's rows, added up in ``sum_dtype``."""
        if len(self.tokens_per_expert) > 1:
            rows, _ = sort_chunks_by_idxs(rows, self._chunks.T.ravel(), self._by_rank, fused=self._fused)
        summed = reduce_scatter_to_sequence_parallel_region(
            rows.to(sum_dtype), group=self._group, input_split_sizes=self._rows_of_ranks
        )
        return summed.to(rows.dtype)
