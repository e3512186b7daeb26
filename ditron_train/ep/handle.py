"""What a routing decides, kept from dispatch to backward: ``EPHandle``, with its tables and sizes.

Bitwise identical results need the native order: at the expert's rank, rows by local expert, then source rank, then
token; at the source, each token's rows by global expert. A token is sent once to each rank that has one of its
experts, to its *slot* there; an *entry* says which row a slot is copied to, and to which *place* ``token * topk + j``
of the source its result returns. Tokens that stay on this rank take no slot: their entries name the token instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.sizes import next_power_of_2


class Tables(NamedTuple):
    """int32 tables of one handle, written by ``layout.count_chunks`` and ``layout.exchange_counts``.

    Shapes: C chunks of a rank's tokens, R ranks and E experts of a rank, the last two padded to powers of two.

    Attributes:
        chunk_counts: [C, R * E] tokens for each expert in the chunks before this one.
        chunk_dests: [C, R] distinct tokens for each rank in the chunks before this one.
        chunk_widest: [C] experts of the token that has most.
        chunk_entries: [R, C + 1] entries for each rank before each chunk; the last column: all of them.
        row_base: [R * E] first row of this rank's tokens at each expert.
        slot_base: [R] first slot of this rank's tokens at each rank.
        entry_base: [R] first entry of this rank at each rank.
        list_base: [R] first entry for each rank in this rank's own list.
        recv_offsets: [R, C + 1] first received entry of each source's chunk; the last column: their end.
        expert_tokens: [E] rows of each local expert.
        sources: [R, E] rows of each local expert from each rank.
        limits: [8] rows of this rank, then the rows, slots and places that every rank has room for, then the epoch of
            the next dispatch.
    """

    chunk_counts: torch.Tensor
    chunk_dests: torch.Tensor
    chunk_widest: torch.Tensor
    chunk_entries: torch.Tensor
    row_base: torch.Tensor
    slot_base: torch.Tensor
    entry_base: torch.Tensor
    list_base: torch.Tensor
    recv_offsets: torch.Tensor
    expert_tokens: torch.Tensor
    sources: torch.Tensor
    limits: torch.Tensor


class Starts(NamedTuple):
    """The tables that say where a chunk's rows, slots and entries begin, as of ``Tables``."""

    chunk_counts: torch.Tensor
    chunk_dests: torch.Tensor
    chunk_entries: torch.Tensor
    row_base: torch.Tensor
    slot_base: torch.Tensor
    list_base: torch.Tensor


class Destinations(NamedTuple):
    """What a rank sends to which rank, of one handle."""

    dest_slots: torch.Tensor
    send_list: torch.Tensor
    chunk_entries: torch.Tensor
    list_base: torch.Tensor
    entry_base: torch.Tensor


class LayoutSizes(NamedTuple):
    """Constants of the kernels that make a handle, see ``LayoutShape``."""

    WORLD_SIZE: int
    RANKS: int
    EXPERTS_PER_RANK: int
    SLOTS: int
    TOPK: int
    TOPK_LANES: int
    NUM_CHUNKS: int
    COLUMNS: int
    COMMON_WORDS: int
    MESSAGE_WORDS: int
    TARGET: str


