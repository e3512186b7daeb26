"""Gathered experts: the rows of a group's tokens at one rank's experts. They are placed source by source as tokens
arrive, and added up source by source before sums are sent. The caller gathers and scatters
(``megatron/ep/gather.py``).

    # equivalent, for the tokens of rank ``source``
    for t, k in local_map[source].nonzero(): rows[row_of_token[source, t, k]] = tokens[t]        # place
    for t in range(len(out)): out[t] = sum(rows[r] for r in rows_of_token[source, t])            # sum_to_tokens

    copy engines: tokens of rank 0 | of rank 1 | ...              sums to rank 0 | to rank 1 | ...
    kernels:                         place 0   | place 1 | ... | sum 0 | sum 1   | ...

Rows are in the native order: by local expert, then source rank, then token. ``rows_of_token`` [tokens, PLACES] lists
the rows that a token has at the local experts, the last one first, then -1. A token goes to few experts of a rank, so
kernels read a list of its rows, not a table of all experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
import triton
import triton.language as tl

from ditron_train.ep.combine import SumOrder
from ditron_train.ep.context import DTYPES
from ditron_train.ep.grouped_gemm import RowTiles, row_tiles, row_tiles_of_groups
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import kernel_target, num_sms
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import kept_launch
from ditron_train.runtime.sizes import next_power_of_2


@triton.jit
def _rows_held(rows_of_token, token, inside, PLACES: tl.constexpr, PLACE_LANES: tl.constexpr):
    """How many rows each of these tokens has."""
    lanes = tl.arange(0, PLACE_LANES)
    known = inside[:, None] & (lanes < PLACES)[None, :]
    listed = tl.load(rows_of_token + token[:, None] * PLACES + lanes[None, :], mask=known, other=-1)
    return tl.sum((listed >= 0).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["num_tokens"])
def place_tokens(
    tokens,
    rows,
    rows_of_token,
    num_tokens,
    hidden,
    PLACES: tl.constexpr,
    PLACE_LANES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """rows[row] = tokens[t] for every row that token t has; a token is read once."""
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = block * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = token < num_tokens
        held = _rows_held(rows_of_token, token, inside, PLACES, PLACE_LANES)
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            source = tokens + tl.cast(token, tl.int64)[:, None] * hidden + offsets[None, :]
            tile = tl.load(source, mask=inside[:, None] & narrow)
            for place in range(0, tl.max(held, axis=0)):
                has = place < held
                row = tl.load(rows_of_token + token * PLACES + place, mask=has, other=0)
                target = rows + tl.cast(row, tl.int64)[:, None] * hidden + offsets[None, :]
                tl.store(target, tile, mask=has[:, None] & narrow)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_rows(
    rows,
    out,
    rows_of_token,
    num_tokens,
    hidden,
    PLACES: tl.constexpr,
    PLACE_LANES: tl.constexpr,
    DESCENDING: tl.constexpr,
    ROUND_EACH: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[t] = ((0 + r_0) + r_1) + ..., r_j token t's rows by expert, ascending or descending; without FROM_ZERO, and
    with one place, r_0 as it is.

    In fp32 with one rounding to the rows' type at the end, or (ROUND_EACH) one after every addition; ``out`` may be of
    a wider type. A token with fewer rows than its neighbours adds zeros instead, which change no sum that began at 0.
    """
    dtype = rows.dtype.element_ty
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = block * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = token < num_tokens
        held = _rows_held(rows_of_token, token, inside, PLACES, PLACE_LANES)
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
            if not FROM_ZERO:  # -0 + -0 is -0; a unary minus is 0 - x up to Triton 3.7
                total = tl.where((held > 0)[:, None], total * -1.0, total)
            for step in range(0, tl.max(held, axis=0)):
                has = step < held
                place = step if DESCENDING else held - 1 - step
                row = tl.load(rows_of_token + token * PLACES + place, mask=has, other=0)
                source = rows + tl.cast(row, tl.int64)[:, None] * hidden + offsets[None, :]
                total += tl.load(source, mask=has[:, None] & narrow, other=0.0).to(tl.float32)
                if ROUND_EACH:
                    total = total.to(dtype).to(tl.float32)
            target = out + tl.cast(token, tl.int64)[:, None] * hidden + offsets[None, :]
            tl.store(target, total.to(dtype).to(out.dtype.element_ty), mask=inside[:, None] & narrow)


