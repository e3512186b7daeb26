"""How the rows of a rank's experts are cut into tiles, and the launches of the kernels that take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ditron_train.ep.arguments import as_constant
from ditron_train.ep.group_gemm_kernels import list_tiles
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import kernel_target
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.sizes import next_power_of_2

_TILE_WORDS = 4
_LIST_BLOCK = 128  # tiles that a program lists
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
    return KernelLaunch(kernel, num_programs, values, num_warps=num_warps, num_stages=num_stages)


@dataclass(frozen=True)
class RowTiles:
    """How the rows of a rank are cut into tiles that hold one expert each; made once a layer, on the device.

    Attributes:
        tiles: int32, see ``list_tiles``.
        num_rows: Rows of all experts together (with a capacity: at most).
        num_experts: Experts.
        block_m: Rows of a tile.
        max_tiles: Tiles at most.
    """

    tiles: torch.Tensor
    num_rows: int
    num_experts: int
    block_m: int
    max_tiles: int

    @property
    def row_ends(self) -> torch.Tensor:
        """int32 [num_experts]: first row behind each expert."""
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


def host_tiles(experts: np.ndarray, firsts: np.ndarray, ends: np.ndarray, block_m: int) -> np.ndarray:
    """The tiles of rows that lie by expert, int32 [tiles, 4], as ``list_tiles`` lists them.

    Args:
        experts, firsts, ends: int [experts]: which, their first rows, and the rows behind their last ones.
        block_m: Rows of a tile.
    """
    sizes = -(-(ends - firsts) // block_m)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    tiles = np.zeros((len(within), _TILE_WORDS), dtype=np.int32)
    for word, values in enumerate((experts, firsts, ends)):
        tiles[:, word] = np.repeat(values, sizes)
    tiles[:, 1] += within * block_m
    return tiles


def tiles_to_device(
    parts: Sequence[np.ndarray], num_rows: int, num_experts: int, device: torch.device
) -> list[RowTiles]:
    """Parts of the tiles of all rows as row tiles, for products that are computed part by part.

    Args:
        parts: Tiles of each, as of ``host_tiles``, of ``block_rows(device)`` rows.
        num_rows: Rows of all experts together.
        num_experts: Experts.
        device: Where the rows are.
    """
    max_tiles = max(-(-max(map(len, parts)) // _LIST_BLOCK), 1) * _LIST_BLOCK
    words = np.zeros((len(parts), _TILE_WORDS * (max_tiles + 1) + num_experts + _SLACK_WORDS), dtype=np.int32)
    for line, tiles in zip(words, parts):
        line[0] = len(tiles)
        line[_TILE_WORDS : _TILE_WORDS * (len(tiles) + 1)] = tiles.ravel()
    table = torch.from_numpy(words)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return [RowTiles(one, num_rows, num_experts, block_rows(device), max_tiles) for one in table]
