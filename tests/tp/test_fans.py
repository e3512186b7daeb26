"""What copy engines send to several peers in one command is what they would send to one after another."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import bodies_fans as bodies  # noqa: E402

from ditron_train.stream.window import Window  # noqa: E402
from ditron_train.tp import gather, scatter  # noqa: E402
from ditron_train.tp.context import RowPartition  # noqa: E402
from ditron_train.tp.gather import PreparedGather  # noqa: E402
from ditron_train.tp.scatter import PreparedScatter  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402

ROW_BYTES, SIZE = 48, 1 << 30
GATHERED, SLOTS, SIGNALS = 1 << 50, 2 << 50, 3 << 50


class _Ring:
    """Rank r's copy of a buffer is at ``base + r * 2**40``; a window of it begins 2**45 bytes further, SIZE bytes
    apart."""

    def __init__(self, base: int, world_size: int) -> None:
        self.base, self.world_size = base, world_size
        self.host_addresses = [base + (rank << 40) for rank in range(world_size)]

    def window(self, ranks) -> Window:
        self.ranks = list(ranks)
        return Window(self.base + (1 << 45), SIZE, 0, len(self.ranks), None)

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
        return Window(cls.own, SIZE, 0, len(ranks), None)


def _context(rank: int, world_size: int) -> SimpleNamespace:
    words = torch.zeros(1024, dtype=torch.int32)
    return SimpleNamespace(
        rank=rank, world_size=world_size, gather_epochs=words, reduce_epochs=words[:world_size].clone()
    )


def _pieces(fan, real):
    """(destination as its rank's own address, source, bytes) of each piece."""
    for piece in range(fan.count):
        yield (
            real(fan.destination + piece * fan.destination_pitch),
            fan.source + piece * fan.source_pitch,
            fan.num_bytes,
        )


_WORLDS = st.integers(3, 9).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1)))


@given(_WORLDS, st.data())
def test_gathers(world_and_rank, data):
    world, rank = world_and_rank
    counts = data.draw(st.lists(st.integers(0, 5), min_size=world, max_size=world).filter(any))
    partition = RowPartition.of(counts)
    context, buffer, signals = _context(rank, world), _Ring(GATHERED, world), _Ring(SIGNALS, world)
    prepared = SimpleNamespace(
        context=context,
        partition=partition,
        buffer=buffer,
        channel=SimpleNamespace(signals=signals),
        row_bytes=ROW_BYTES,
        granule_rows=partition.max_count,
    )
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
    assert (
        sent == {(destination, num_bytes) for destination, _, num_bytes, _, _ in copies[1:]}
        and rows.count == len(copies) - 1
    )
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
        context=context,
        partition=partition,
        _slots=slots,
        channel=SimpleNamespace(signals=signals),
        _row_bytes=ROW_BYTES,
        peers=[(rank - step) % world for step in range(1, world)],
    )
    copies = PreparedScatter._list_copies(prepared, ROW_BYTES)
    original, scatter.ring_window = scatter.ring_window, _Windows.ring_window
    try:
        fans = PreparedScatter._list_fans(prepared)
        first_flags = PreparedScatter._fan_of_first_flags(prepared)
        prepared.partition = RowPartition.of([rows_of_a_rank + 1] + [rows_of_a_rank] * (world - 1))
        assert PreparedScatter._list_fans(prepared) == []  # no equal distances
    finally:
        scatter.ring_window = original
    sent, said, words = [], [], context.reduce_epochs.data_ptr()
    for rows, flags in fans:
        sent += _pieces(rows, slots.real)
        said += [flag for flag, word, size in _pieces(flags, signals.real)]
    for flags in (first_flags, *(flags for _, flags in fans)):
        assert all(words <= word < words + 4 * world and size == 4 for _, word, size in _pieces(flags, signals.real))
    assert sorted(sent) == sorted((destination, source, size) for destination, source, size, _, _ in copies)
    assert Counter(said) == Counter(flag for _, _, _, flag, _ in copies)
    assert {flag for flag, _, _ in _pieces(first_flags, signals.real)} == {copy[3] for copy in copies[:-1]}
    assert first_flags.count == len(copies) - 1


class _Sends:
    """What a prepared reduce-scatter or gather sends, in order: ("rows", ...), ("flag", word's value aside, ...),
    ("fan", ...)."""

    def __init__(self, monkeypatch, module, *, refuses: bool = False) -> None:
        self.log: list[tuple] = []

        def copies(chunks, source, stream):
            for destination, offset, num_bytes, flag, _ in chunks:
                if num_bytes:
                    self.log.append(("rows", destination, source + offset, num_bytes))
                self.log.append(("flag", flag))

        def fans(sent, stream):
            if not refuses:
                self.log += [("fan", fan) for fan in sent]
            return not refuses

        monkeypatch.setattr(module, "copy_with_flags", copies)
        monkeypatch.setattr(module, "send_fans", fans)
        if module is scatter:
            monkeypatch.setattr(
                module, "copy_bytes", lambda to, source, size, stream: self.log.append(("rows", to, source, size))
            )

    def flags(self, real) -> list[int]:
        """Addresses of flags in the order in which they are written."""
        found = []
        for kind, *rest in self.log:
            if kind == "flag":
                found += rest
            elif kind == "fan" and rest[0].num_bytes == 4:
                found += [flag for flag, _, _ in _pieces(rest[0], real)]
        return found


