"""Experts split over tensor parallel ranks: what lies between the movement over the expert parallel group and the
experts.

Each tensor parallel rank has tokens of its own and a slice of every expert, so rows are gathered over that group
before the experts and reduce-scattered behind them: over two ranks by copy engines (``gathered``), else by
megatron-core's own functions. Natively they are sorted by expert behind the gather; ours come sorted from the
movement, so what changes places is the chunks of one rank and one expert. Where sums depend on where a row lies, they
take native's places first.
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

from ditron_train.ep.gathered import SlicedLayout
from ditron_train.megatron.ep.gathered import GatheredCall, gather_to_rows, given_up_on_error, scatter_rows, start
from ditron_train.policy import log_native
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.tp.context import get_tp_context

#: A sum of two is the same in either order. Of more ranks NCCL may add in an order that depends on where in the buffer
#: a row lies.
_RANKS_IN_ANY_PLACE = 2
#: Why rows of that width and these types, of a group's slices, are left to megatron-core for good. All its ranks met
#: it alike; to ask again would cost each forward exchanges between hosts, and the buffer that was to grow.
_refused: GroupCache[tuple[dist.ProcessGroup, torch.device, int, torch.dtype, torch.dtype], str] = GroupCache()


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
    mine = torch.full(shape, -1, device=device) if sources is None else sources
    told = [torch.empty(shape, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, mine.to(device, torch.int64).contiguous(), group=group)
    counts = torch.stack(told).cpu()
    return None if bool((counts < 0).any()) else counts


def _padded(rows: torch.Tensor, room: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, room - len(rows)))


class ExpertSlices:
    """Gathers the rows of one step over the tensor parallel group, and returns the experts' results.

    Of two ranks rows travel by copy engines, each placed once it is there, and results leave rank by rank.

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
        self._call: GatheredCall | None = None

    def _begin(self, rows: torch.Tensor, sum_dtype: torch.dtype) -> GatheredCall | None:
        """The rows on their way, or None where megatron-core moves them; the same on every rank of the group."""
        of_experts = self._chunks.sum(1)
        kind = (self._group, self._device, rows.shape[1], rows.dtype, sum_dtype)
        if len(of_experts) > _RANKS_IN_ANY_PLACE or int(of_experts.sum()) == 0 or kind in _refused:
            return None
        try:
            context = get_tp_context(self._group, self._device)
            layout = SlicedLayout(of_experts, self._device)
            started = start(_padded(rows.detach(), layout.num_tokens), context, sum_dtype)
        except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
            _refused[kind] = str(error)
            log_native("ep slices", _refused[kind])
            return None
        return GatheredCall(layout, context, "ascending", sum_dtype, started)

    def _move(
        self, rows: torch.Tensor, sizes: torch.Tensor, order: tuple[int, ...], probs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Chunks of ``sizes``, an array of them, in the order of that array with its axes permuted."""
        numbers = torch.arange(sizes.numel(), device=sizes.device).view(sizes.shape).permute(order).ravel()
        if self._fused:
            sizes, numbers = sizes.to(self._device), numbers.to(self._device)
        return sort_chunks_by_idxs(rows, sizes.ravel(), numbers, probs=probs, fused=self._fused)

    def gather(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[this rank's, hidden]`` in [expert, source rank, token] order and their ``probs`` become those of the
        whole group in [expert, tensor parallel rank, source rank, token] order."""
        call = self._call = self._begin(rows, probs.dtype)
        if call is not None:
            with given_up_on_error(call.take_started):
                probs = gather_from_sequence_parallel_region(
                    probs, group=self._group, output_split_sizes=self._rows_of_ranks
                )
                if len(self.tokens_per_expert) > 1:
                    probs = self._move(probs[:, None], self._chunks, (2, 0, 1))[0][:, 0]
                return gather_to_rows(_padded(rows, call.layout.num_tokens), call), probs
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
        call, self._call = self._call, None
        if call is not None:
            return scatter_rows(rows, call)[: self._rows_of_ranks[dist.get_rank(self._group)]]
        if len(self.tokens_per_expert) > 1:
            rows, _ = self._move(rows, self._chunks.permute(2, 0, 1), (1, 2, 0))
        summed = reduce_scatter_to_sequence_parallel_region(
            rows.to(sum_dtype), group=self._group, input_split_sizes=self._rows_of_ranks
        ).to(rows.dtype)
        return summed if self._mine is None else self._move(summed, self._mine.T, (1, 0))[0]