_TILE_ELEMENTS = 8192
_MOST_COLUMNS = 1024
_PROGRAMS_OF_AN_SM = 4  # each waits for one row of a few tokens at a time


class RowLayout:
    """The rows of all ranks' tokens at this rank's experts.

    Args:
        counts: int64 [world_size, local experts] on the CPU: rows of each source and expert.
        rows_of_token: int32 [world_size * tokens, places]: the rows that a token has here, the last expert's first,
            then -1.
        adds_up: Whether a token's rows are added up, starting from zero, as natively; else a token has one place.
        counts_there: ``counts`` on the device, if they are there already.

    Attributes:
        num_tokens: Tokens of each rank.
        tokens_per_expert: int64 [local experts] on the CPU.
        num_rows: Rows of all experts.
    """

    def __init__(
        self,
        counts: torch.Tensor,
        rows_of_token: torch.Tensor,
        *,
        adds_up: bool,
        counts_there: torch.Tensor | None = None,
    ) -> None:
        self.counts, self.rows_of_token, self.adds_up = counts, rows_of_token, adds_up
        self._given_counts = counts_there
        self.world_size, self.num_experts = counts.shape
        self.num_tokens = len(rows_of_token) // self.world_size
        self.tokens_per_expert = counts.sum(0)
        self.num_rows = int(counts.numpy().sum())
        self._tiles_of_groups: dict[tuple[Hashable, ...], list[RowTiles]] = {}

    def tokens_of(self, source: int) -> slice:
        """The tokens of a rank in those of all ranks."""
        return slice(source * self.num_tokens, (source + 1) * self.num_tokens)

    @cached_property
    def _counts_there(self) -> torch.Tensor:
        return self.counts.to(self.rows_of_token.device) if self._given_counts is None else self._given_counts

    @cached_property
    def tiles(self) -> RowTiles:
        """Row tiles of all experts."""
        return row_tiles(self._counts_there.sum(0), self.num_rows)

    def tiles_of_groups(self, groups: Sequence[Sequence[int]], *, last: bool, min_rows: int = 0) -> list[RowTiles]:
        """As ``row_tiles_of_groups``."""
        key = (tuple(map(tuple, groups)), last, min_rows)
        if key not in self._tiles_of_groups:
            self._tiles_of_groups[key] = row_tiles_of_groups(
                self._counts_there, groups, self.num_rows, last=last, min_rows=min_rows
            )
        return self._tiles_of_groups[key]

    def experts_below(self, rows: int) -> list[int]:
        """The experts that have some, but fewer than ``rows`` rows."""
        return [expert for expert, have in enumerate(self.tokens_per_expert.tolist()) if 0 < have < rows]


