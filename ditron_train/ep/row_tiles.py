"""How the rows of a rank's experts are cut into tiles, and the launches of the kernels that take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ditron_train.ep.arguments import as_constant
from ditron_train.ep.group_gemm_kernels import list_tiles, list_tiles_of_groups
from ditron_train.ep.tables import int32_table
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import kernel_target
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.sizes import next_power_of_2

_TILE_WORDS = 4
_LIST_BLOCK = 128  # tiles that a program lists
_MOST_LANES = 4096  # of tiles times experts: more do not fit the registers of a program
_SLACK_WORDS = 1024  # a loop that runs ahead may look at entries behind the last, whose values it then drops


@lru_cache(maxsize=1024)
def group_launch(
    kernel: Any,
    num_programs: int,
    constants: tuple[tuple[str, Any], ...],
    num_warps: int,
    num_stages: int,
    dtype: torch.dtype,
) -> KernelLaunch:
    """The launch of a kernel with these constants, for operands of this type: only the first one goes through
    Triton."""
    values = {name: as_constant(value) for name, value in constants}
    options: dict[str, Any] = dict(num_warps=num_warps, num_stages=num_stages)
    return KernelLaunch(kernel, num_programs, values, **options)


@dataclass(frozen=True)
class RowTiles:
    """How the rows of a rank are cut into tiles that hold one expert each; made once a layer, on the device.

    Attributes:
        tiles: int32, see ``list_tiles``.
        num_rows: Rows of all experts together (with a capacity: at most).
        num_experts: Experts.
        block_m: Rows of a tile.
        max_tiles: Tiles at most.
        has_row_ends: Whether ``row_ends`` is there: of all rows, not of a part.
    """

    tiles: torch.Tensor
    num_rows: int
    num_experts: int
    block_m: int
    max_tiles: int
    has_row_ends: bool = True

    @property
    def row_ends(self) -> torch.Tensor:
        """int32 [num_experts]: first row behind each expert."""
        assert self.has_row_ends, "tiles of a part"
        return self.tiles[_TILE_WORDS * (self.max_tiles + 1) :]


def block_rows(device: torch.device) -> int:
    """Rows of a tile of grouped GEMMs of 16 bits."""
    return 32 if kernel_target(device) == "interpreter" else 128


def row_tiles(tokens_per_expert: torch.Tensor, num_rows: int, block_m: int | None = None) -> RowTiles:
    """Lists the tiles of ``tokens_per_expert`` (integers on the device, [num_experts]) that sum to ``num_rows`` at
    most; of ``block_m`` rows, or as many as grouped GEMMs of 16 bits take."""
    num_experts, block_m = tokens_per_expert.numel(), block_m or block_rows(tokens_per_expert.device)
    num_programs = -(-(-(-num_rows // block_m) + num_experts) // _LIST_BLOCK)
    max_tiles = num_programs * _LIST_BLOCK  # few different numbers, whatever the rows: launches are kept by number
    words = _TILE_WORDS * (max_tiles + 1) + num_experts
    tiles = torch.empty(words + _SLACK_WORDS, dtype=torch.int32, device=tokens_per_expert.device)
    constants = dict(NUM_EXPERTS=num_experts, EXPERTS=next_power_of_2(num_experts), BLOCK_M=block_m, BLOCK=_LIST_BLOCK)
    launch = group_launch(list_tiles, num_programs, tuple(constants.items()), 4, 3, tokens_per_expert.dtype)
    with on_device(tokens_per_expert.device):
        launch(tokens_per_expert, tiles, max_tiles, num_rows)
    return RowTiles(tiles, num_rows, num_experts, block_m, max_tiles)


def row_tiles_of_groups(
    counts: torch.Tensor, groups: Sequence[Sequence[int]], num_rows: int, *, last: bool, fewest_rows: int = 0
) -> list[RowTiles]:
    """Row tiles of each of some groups of source ranks, for products that are computed part by part.

    Tiles begin at an expert's first row, wherever the rows of a source begin, so that none is cut. One that has rows
    of several groups is of one of them.

    Args:
        counts: int64 [sources, experts] on the device: rows, which lie by expert, then by source.
        groups: All sources.
        num_rows: The sum of ``counts``.
        last: Whether a tile is of the last group that has rows in it, which have to be there; else of the first.
        fewest_rows: Experts of fewer rows are in no group.
    """
    (num_sources, num_experts), device = counts.shape, counts.device
    block_m = block_rows(device)
    max_tiles = -(-(num_rows // block_m + num_experts) // _LIST_BLOCK) * _LIST_BLOCK
    tiles = torch.empty(len(groups), _TILE_WORDS * (max_tiles + 1) + _SLACK_WORDS, dtype=torch.int32, device=device)
    of_source = {source: number for number, group in enumerate(groups) for source in group}
    table = int32_table(tuple(of_source[source] for source in range(num_sources)), device)
    sizes = dict(NUM_SOURCES=num_sources, NUM_EXPERTS=num_experts, EXPERTS=next_power_of_2(num_experts))
    block = min(_LIST_BLOCK, max(_MOST_LANES // sizes["EXPERTS"], 1))
    constants = dict(**sizes, LAST=last, SLACK=_SLACK_WORDS, BLOCK_M=block_m, BLOCK=block)
    launch = group_launch(list_tiles_of_groups, len(groups), tuple(constants.items()), 4, 3, counts.dtype)
    with on_device(device):
        launch(counts, table, tiles, max_tiles, max(fewest_rows, 1))
    return [RowTiles(one, num_rows, num_experts, block_m, max_tiles, has_row_ends=False) for one in tiles.unbind(0)]