@dataclass(frozen=True)
class LayoutShape:
    """What all handles of one context have in common.

    Attributes:
        world_size: Ranks of the expert-parallel group.
        num_experts: Experts of the layer, over all ranks.
        topk: Experts of a token at most.
        num_chunks: Chunks that a rank's tokens are cut into at most.
        min_chunk_tokens: Tokens of a chunk at least (a power of two).
        min_chunk_bytes: Bytes of its tokens at least.
    """

    world_size: int
    num_experts: int
    topk: int
    num_chunks: int = 128
    min_chunk_tokens: int = 16
    min_chunk_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.num_experts < 1:
            raise NotSupportedError(f"expert parallel: {self.num_experts} experts on {self.world_size} ranks")
        if self.num_experts % self.world_size:
            raise NotSupportedError(
                f"expert parallel: {self.num_experts} experts do not divide by the group's {self.world_size} ranks"
            )
        if not 1 <= self.topk <= self.num_experts:
            raise NotSupportedError(
                f"expert parallel: top-k {self.topk} is not in 1..{self.num_experts} (the number of experts)"
            )
        assert self.num_chunks == next_power_of_2(self.num_chunks)
        assert self.min_chunk_tokens == next_power_of_2(self.min_chunk_tokens)

    @cached_property
    def experts_per_rank(self) -> int:
        """Experts that each rank holds."""
        return self.num_experts // self.world_size

    @cached_property
    def ranks(self) -> int:
        """``world_size`` padded to a power of two."""
        return next_power_of_2(self.world_size)

    @cached_property
    def slots(self) -> int:
        """``experts_per_rank`` padded to a power of two."""
        return next_power_of_2(self.experts_per_rank)

    @cached_property
    def columns(self) -> int:
        """Padded expert columns."""
        return self.ranks * self.slots

    @cached_property
    def topk_lanes(self) -> int:
        """``topk`` padded to a power of two."""
        return next_power_of_2(self.topk)

    @cached_property
    def common_words(self) -> int:
        """int32 words of a message that are the same for every receiver."""
        return self.columns + self.ranks + 2

    @cached_property
    def message_words(self) -> int:
        """int32 words of one rank's message."""
        return self.common_words + self.num_chunks

    @cached_property
    def table_words(self) -> list[int]:
        """int32 words of each of ``Tables``, each followed by the words that pad it to a multiple of 16 bytes."""
        offsets = self.ranks * (self.num_chunks + 1)
        sizes = dict(
            chunk_counts=self.num_chunks * self.columns,
            chunk_dests=self.num_chunks * self.ranks,
            chunk_widest=self.num_chunks,
            chunk_entries=offsets,
            row_base=self.columns,
            slot_base=self.ranks,
            entry_base=self.ranks,
            list_base=self.ranks,
            recv_offsets=offsets,
            expert_tokens=self.slots,
            sources=self.ranks * self.slots,
            limits=8,
        )
        return [words for name in Tables._fields for words in (sizes[name], -sizes[name] % 4)]

    def chunk_tokens(self, num_tokens: int, row_bytes: int) -> int:
        """Tokens of a chunk on a rank that holds ``num_tokens`` of ``row_bytes`` each; every chunk costs a few round
        trips (docs/measurements/ep.md)."""
        by_bytes = next_power_of_2(-(-self.min_chunk_bytes // max(row_bytes, 1)))
        return max(self.min_chunk_tokens, min(by_bytes, 128), next_power_of_2(-(-num_tokens // self.num_chunks)))

    def room_for(self, num_tokens: int, capacity_factor: float) -> Room:
        """The fixed sizes of a capacity factor: a multiple of the rows that a rank gets if routing is even.

        ``num_tokens`` is the number of tokens of every rank. With a factor above ``world_size`` nothing can overflow.
        """
        most = num_tokens * self.world_size
        copies = min(self.topk, self.experts_per_rank)  # of a token at one rank
        rows = min(math.ceil(num_tokens * self.topk * capacity_factor), most * copies)
        return Room(rows, min(most, rows), num_tokens * self.topk)

    def room_of_experts(self, num_tokens: int, expert_capacity: int) -> Room:
        """The sizes if every expert gets ``expert_capacity`` tokens of every rank, and every rank has
        ``num_tokens``."""
        of_a_rank = self.experts_per_rank * expert_capacity
        slots = self.world_size * min(num_tokens, of_a_rank)
        return Room(self.world_size * of_a_rank, slots, self.num_experts * expert_capacity)


@dataclass(frozen=True)
class Room:
    """Sizes of one handle's buffers on every rank: rows (and entries), slots, places."""

    rows: int
    slots: int
    places: int


@dataclass(frozen=True)
class HostCounts:
    """What the host learns from the exchange: the same numbers on every rank.

    Attributes:
        counts: [world_size, num_experts] tokens of each source for each expert.
        dests: [world_size, world_size] distinct tokens of each source for each destination rank.
        tokens: [world_size] tokens of each source.
        widest: Experts of the token that has most.
    """

    counts: np.ndarray
    dests: np.ndarray
    tokens: np.ndarray
    widest: int

    @classmethod
    def from_messages(cls, messages: np.ndarray, shape: LayoutShape) -> HostCounts:
        """Reads the int32 ``[world_size, message_words]`` messages."""
        w = shape.world_size
        padded = messages[:, : shape.columns].reshape(w, shape.ranks, shape.slots)
        return cls(
            counts=padded[:, :w, : shape.experts_per_rank].reshape(w, shape.num_experts),
            dests=messages[:, shape.columns : shape.columns + w],
            tokens=messages[:, shape.columns + shape.ranks],
            widest=int(messages[:, shape.columns + shape.ranks + 1].max()),
        )

    @cached_property
    def expert_rows(self) -> np.ndarray:
        """[num_experts] rows of each expert."""
        return self.counts.sum(0)

    @property
    def min_rows(self) -> int:
        """Rows of the expert that has the fewest, of those that have some."""
        rows = self.expert_rows
        return int(rows[rows > 0].min(initial=np.iinfo(np.int32).max))

    def rows(self, shape: LayoutShape) -> np.ndarray:
        """[world_size] rows that each rank receives."""
        return self.expert_rows.reshape(shape.world_size, shape.experts_per_rank).sum(1)

    def unsupported_reason_listed(self, shape: LayoutShape, padding: int, *, ragged: bool) -> str | None:
        """Why the list of some rank cannot hold all of its entries, or None; the exchange then leaves a handle without
        rows.

        Args:
            shape: Sizes that all handles of the context share.
            padding: As of ``room``.
            ragged: Whether a token may have more than ``topk`` experts.
        """
        if not ragged and self.widest > shape.topk:
            return f"a token has {self.widest} experts, top-k is {shape.topk}"
        beyond = self.counts.sum(1) - self.tokens * shape.topk
        if beyond.max() > padding:
            return f"a routing map has {beyond.max()} entries beyond top-k, padding allows {padding}"
        return None

    def room(self, shape: LayoutShape, padding: int = 0) -> Room:
        """The largest need of any rank; ``padding``: places in addition to ``topk`` for each token."""
        places = int(self.tokens.max()) * shape.topk + padding
        return Room(int(self.rows(shape).max()), int(self.dests.sum(0).max()), places)


@dataclass
class EPHandle:
    """One routing on this rank: made by ``finish`` of what ``begin_layout`` returns, completed by dispatch, used by
    combine and by backward.

    Shapes: T tokens of this rank, K top-k (``topk_lanes``: padded to a power of two), R ranks, E experts of a rank,
    N rows of this rank's experts, P places: T * K, or the most entries that a padded routing map can have. All tensors
    but ``tokens_per_expert`` are int32 on the device.

    Attributes:
        shape: What all handles of the context have in common.
        num_tokens: T.
        chunk_tokens: Tokens of one of this rank's chunks.
        num_rows: N (with a capacity: rows of the buffer).
        tokens_per_expert: int64 [E], rows of each local expert: on the CPU with exact sizes, on the device with a
            capacity.
        tables: Counts and offsets, see ``Tables``.
        expert_ids: [T, topk_lanes] experts of a token, ascending, then -1; ragged: [P].
        token_places: ragged: [T + 1] first place of each token, and their number; else ``expert_ids``, not read.
        ragged: Whether a token may have any number of experts, and of places (a padded map).
        dest_slots: [T, R padded to a power of two] slot of a token at each rank, -1 if the token is not sent there.
        send_list: [P, 4] entries that this rank sends; None after the first dispatch.
        entries: [N, 4] entries that this rank received: row, slot, place, probability bits. Written by dispatch.
        origins: [N, 2] the same by row: source rank and place. Written by dispatch.
        slot_capacity: Slots that every rank has room for.
        entry_capacity: Rows that every rank has room for.
        place_capacity: Places that every rank has room for.
        ahead: [T, hidden], the tokens, if they were sent before the sizes were known (``dispatch_ahead``) and are not
            placed yet.
        tiles: The experts' row tiles (``grouped_gemm.RowTiles``), from their first use on.
        expert_rows: NumPy [R * E], rows of each expert of any rank; None if the host does not know.
        kept_for: The stream that all tables were allocated on, or the last one of ``record_stream``; None if there is
            neither.
    """

    shape: LayoutShape
    num_tokens: int
    chunk_tokens: int
    num_rows: int
    tokens_per_expert: torch.Tensor
    tables: Tables
    expert_ids: torch.Tensor
    token_places: torch.Tensor
    ragged: bool
    dest_slots: torch.Tensor
    send_list: torch.Tensor | None
    entries: torch.Tensor
    origins: torch.Tensor
    slot_capacity: int
    entry_capacity: int
    place_capacity: int
    ahead: torch.Tensor | None = None
    tiles: Any = None
    expert_rows: np.ndarray | None = None
    kept_for: torch.cuda.Stream | None = None

    @property
    def expert_tokens(self) -> torch.Tensor:
        """int32 [experts_per_rank]: rows of each local expert, on the device."""
        return self.tables.expert_tokens[: self.shape.experts_per_rank]

    def experts_below(self, rows: int) -> list[int]:
        """The experts of this rank that have some, but fewer than ``rows`` rows; sizes must be exact."""
        return [expert for expert, have in enumerate(self.tokens_per_expert.tolist()) if 0 < have < rows]

    @property
    def destinations(self) -> Destinations:
        """What a dispatch sends to which rank; after the first dispatch the list is not read."""
        tables, send_list = self.tables, self.entries if self.send_list is None else self.send_list
        return Destinations(self.dest_slots, send_list, tables.chunk_entries, tables.list_base, tables.entry_base)

    @property
    def memory(self) -> list[torch.Tensor]:
        """One tensor of each allocation; all tables are parts of one."""
        tensors = [self.tables.limits, self.expert_ids, self.token_places, self.dest_slots, self.entries, self.origins]
        tensors += [] if self.send_list is None else [self.send_list]
        return tensors + ([] if self.tiles is None else [self.tiles.tiles])

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the allocator from reusing the tables before ``stream``, on which an op uses them, has run that op."""
        for tensor in self.memory:
            tensor.record_stream(stream)
        self.kept_for = stream
