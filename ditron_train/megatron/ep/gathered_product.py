"""The grouped GEMM of gathered experts, computed part by part while rows of other ranks travel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch

from ditron_train.ep.fused import FewProduct
from ditron_train.ep.gathered import RowLayout
from ditron_train.ep.group_gemm import GemmOperands, gemm_operands, multiply
from ditron_train.ep.row_tiles import RowTiles, block_rows
from ditron_train.runtime.profiles import known_rates
from ditron_train.schedule import arrival_order, chunk_order, groups_in_turn
from ditron_train.tp.context import TPContext


@lru_cache(maxsize=256)
def _order(rank: int, world_size: int, comes: bool) -> tuple[int, ...]:
    """Ranks as their rows come; as sums of theirs leave, the last one first."""
    if comes:
        return tuple(arrival_order(rank, world_size).tolist())
    return (rank, *chunk_order(rank, world_size, "sum_push")[::-1].tolist())


class GatheredProduct:
    """A grouped GEMM of the rows of all sources in parts: those of one or several sources at a time.

    What the device does first, placing rows, needs nothing of it: so all is made at the first part.

    Args:
        rows: [num_rows, K], written as they come.
        weights: Of each expert.
        layout: Of the rows.
        context: Of the group of all ranks that hold experts.
        transpose: As of ``group_gemm``.
        travels: What a source's transfer moves: features of a token, and their type.
        comes: Whether rows come, so that a part is multiplied behind the last source that has rows in it; else sums of
            them leave, and it is multiplied before the first.
        few: Who multiplies experts of few rows; None: all are ours.
        fewest_rows: Of experts that are not few.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        weights: Sequence[torch.Tensor],
        layout: RowLayout,
        context: TPContext,
        *,
        transpose: bool,
        travels: tuple[int, torch.dtype],
        comes: bool,
        few: FewProduct | None = None,
        fewest_rows: int = 0,
    ) -> None:
        self._rows, self._weights, self._layout, self._context = rows, weights, layout, context
        self._transpose, self._travels, self._comes = transpose, travels, comes
        self._few, self._fewest_rows = few, 0 if few is None else fewest_rows
        order = _order(context.rank, context.world_size, comes)
        self._turns = iter(order if comes else order[::-1])

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Sources whose rows are multiplied together, in the order of their parts."""
        layout, (features, dtype) = self._layout, self._travels
        rates = known_rates(self._context.machine)
        transfer_us = layout.num_tokens * features * dtype.itemsize / (1e3 * rates.link_gbps)
        row_us = 2 * self._weights[0].numel() / (1e6 * rates.gemm_tflops)
        # Where a group's rows begin and end, half a tile of an expert is another group's on average.
        lost_us = row_us * layout.num_experts * block_rows(self._rows.device)
        order = _order(self._context.rank, self._context.world_size, self._comes)
        groups = groups_in_turn(order, row_us * layout.num_rows / layout.world_size, transfer_us, lost_us)
        return groups if self._comes else [group[::-1] for group in reversed(groups)]  # the same backward in time

    @cached_property
    def _parts(self) -> dict[int, RowTiles]:
        """By the source behind whose rows, or before whose sums, a part is due."""
        tiles = self._layout.tiles_of_groups(self._groups, last=self._comes, fewest_rows=self._fewest_rows)
        return {group[-1 if self._comes else 0]: part for group, part in zip(self._groups, tiles, strict=True)}

    @cached_property
    def _operands(self) -> GemmOperands:
        any_part = next(iter(self._parts.values()))
        return gemm_operands("group_gemm", self._rows, self._weights, any_part, transpose=self._transpose)

    @property
    def result(self) -> torch.Tensor:
        """[num_rows, N], which parts are written to."""
        return self._operands.y

    def compute(self, source: int) -> None:
        """The part that is due behind the rows of this source, or before its sums, if one is."""
        assert next(self._turns) == source, "parts are due in the order in which rows travel"
        operands, part = self._operands, self._parts.get(source)
        if part is not None:
            multiply(operands, part)

    def compute_few(self) -> None:
        """The experts of few rows, of all sources."""
        experts = self._layout.experts_below(self._fewest_rows)
        if experts and self._few is not None:
            self._few(self._rows, self._weights, self._transpose, self.result, experts)
