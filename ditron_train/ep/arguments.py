"""What kernels of expert parallelism take: pointers that travel together, and constants that do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl

from ditron_train.runtime.device import is_interpreter


def as_constant(value: Any) -> Any:
    """A constant as a launch takes it: of a tuple each field for itself, but in the interpreter, which knows no
    ``tl.constexpr``."""
    return type(value)(*map(tl.constexpr, value)) if isinstance(value, tuple) and not is_interpreter() else value


class Tables(NamedTuple):
    """int32 tables of one layout; ``layout_kernels.exchange_counts`` says what they hold."""

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
    """Those of ``Tables`` that say where a chunk's rows, slots and entries begin."""

    chunk_counts: torch.Tensor
    chunk_dests: torch.Tensor
    chunk_entries: torch.Tensor
    row_base: torch.Tensor
    slot_base: torch.Tensor
    list_base: torch.Tensor


class Destinations(NamedTuple):
    """What a rank sends where, of one layout."""

    dest_slots: torch.Tensor
    send_list: torch.Tensor
    chunk_entries: torch.Tensor
    list_base: torch.Tensor
    entry_base: torch.Tensor


class Placed(NamedTuple):
    """Rows of this rank's experts, their probabilities, and what is kept of the entries, by arrival and by row."""

    rows: torch.Tensor
    probs: torch.Tensor
    entries: torch.Tensor
    origins: torch.Tensor


class Inbox(NamedTuple):
    """What a rank's receivers read: where each chunk's entries begin, slots, entries, flags."""

    recv_offsets: torch.Tensor
    tokens: torch.Tensor
    entries: torch.Tensor
    signals: torch.Tensor
    control: torch.Tensor


class TokenBuffers(NamedTuple):
    """Symmetric buffers of a dispatch: own memory, and the addresses of every rank's."""

    tokens: torch.Tensor
    token_addresses: torch.Tensor
    entries: torch.Tensor
    entry_addresses: torch.Tensor


class Returned(NamedTuple):
    """Rows to return and one gradient each, what is kept of their entries, where those of each chunk begin."""

    rows: torch.Tensor
    grads: torch.Tensor
    entries: torch.Tensor
    recv_offsets: torch.Tensor


class Produced(NamedTuple):
    """Rows that a grouped GEMM makes to be returned and one gradient each, and where each row came from."""

    rows: torch.Tensor
    grads: torch.Tensor
    origins: torch.Tensor


class RowBuffers(NamedTuple):
    """Symmetric buffers of a combine: own memory, and the addresses of every rank's."""

    rows: torch.Tensor
    row_addresses: torch.Tensor
    grads: torch.Tensor
    grad_addresses: torch.Tensor


class RowInbox(NamedTuple):
    """What a combine's receivers read: rows, gradients, flags."""

    rows: torch.Tensor
    grads: torch.Tensor
    signals: torch.Tensor
    control: torch.Tensor


class Sums(NamedTuple):
    """What a combine writes, and where each token's rows lie."""

    out: torch.Tensor
    prob_grads: torch.Tensor
    chunk_entries: torch.Tensor
    expert_ids: torch.Tensor
    token_places: torch.Tensor


class TileTasks(NamedTuple):
    """Tiles of a grouped GEMM as tasks: each expert's weight, the row tiles, their order, the board."""

    places: torch.Tensor
    tiles: torch.Tensor
    order: torch.Tensor
    board: torch.Tensor


class LayoutSizes(NamedTuple):
    """Constants of the kernels that make a layout, see ``layout.LayoutShape``."""

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


class MoveSizes(NamedTuple):
    """Constants of the kernels that move tokens to the experts, see ``kernels``."""

    WITH_ENTRIES: bool
    ZERO_PROBS: bool
    WORLD_SIZE: int
    RANKS: int
    NUM_CHUNKS: int
    ROWS: int
    BLOCK_H: int
    TARGET: str
    NUM_SENDERS: int
    SHARED: bool = False


class SumSizes(NamedTuple):
    """Constants of the kernels that bring rows back, see ``return_kernels``."""

    WITH_GRADS: bool
    RAGGED: bool
    TOPK: int
    TOPK_LANES: int
    ROUND_EACH: bool
    DESCENDING: bool
    WORLD_SIZE: int
    NUM_CHUNKS: int
    ROWS: int
    SUM_ROWS: int
    BLOCK_H: int
    ITEM_TOKENS: int
    TARGET: str
    NUM_SENDERS: int = 0
    SHARED: bool = False
    TILE_COUNT: int = 1


class GemmSizes(NamedTuple):
    """Constants of the grouped GEMMs, see ``group_gemm_kernels``."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    SPLIT_STORE: bool
    TRANSPOSE_B: bool = False