def _chunked_scatter(monkeypatch, counts, rank):
    """A reduce-scatter whose rows leave as they are done, and the ring of its flags."""
    world = len(counts)
    partition, context = RowPartition.of(counts), _context(rank, world)
    context.comm_stream = object()
    slots, signals = _Ring(SLOTS, world), _Ring(SIGNALS, world)
    prepared = SimpleNamespace(
        context=context,
        partition=partition,
        _slots=slots,
        channel=SimpleNamespace(signals=signals),
        _row_bytes=ROW_BYTES,
        peers=[(rank - step) % world for step in range(1, world)],
    )
    monkeypatch.setattr(scatter, "ring_window", _Windows.ring_window)
    prepared._copies = PreparedScatter._list_copies(prepared, ROW_BYTES)
    prepared._first_flags = PreparedScatter._fan_of_first_flags(prepared)
    return prepared, signals


def _send_chunks(prepared, partial, *, halves: bool) -> None:
    for position, peer in enumerate(prepared.peers):
        start, end = prepared.partition.starts[peer : peer + 2]
        middle = (start + end) // 2 if halves and position == 0 else start
        for first, last in [(start, middle), (middle, end)][middle == start :]:
            PreparedScatter.send(prepared, partial, position, slice(first, last), signals=last == end)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("counts", [[4] * 4, [4, 0, 6, 2, 4], [0, 0, 3, 5, 0, 1, 7, 2], [8] * 8])
def test_flags_that_wait_are_behind_all_their_rows(monkeypatch, counts, halves, refuses):
    partial = torch.zeros(sum(counts) * ROW_BYTES, dtype=torch.uint8)
    for rank in range(len(counts)):
        prepared, signals = _chunked_scatter(monkeypatch, counts, rank)
        sends = _Sends(monkeypatch, scatter, refuses=refuses)
        copies = prepared._copies
        _send_chunks(prepared, partial, halves=halves)
        assert sorted(sends.flags(signals.real)) == sorted(copy[3] for copy in copies)
        written: set[int] = set()
        for kind, *rest in sends.log:
            if kind == "rows":
                to, source, size = rest
                written |= set(range(to, to + size, ROW_BYTES))
                assert source - partial.data_ptr() < partial.numel()
                continue
            flags = {flag for flag, _, _ in _pieces(rest[0], signals.real)} if kind == "fan" else set(rest)
            for destination, _, num_bytes, flag, _ in copies:
                assert flag not in flags or set(range(destination, destination + num_bytes, ROW_BYTES)) <= written
        assert (prepared._first_flags is None) == refuses
        again = _Sends(monkeypatch, scatter, refuses=refuses)
        _send_chunks(prepared, partial, halves=halves)  # one by one from now on, where the driver has refused
        assert sorted(again.flags(signals.real)) == sorted(copy[3] for copy in copies)


def test_scatters_go_one_by_one_from_the_first_refusal_on(monkeypatch):
    prepared, _ = _chunked_scatter(monkeypatch, [4] * 5, 2)
    prepared._signal_start = lambda: None
    prepared._fans = PreparedScatter._list_fans(prepared)
    assert len(prepared._fans) == 2
    partial = torch.zeros(20 * ROW_BYTES, dtype=torch.uint8)
    sends = _Sends(monkeypatch, scatter, refuses=True)
    PreparedScatter._send_all(prepared, partial)
    assert prepared._fans == [] and [entry for entry in sends.log if entry[0] == "rows"] == [
        ("rows", destination, partial.data_ptr() + offset, num_bytes)
        for destination, offset, num_bytes, _, _ in prepared._copies
    ]


def test_gathers_go_one_by_one_from_the_first_refusal_on(monkeypatch):
    own_rows = torch.zeros(4 * ROW_BYTES, dtype=torch.uint8)
    copies = [(100 * peer, 0, 4 * ROW_BYTES, 7 + peer, 0) for peer in range(4)]
    prepared = SimpleNamespace(_fans=["rows", "flags"], _copies=copies, own_rows=own_rows)
    sends = _Sends(monkeypatch, gather, refuses=True)
    PreparedGather._send_to_others(prepared, None)
    assert prepared._fans == []
    assert [entry for entry in sends.log if entry[0] == "rows"] == [
        ("rows", destination, own_rows.data_ptr(), num_bytes) for destination, _, num_bytes, _, _ in copies[1:]
    ]


@pytest.mark.parametrize("refused_mapping, refused_copies", [([], []), ([1], []), ([], [0, 3]), ([0, 1, 2, 3], [])])
def test_between_processes(refused_mapping, refused_copies):
    """Each rank decides by itself; who receives sees no difference."""
    for rank, (is_fan, num_mapped, num_unmapped) in enumerate(
        run_workers(4, bodies.check_fans, refused_mapping, refused_copies)
    ):
        assert num_mapped == num_unmapped and bool(num_mapped) == (rank not in refused_mapping)
        # ops at the sizes that came after the last move; rank 0 has no rows in one of the uneven gathers
        assert any(is_fan) == (rank not in refused_mapping + refused_copies), (rank, is_fan)