class GatheredLayout(RowLayout):
    """One routing of all tokens of a group to this rank's experts. Making it waits for the device, as native does.

    Args:
        local_map: bool [world_size * tokens, local experts], the tokens of all ranks in order of the ranks.
        world_size: Number of ranks, each with the same number of tokens.
    """

    def __init__(self, local_map: torch.Tensor, world_size: int) -> None:
        num_tokens, num_experts = local_map.shape
        if num_tokens % world_size or num_experts < 1:
            raise NotSupportedError(f"gathered experts: {tuple(local_map.shape)} of {world_size} ranks")
        by_expert = local_map.t().contiguous()
        ends = by_expert.view(-1).cumsum(0, dtype=torch.int32).view(num_experts, num_tokens)
        row_of_token = torch.where(by_expert, ends - 1, -1).t()
        # Rows are stored by expert, so a token's rows in descending order are those of its experts in that order.
        rows_of_token = row_of_token.contiguous().sort(dim=1, descending=True).values
        counts = local_map.view(world_size, num_tokens // world_size, num_experts).sum(1)
        super().__init__(counts.cpu(), rows_of_token, adds_up=True, counts_there=counts)


class SlicedLayout(RowLayout):
    """Rows of several ranks that each hold a slice of the same experts; each rank's are in [expert, ...] order.

    Args:
        counts: int64 [ranks, local experts] on the CPU.
        device: Device of the rows.

    Attributes:
        num_tokens: Rows that every rank has room for, rounded up so that few plans are needed.
    """

    def __init__(self, counts: torch.Tensor, device: torch.device) -> None:
        rows = counts.sum(1)
        step = max(next_power_of_2(int(rows.max())) // 16, 64)
        room = max(-(-int(rows.max()) // step), 1) * step
        by_expert = counts.T.contiguous().view(-1)  # [expert, rank]
        starts = (by_expert.cumsum(0) - by_expert).view(counts.shape[::-1])
        row_of_rank = torch.full((len(counts), room), -1, dtype=torch.int32, device="cpu")
        for rank, of_experts in enumerate(counts.tolist()):
            runs = zip(starts[:, rank].tolist(), of_experts)
            parts = [torch.arange(first, first + n, device="cpu") for first, n in runs]
            row_of_rank[rank, : int(rows[rank])] = torch.cat(parts).int()
        table = row_of_rank.view(-1, 1)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        super().__init__(counts.contiguous(), table, adds_up=False)


def _check(name: str, rows: torch.Tensor, layout: RowLayout) -> None:
    if rows.dim() != 2 or rows.shape[0] != layout.num_rows or not rows.is_contiguous():
        raise NotSupportedError(f"{name}: needs contiguous [{layout.num_rows}, hidden], got {tuple(rows.shape)}")
    if rows.dtype not in DTYPES:
        raise NotSupportedError(f"{name}: {rows.dtype}; allowed: {', '.join(map(str, DTYPES))}")


def _run(kernel: object, layout: RowLayout, source: int, hidden: int, tensors: tuple, **flags: bool) -> None:
    first = tensors[0]
    if layout.num_rows == 0 and kernel is place_tokens:
        return
    columns = min(next_power_of_2(hidden), _MOST_COLUMNS)
    places = layout.rows_of_token.shape[1]
    lanes = next_power_of_2(places)
    block_t = max(_TILE_ELEMENTS // max(columns, lanes), 1)
    constants = {"PLACES": places, "PLACE_LANES": lanes, **flags, "BLOCK_T": block_t, "BLOCK_H": columns}
    is_cuda = kernel_target(first.device) != "interpreter"
    num_programs = min(_PROGRAMS_OF_AN_SM * num_sms(first.device), -(-layout.num_tokens // block_t)) if is_cuda else 1
    launch = kept_launch(kernel, num_programs, *(tensor.dtype for tensor in tensors), **constants, num_warps=8)
    with on_device(first.device):
        launch(*tensors, layout.rows_of_token[layout.tokens_of(source)], layout.num_tokens, hidden)


def place(tokens: torch.Tensor, rows: torch.Tensor, layout: RowLayout, source: int) -> None:
    """Copies the tokens of one rank to their rows at the local experts.

        for t in range(len(tokens)): rows[rows_of_token[source, t]] = tokens[t]

    Args:
        tokens: [tokens, hidden] of rank ``source``.
        rows: [num_rows, hidden], written.

    Raises:
        NotSupportedError: Shapes, types or strides that are not covered.
    """
    _check("place", rows, layout)
    if tokens.shape != (layout.num_tokens, rows.shape[1]) or tokens.dtype != rows.dtype:
        raise NotSupportedError(f"place: {tuple(tokens.shape)} {tokens.dtype} into {tuple(rows.shape)} {rows.dtype}")
    _run(place_tokens, layout, source, rows.shape[1], (tokens.contiguous(), rows))


def sum_to_tokens(rows: torch.Tensor, out: torch.Tensor, layout: RowLayout, source: int, order: SumOrder) -> None:
    """Adds up the rows of each token of one rank, over the local experts.

        out[t] = sum of rows[rows_of_token[source, t]], in ``order``

    Args:
        rows: [num_rows, hidden].
        out: [tokens, hidden], written; of the rows' type or a wider one.

    Raises:
        NotSupportedError: Shapes, types or strides that are not covered.
    """
    _check("sum_to_tokens", rows, layout)
    if out.shape != (layout.num_tokens, rows.shape[1]) or not out.is_contiguous():
        raise NotSupportedError(f"sum_to_tokens: {tuple(rows.shape)} into {tuple(out.shape)}")
    flags = {"DESCENDING": order == "descending", "ROUND_EACH": order == "ascending_rounded"}
    flags["FROM_ZERO"] = layout.adds_up
    _run(sum_rows, layout, source, rows.shape[1], (rows, out), **flags)
