"""Flags that copy engines send to several peers in one command are those that they would send to one after
another, behind the same rows."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import bodies_strided_copies as bodies  # noqa: E402

from ditron_train.stream import window as windows  # noqa: E402
from ditron_train.stream.window import Window, flags_of_peers  # noqa: E402
from ditron_train.tp import gather, reduce_scatter  # noqa: E402
from ditron_train.tp.context import RowPartition  # noqa: E402
from ditron_train.tp.gather import Gather  # noqa: E402
from ditron_train.tp.reduce_scatter import ReduceScatter  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402

ROW_BYTES, SIZE = 48, 1 << 30
GATHERED, SLOTS, SIGNALS, WORDS = 1 << 50, 2 << 50, 3 << 50, 5 << 50


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


@pytest.fixture
def rings(monkeypatch):
    """Windows of ``_Ring``."""
    monkeypatch.setattr(windows, "ring_window", lambda ring: ring.window([*range(ring.world_size)] * 2))


def _context(rank: int, world_size: int) -> SimpleNamespace:
    words = torch.zeros(1024, dtype=torch.int32)
    return SimpleNamespace(
        rank=rank,
        world_size=world_size,
        gather_epochs=words,
        reduce_epochs=words[:world_size].clone(),
        comm_stream=None,
    )


def _pieces(strided_copy, real):
    """(destination as its rank's own address, source, bytes) of each piece."""
    for piece in range(strided_copy.count):
        yield (
            real(strided_copy.destination + piece * strided_copy.destination_pitch),
            strided_copy.source + piece * strided_copy.source_pitch,
            strided_copy.num_bytes,
        )


@pytest.mark.parametrize("num_skipped", [0, 1])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_flags_of_peers(rings, world, num_skipped):
    for rank in range(world):
        signals = _Ring(SIGNALS, world)
        strided_copy = flags_of_peers(signals, rank, 4 * rank, WORDS, num_skipped=num_skipped)
        peers = [(rank + 1 + step) % world for step in range(num_skipped, world - 1)]
        assert (strided_copy is None) == (len(peers) < 3)
        if strided_copy is not None:
            expected = [(signals.host_addresses[peer] + 4 * rank, WORDS + 4 * i, 4) for i, peer in enumerate(peers)]
            assert list(_pieces(strided_copy, signals.real)) == expected


class _Sends:
    """What a prepared reduce-scatter or gather sends, in order: ("rows", to, source, bytes), ("flag", its address),
    ("strided copy", strided_copy)."""

    def __init__(self, monkeypatch, module, *, refuses: bool = False) -> None:
        self.log: list[tuple] = []

        def copies(chunks, source, stream):
            for destination, offset, num_bytes, flag, _ in chunks:
                if num_bytes:
                    self.log.append(("rows", destination, source + offset, num_bytes))
                self.log.append(("flag", flag))

        def in_sequence(copies, stream):
            for to, source, size in copies:
                self.log.append(("flag", to) if to >= SIGNALS else ("rows", to, source, size))

        def strided_copies(sent, stream):
            if not refuses:
                self.log += [("strided copy", strided_copy) for strided_copy in sent]
            return not refuses

        monkeypatch.setattr(module, "copy_with_flags", copies)
        monkeypatch.setattr(module, "copy_in_sequence", in_sequence)
        monkeypatch.setattr(module, "send_strided", strided_copies)
        if module is reduce_scatter:
            monkeypatch.setattr(
                module, "copy_bytes", lambda to, source, size, stream: self.log.append(("rows", to, source, size))
            )

    def check(self, copies, source, real) -> None:
        """All rows and all flags of ``copies``, each flag behind its rows."""
        written: set[int] = set()
        flags: list[int] = []
        for kind, *rest in self.log:
            if kind == "rows":
                to, _, size = rest
                written |= set(range(to, to + size, ROW_BYTES))
                continue
            new = [flag for flag, _, _ in _pieces(rest[0], real)] if kind == "strided copy" else rest
            flags += new
            for destination, _, num_bytes, flag, _ in copies:
                assert flag not in new or set(range(destination, destination + num_bytes, ROW_BYTES)) <= written
        assert sorted(flags) == sorted(copy[3] for copy in copies)
        sent = {(to + i, at + i) for kind, *rest in self.log if kind == "rows" for to, at, size in [rest]
                for i in range(0, size, ROW_BYTES)}  # fmt: skip
        assert sent == {
            (to + i, source + offset + i) for to, offset, size, _, _ in copies for i in range(0, size, ROW_BYTES)
        }


def _scatter(counts, rank, *, in_parts: bool):
    """A reduce-scatter's own part of itself, and the ring of its flags."""
    world = len(counts)
    partition, context = RowPartition.of(counts), _context(rank, world)
    slots, signals = _Ring(SLOTS, world), _Ring(SIGNALS, world)
    prepared = SimpleNamespace(
        context=context,
        partition=partition,
        _slots=slots,
        channel=SimpleNamespace(signals=signals),
        _row_bytes=ROW_BYTES,
        peers=[(rank - step) % world for step in range(1, world)],
        _signal_start=lambda: None,
    )
    prepared._copies = ReduceScatter._list_copies(prepared, ROW_BYTES)
    flags = ReduceScatter._strided_copy_of_flags(prepared, num_skipped=int(in_parts))
    prepared._all_flags, prepared._first_flags = (None, flags) if in_parts else (flags, None)
    return prepared, signals


def _send_chunks(prepared, partial, *, halves: bool) -> None:
    for position, peer in enumerate(prepared.peers):
        start, end = prepared.partition.starts[peer : peer + 2]
        middle = (start + end) // 2 if halves and position == 0 else start
        for first, last in [(start, middle), (middle, end)][middle == start :]:
            ReduceScatter.send(prepared, partial, position, slice(first, last), signals=last == end)


_COUNTS = [[4] * 4, [4, 0, 6, 2, 4], [0, 0, 3, 5, 0, 1, 7, 2], [8] * 8, [3, 3], [2, 5, 1]]


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("counts", _COUNTS)
def test_flags_that_wait_are_behind_all_their_rows(rings, monkeypatch, counts, halves, refuses):
    partial = torch.zeros(sum(counts) * ROW_BYTES, dtype=torch.uint8)
    for rank in range(len(counts)):
        prepared, signals = _scatter(counts, rank, in_parts=True)
        has_strided_copy = prepared._first_flags is not None
        assert has_strided_copy == (len(counts) > 4)
        for _ in range(2):  # one by one from the first refusal on
            sends = _Sends(monkeypatch, reduce_scatter, refuses=refuses)
            _send_chunks(prepared, partial, halves=halves)
            sends.check(prepared._copies, partial.data_ptr(), signals.real)
            assert (prepared._first_flags is not None) == (has_strided_copy and not refuses)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("counts", _COUNTS)
def test_scatters_as_a_whole(rings, monkeypatch, counts, refuses):
    partial = torch.zeros(sum(counts) * ROW_BYTES, dtype=torch.uint8)
    for rank in range(len(counts)):
        prepared, signals = _scatter(counts, rank, in_parts=False)
        has_strided_copy = prepared._all_flags is not None
        assert has_strided_copy == (len(counts) > 3)
        for _ in range(2):
            sends = _Sends(monkeypatch, reduce_scatter, refuses=refuses)
            ReduceScatter._send_all(prepared, partial)
            sends.check(prepared._copies, partial.data_ptr(), signals.real)
            assert (prepared._all_flags is not None) == (has_strided_copy and not refuses)
            assert has_strided_copy is False or refuses or sends.log[-1] == ("strided copy", prepared._all_flags)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("counts", _COUNTS)
def test_gathers_that_are_awaited(rings, monkeypatch, counts, refuses):
    world = len(counts)
    for rank in range(world):
        partition, signals = RowPartition.of(counts), _Ring(SIGNALS, world)
        x = torch.zeros(counts[rank] * ROW_BYTES, dtype=torch.uint8)
        prepared = SimpleNamespace(
            context=_context(rank, world),
            partition=partition,
            buffer=_Ring(GATHERED, world),
            channel=SimpleNamespace(signals=signals),
            row_bytes=ROW_BYTES,
            flag_block_rows=partition.max_count,
            _signal_start=lambda num_flags: None,
        )
        prepared._copies = Gather._list_copies(prepared)
        assert len(prepared._copies) == (world - 1) * bool(counts[rank])
        prepared._flags = Gather._strided_copy_of_flags(prepared)
        for _ in range(2):
            sends = _Sends(monkeypatch, gather, refuses=refuses)
            Gather._send_by_copies(prepared, x)
            sends.check(prepared._copies, x.data_ptr(), signals.real)
            assert (prepared._flags is not None) == (counts[rank] > 0 and world > 3 and not refuses)
        if counts[rank] > 1:  # several chunks, each with a flag of its own
            prepared.flag_block_rows = counts[rank] - 1
            prepared._copies = Gather._list_copies(prepared)
            prepared._flags = Gather._strided_copy_of_flags(prepared)
            assert len(prepared._copies) == 2 * (world - 1) and prepared._flags is None
            sends = _Sends(monkeypatch, gather)
            Gather._send_by_copies(prepared, x)
            sends.check(prepared._copies, x.data_ptr(), signals.real)


@pytest.mark.parametrize("refused_mapping, refused_copies", [([], []), ([1], []), ([], [0, 3]), ([0, 1, 2, 3], [])])
def test_between_processes(refused_mapping, refused_copies):
    """Each rank decides by itself; who receives sees no difference."""
    for rank, (is_strided_copy, num_mapped, num_unmapped) in enumerate(
        run_workers(4, bodies.check_strided_copies, refused_mapping, refused_copies)
    ):
        assert num_mapped == num_unmapped and bool(num_mapped) == (rank not in refused_mapping)
        # ops at the sizes that came after the last move; rank 0 has no rows in one of the uneven gathers
        assert any(is_strided_copy) == (rank not in refused_mapping + refused_copies), (rank, is_strided_copy)
