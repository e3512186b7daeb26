"""The order in which tiles run and chunks travel on every rank, for any shape, world size and number of nodes.

Everything comes from ``schedule/``, whose functions the kernels follow (GEMM-RS: the one that stores from its
epilogue; in chunks rank - 1 comes first, ``sum_push``): nothing is run and no GPU is needed. A *wave* is as many tiles
as there are SMs: in the time of one wave each SM computes one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from ditron_train.gemm import GemmConfig, choose_config
from ditron_train.runtime.errors import SettingError
from ditron_train.schedule import (
    chunk_order,
    gather_tile_order,
    grouped_tile_order,
    row_tile_owners,
    scatter_row_tile_order,
)

Op = Literal["ag_gemm", "gemm_rs"]

_MOST_TILES = 1 << 22  # of all ranks, some 100 bytes each
_MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """What to lay out.

    Attributes:
        op: ``ag_gemm``: rows arrive, tiles follow. ``gemm_rs``: tiles leave for the owners of their rows.
        m: Rows of all ranks together.
        n: Full width of the output (``ag_gemm`` divides it over the ranks).
        k: Full length of the sums (``gemm_rs`` divides it over the ranks).
        world_size: Ranks of the group.
        ranks_per_node: Ranks of one node; None: all on one node.
        row_counts: Rows of each rank; None: as even as can be.
        num_sms: Tiles that run at a time.
    """

    op: Op
    m: int
    n: int
    k: int
    world_size: int
    ranks_per_node: int | None = None
    row_counts: Sequence[int] | None = None
    num_sms: int = 132
    row_starts: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k, self.world_size, self.num_sms) < 1:
            raise SettingError("sizes, ranks and SMs have to be above 0")
        nodes = self.world_size if self.ranks_per_node is None else self.ranks_per_node
        if nodes < 1 or self.world_size % nodes:
            raise SettingError(f"{self.world_size} ranks do not divide into nodes of {nodes}")
        split, name = (self.n, "N") if self.op == "ag_gemm" else (self.k, "K")
        if split % self.world_size:
            raise SettingError(f"{self.op}: {name} = {split} does not divide over {self.world_size} ranks")
        if self.world_size > _MOST_RANKS:
            raise SettingError(f"{self.world_size} ranks: no more than {_MOST_RANKS} are laid out")
        num_tiles = self.world_size * self.config.num_tiles(self.m, self.local_n)
        if num_tiles > _MOST_TILES:
            raise SettingError(
                f"{self.m} x {self.n} has {num_tiles} tiles on all ranks, no more than {_MOST_TILES} are laid out"
            )
        counts = self.row_counts
        if counts is None:
            counts = [self.m // self.world_size + (rank < self.m % self.world_size) for rank in range(self.world_size)]
        if len(counts) != self.world_size or min(counts) < 0 or sum(counts) != self.m:
            raise SettingError(f"rows {list(counts)} are not {self.m} rows over {self.world_size} ranks")
        object.__setattr__(self, "row_starts", np.concatenate([[0], np.cumsum(counts)]))

    @property
    def local_n(self) -> int:
        """Columns of the output that one rank computes."""
        return self.n // self.world_size if self.op == "ag_gemm" else self.n

    @property
    def config(self) -> GemmConfig:
        """Tile sizes that the kernel would take on a Hopper GPU."""
        local_k = self.k if self.op == "ag_gemm" else self.k // self.world_size
        return choose_config(self.m, self.local_n, local_k, torch.bfloat16, "sm_90", self.num_sms)


@dataclass(frozen=True)
class RankSchedule:
    """One rank's part.

    Attributes:
        rank: Which.
        chunks: Other ranks, in the order in which their chunks arrive (``ag_gemm``) or are sent (``gemm_rs``).
        tiles: int32 [num_tiles, 2] of (row tile, column tile), in the order in which they are taken.
        wave: int [row tiles, column tiles]: when each tile runs.
        first_wave: By rank: the wave in which the first tile with rows of that rank runs.
        last_wave: By rank: the wave in which the last one does.
        num_straddling: Row tiles with rows of more than one rank.
    """

    rank: int
    chunks: list[int]
    tiles: np.ndarray
    wave: np.ndarray
    first_wave: dict[int, int]
    last_wave: dict[int, int]
    num_straddling: int

    @property
    def num_waves(self) -> int:
        """Waves of the whole GEMM."""
        return int(self.wave.max()) + 1


def plan_rank(request: ScheduleRequest, rank: int) -> RankSchedule:
    """Lays out what ``rank`` does.

    Raises:
        ValueError: The rank is not in the group.
    """
    config, starts, world_size = request.config, request.row_starts, request.world_size
    gathers = request.op == "ag_gemm"
    num_tiles_m, num_tiles_n = -(-request.m // config.block_m), -(-request.local_n // config.block_n)
    group = (rank, world_size, request.ranks_per_node)
    if gathers:
        tiles = gather_tile_order(starts, config.block_m, num_tiles_n, config.group_m, *group)
    else:
        row_order = scatter_row_tile_order(starts, config.block_m, *group)
        tiles = grouped_tile_order(num_tiles_m, num_tiles_n, config.group_m, row_order)
    wave = np.empty((num_tiles_m, num_tiles_n), dtype=np.int64)
    wave[tiles[:, 0], tiles[:, 1]] = np.arange(len(tiles)) // request.num_sms
    first_owner, last_owner = row_tile_owners(starts, config.block_m)
    waves_of = {
        owner: wave[(first_owner <= owner) & (owner <= last_owner)]
        for owner in range(world_size)
        if starts[owner + 1] > starts[owner]
    }
    mode: Literal["gather_pull", "scatter_push"] = "gather_pull" if gathers else "scatter_push"
    return RankSchedule(
        rank=rank,
        chunks=chunk_order(rank, world_size, mode, request.ranks_per_node).tolist(),
        tiles=tiles,
        wave=wave,
        first_wave={owner: int(waves.min()) for owner, waves in waves_of.items()},
        last_wave={owner: int(waves.max()) for owner, waves in waves_of.items()},
        num_straddling=int(np.sum(first_owner != last_owner)),
    )
