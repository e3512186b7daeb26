"""Layouts of Ulysses sequence parallelism: which rows and which columns a rank holds, before and around attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.schedule.keys import chunks_of


def global_rows(rank: int, world_size: int, num_local_rows: int) -> np.ndarray:
    """Row in the whole sequence of each of ``rank``'s local rows, int64 [num_local_rows].

    Rows are (position, batch) pairs, the batch moving fastest, so half of ``num_local_rows`` is one chunk.

    Raises:
        NotSupportedError: An odd number of rows.
    """
    if num_local_rows % 2:
        raise NotSupportedError(f"{num_local_rows} rows of a rank do not divide into two chunks")
    half = num_local_rows // 2
    return np.concatenate([chunk * half + np.arange(half) for chunk in chunks_of(rank, world_size)])


@outside_compile
def packed_rows(cu_seqlens: torch.Tensor, world_size: int, num_local_rows: int) -> torch.Tensor:
    """For packed sequences: the position in the whole sequence of each rank's local rows.

    Each sequence is cut into ``2 * world_size`` chunks, of which a rank holds its two, sequence after sequence. What
    is behind the last sequence is one more. No host sync.

    Args:
        cu_seqlens: int [sequences + 1], first row of each sequence in the whole (with padding), every length a
            multiple of ``2 * world_size``.
        world_size: Ranks of the group.
        num_local_rows: Rows of one rank.

    Returns:
        int32 [world_size, num_local_rows], on the device of ``cu_seqlens``.
    """
    device = cu_seqlens.device
    end = torch.full((1,), world_size * num_local_rows, dtype=torch.int64, device=device)
    starts = torch.cat([cu_seqlens.to(torch.int64), end])
    row = torch.arange(num_local_rows, device=device)
    sequence = (torch.searchsorted(starts // world_size, row, right=True) - 1).clamp(0, starts.numel() - 2)
    first = starts[sequence]
    half = (starts[sequence + 1] - first) // (2 * world_size)
    offset = row - first // world_size
    rank = torch.arange(world_size, device=device)[:, None]
    chunk = torch.where(offset < half, rank, 2 * world_size - 2 - rank)  # the second half's offset is past one half
    return (first + chunk * half + offset).clamp(0, world_size * num_local_rows - 1).to(torch.int32)


@dataclass(frozen=True)
class HeadsLayout:
    """Columns of the heads that one rank attends with: groups, each with one slice of every part.

    Megatron's mixed QKV is [group: q heads of the group, k head, v head], so with 3 parts this is a column slice of
    it; an attention output is 1 part. Every rank of a group has the same layout.

    Attributes:
        num_groups: Groups of one rank.
        widths: Columns of each part in one group (1 to 3 parts).
        head_dims: Columns of one head of each part.
    """

    num_groups: int
    widths: tuple[int, ...]
    head_dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.widths) <= 3 or len(self.widths) != len(self.head_dims):
            raise NotSupportedError(f"1 to 3 parts, got widths {self.widths} and head sizes {self.head_dims}")
        if self.num_groups < 1 or min(self.widths) < 1 or min(self.head_dims) < 1:
            raise NotSupportedError(f"empty layout: {self}")
        if any(width % head for width, head in zip(self.widths, self.head_dims)):
            raise NotSupportedError(f"part widths {self.widths} are not whole heads of {self.head_dims}")

    @property
    def num_columns(self) -> int:
        """Columns of one rank, all parts."""
        return self.num_groups * sum(self.widths)

    def part_columns(self, part: int) -> int:
        """Columns of one part of one rank."""
        return self.num_groups * self.widths[part]

    def num_heads(self, part: int) -> int:
        """Heads of one part of one rank."""
        return self.part_columns(part) // self.head_dims[part]


def qkv_layout(
    num_heads: int, num_groups: int, head_dim: int, world_size: int, *, value_head_dim: int | None = None
) -> HeadsLayout:
    """Layout of one rank's q, k and v.

    Args:
        num_heads: Query heads before the exchange (of one tensor parallel rank).
        num_groups: Key and value heads likewise.
        head_dim: Size of a query and key head.
        world_size: Ranks of the sequence parallel group.
        value_head_dim: Size of a value head if it differs.

    Raises:
        NotSupportedError: Heads do not divide by the group, as the native attention demands.
    """
    if num_groups < 1 or num_heads % num_groups:
        raise NotSupportedError(f"{num_heads} heads do not divide by {num_groups} query groups")
    if num_heads % world_size or num_groups % world_size:
        raise NotSupportedError(
            f"The number of attention heads needs to be divisible by CP size! {num_heads} query heads and "
            f"{num_groups} key and value heads, {world_size} ranks"
        )
    value_dim = head_dim if value_head_dim is None else value_head_dim
    widths = (num_heads // num_groups * head_dim, head_dim, value_dim)
    return HeadsLayout(num_groups // world_size, widths, (head_dim, head_dim, value_dim))


def output_layout(num_heads: int, head_dim: int, world_size: int) -> HeadsLayout:
    """Layout of one rank's attention output: one part, one slice.

    Args:
        num_heads: Query heads before the exchange.
        head_dim: Size of a value head.
        world_size: Ranks of the sequence parallel group.

    Raises:
        NotSupportedError: Heads do not divide by the group.
    """
    if num_heads % world_size:
        raise NotSupportedError(
            f"The number of attention heads needs to be divisible by CP size! {num_heads} heads, {world_size} ranks"
        )
    return HeadsLayout(1, (num_heads // world_size * head_dim,), (head_dim,))


@outside_compile
def split_by_heads(mixed: torch.Tensor, layout: HeadsLayout, world_size: int) -> list[torch.Tensor]:
    """[s / W, b, columns of a QKV projection] -> q, k, v [s / W, b, heads, d]."""
    lead = mixed.shape[:2]
    parts = torch.split(mixed.view(*lead, world_size * layout.num_groups, -1), list(layout.widths), dim=3)
    return [part.reshape(*lead, -1, dim) for part, dim in zip(parts, layout.head_dims)]
