"""What copy engines send to several peers in one command is what they would send to one after another."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ditron_train.stream.window import Window
from ditron_train.tp import gather, scatter
from ditron_train.tp.context import RowPartition
from ditron_train.tp.gather import PreparedGather
from ditron_train.tp.scatter import PreparedScatter

ROW_BYTES, SIZE = 48, 1 << 30
GATHERED, SLOTS, SIGNALS = 1 << 50, 2 << 50, 3 << 50


class _Ring:
    """Rank r's copy of a buffer is at ``base + r * 2**40``; a window of it begins 2**45 bytes further, SIZE bytes apart."""

    def __init__(self, base: int, world_size: int) -> None:
        self.base, self.world_size = base, world_size
        self.host_addresses = [base + (rank << 40) for rank in range(world_size)]

    def window(self, ranks) -> Window:
        self.ranks = list(ranks)
        return Window(self.base + (1 << 45), SIZE, 0, len(self.ranks))

    def real(self, address: int) -> int:
        """Where an address of the ring's window leads."""
        position, offset = divmod(address - self.base - (1 << 45), SIZE)
        return self.host_addresses[position % self.world_size] + offset


class _Windows:
    """In place of ``ditron_train.stream.window``; own memory as often as needed lies at ``own``."""

    own = 4 << 50

    @staticmethod
    def ring_window(tensor):
        return tensor.window([*range(tensor.world_size)] * 2)

    @classmethod
    def window(cls, tensor, ranks):
        assert len(set(ranks)) == 1
        return Window(cls.own, SIZE, 0, len(ranks))


def _context(rank: int, world_size: int) -> SimpleNamespace:
    words = torch.zeros(1024, dtype=torch.int32)
    return SimpleNamespace(
        rank=rank, world_size=world_size, is_cuda=True, gather_epochs=words, reduce_epochs=words[:world_size].clone()
    )


def _pieces(fan, real):
    """(destination as its rank's own address, source, bytes) of each piece."""
    for piece in range(fan.count):
        yield real(fan.destination + piece * fan.destination_pitch), fan.source + piece * fan.source_pitch, fan.num_bytes


_WORLDS = st.integers(3, 9).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1)))


@given(_WORLDS, st.data())
def test_gathers(world_and_rank, data):
    world, rank = world_and_rank
    counts = data.draw(st.lists(st.integers(0, 5), min_size=world, max_size=world).filter(any))
    partition = RowPartition.of(counts)
    context, buffer, signals = _context(rank, world), _Ring(GATHERED, world), _Ring(SIGNALS, world)
    prepared = SimpleNamespace(
        context=context, partition=partition, buffer=buffer, channel=SimpleNamespace(signals=signals), row_bytes=ROW_BYTES,
        granule_rows=partition.max_count,
    )  # fmt: skip
    copies = PreparedGather._list_copies(prepared)
    originals = gather.ring_window, gather.window
    gather.ring_window, gather.window = _Windows.ring_window, _Windows.window
    try:
        fans = PreparedGather._list_fans(prepared)
        prepared.granule_rows -= 1
        assert PreparedGather._list_fans(prepared) == []  # more flags than one for each rank
    finally:
        gather.ring_window, gather.window = originals
    assert bool(fans) == (world >= 4 and counts[rank] > 0)
    if not fans:
        return
    rows, flags = fans
    assert copies[0][0] == buffer.host_addresses[(rank - 1) % world] + partition.starts[rank] * ROW_BYTES
    sent = {(destination, num_bytes) for destination, source, num_bytes in _pieces(rows, buffer.real)}
    assert sent == {(destination, num_bytes) for destination, _, num_bytes, _, _ in copies[1:]} and rows.count == len(copies) - 1
    place = _Windows.own + partition.starts[rank] * ROW_BYTES  # own rows, in each of own memory's mappings
    assert [source for _, source, _ in _pieces(rows, buffer.real)] == [place + i * SIZE for i in range(world - 2)]
    words = context.gather_epochs.data_ptr()
    said = list(_pieces(flags, signals.real))
    assert {flag for flag, _, _ in said} == {flag for _, _, _, flag, _ in copies[1:]} and len(said) == len(copies) - 1
    assert all(words <= word < words + 4 * world and num_bytes == 4 for _, word, num_bytes in said)


@given(_WORLDS, st.integers(1, 5))
def test_scatters(world_and_rank, rows_of_a_rank):
    world, rank = world_and_rank
    partition = RowPartition.of([rows_of_a_rank] * world)
    context, slots, signals = _context(rank, world), _Ring(SLOTS, world), _Ring(SIGNALS, world)
    prepared = SimpleNamespace(
        context=context, partition=partition, _slots=slots, channel=SimpleNamespace(signals=signals), _row_bytes=ROW_BYTES,
        peers=[(rank - step) % world for step in range(1, world)],
    )  # fmt: skip
    copies = PreparedScatter._list_copies(prepared, ROW_BYTES)
    original, scatter.ring_window = scatter.ring_window, _Windows.ring_window
    try:
        fans = PreparedScatter._list_fans(prepared)
        first_flags = PreparedScatter._fan_of_first_flags(prepared)
        prepared.partition = RowPartition.of([rows_of_a_rank + 1] + [rows_of_a_rank] * (world - 1))
        assert PreparedScatter._list_fans(prepared) == []  # no equal distances
    finally:
        scatter.ring_window = original
    sent, said = [], []
    for offset, rows, flags in fans:
        sent += [(destination, offset + source, size) for destination, source, size in _pieces(rows, slots.real)]
        said += [flag for flag, word, size in _pieces(flags, signals.real)]
    assert sorted(sent) == sorted((destination, source, size) for destination, source, size, _, _ in copies)
    assert Counter(said) == Counter(flag for _, _, _, flag, _ in copies)
    assert {flag for flag, _, _ in _pieces(first_flags, signals.real)} == {copy[3] for copy in copies[:-1]}
    assert first_flags.count == len(copies) - 1
