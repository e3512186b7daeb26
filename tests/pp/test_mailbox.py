"""What a rank's host stores in the mailbox becomes visible to the others in any order, as on Arm: nobody takes a part
of it for the whole."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ditron_train.pp import mailbox as mailbox_module
from ditron_train.pp.mailbox import HEADER_DEPTH, HEADER_WORDS, Failure, Headers, Mailbox, Values

_VALUES = [0, 5, 5, 3, -7, 2**62, 0, 0, 1]


class _StoreBuffer:
    """Words as the core that stores them sees them; the others see a word when ``show`` says so."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self.pending = memory, {}

    def __setitem__(self, place: int | slice, value: Any) -> None:
        values = [value] if isinstance(place, int) else list(value)
        first = place if isinstance(place, int) else place.start or 0
        for index, word in enumerate(values):
            self.pending[first + index] = word

    def __getitem__(self, place: int) -> int:
        return self.pending.get(place, self._memory[place])

    def show(self, places: Iterator[int] | tuple[int, ...]) -> None:
        for place in tuple(places):
            self._memory[place] = self.pending.pop(place)


def _pair(tmp_path: Path) -> tuple[Any, Any, _StoreBuffer]:
    """Mailboxes of two ranks in one memory, and what the first one has stored."""
    memory = memoryview(bytearray(mailbox_module._FAULT_BYTES + 2 * mailbox_module._ROW_BYTES))
    both = []
    for rank in range(2):
        mailbox: Any = object.__new__(Mailbox)
        mailbox.rank, mailbox.world_size = rank, 2
        mailbox.bytes, mailbox.int64 = memory, memory.cast("q")
        mailbox.headers, mailbox.values = Headers(mailbox), Values(mailbox)
        mailbox.failure = Failure(mailbox, str(tmp_path / "claim"))
        both.append(mailbox)
    writer, reader = both
    stores = writer.int64 = _StoreBuffer(reader.int64)
    return writer, reader, stores


def _orders(stores: _StoreBuffer) -> list[tuple[int, ...]]:
    return list(itertools.permutations(stores.pending))


def test_a_value_is_not_taken_before_it_is_visible(tmp_path: Path) -> None:
    """Neither the value of two generations ago, nor one of which the number alone is there."""
    num_words = 2
    for chosen in itertools.product(range(num_words), repeat=len(_VALUES)):
        writer, reader, stores = _pair(tmp_path)
        for value, number in zip(_VALUES, chosen):
            writer.values.announce(value)
            reader.values.announce(0)  # it has got as far
            for place in _orders(stores)[number]:
                found = reader.values.announced(0)
                assert found is None or found == value
                stores.show((place,))
            assert reader.values.announced(0) == value


def test_a_rank_that_is_one_call_ahead_overwrites_nothing(tmp_path: Path) -> None:
    writer, reader, stores = _pair(tmp_path)
    writer.values.announce(4)
    for before, ahead in ((4, 6), (6, 9), (9, 0)):
        writer.values.announce(ahead)
        stores.show(tuple(stores.pending))
        reader.values.announce(0)
        assert reader.values.announced(0) == before


def test_agreement_waits_until_a_value_is_visible(tmp_path: Path) -> None:
    writer, reader, stores = _pair(tmp_path)
    for value in (3, 8, 1, 9):
        writer.values._put(mailbox_module._AGREED, value)
        waiting = list(stores.pending)[::-1]  # the number before what it is of
        found = reader.values.agree(50, 10.0, lambda waiting=waiting: stores.show(waiting.pop() for _ in waiting[:1]))
        assert found == [value, 50]


@pytest.mark.parametrize("words", [[2, 4], [4, 2], [0, 0], [5, 1]])
def test_a_header_is_not_taken_before_all_of_it_is_visible(tmp_path: Path, words: list[int]) -> None:
    """Also where the header before it in the same place has the same words in another order, or with the same sum."""
    writer, reader, stores = _pair(tmp_path)
    rest = [7] * (HEADER_WORDS - 4)
    writer.headers.write_header(1, 0, 3, [4, 2, *rest])
    stores.show(tuple(stores.pending))
    assert reader.headers.read_header(0, 3) == [4, 2, *rest]
    expected = [*words, *rest]
    writer.headers.write_header(1, 0, 3 + HEADER_DEPTH, expected)
    stores_now = dict(stores.pending)
    differing = [place for place, word in stores_now.items() if reader.int64[place] != word]
    before = {place: reader.int64[place] for place in stores_now}
    for number in range(len(differing) + 1):
        for visible in itertools.combinations(differing, number):
            for place in differing:
                reader.int64[place] = stores_now[place] if place in visible else before[place]
            found = reader.headers.read_header(0, 3 + HEADER_DEPTH)
            assert found in (None, expected), visible
    assert reader.headers.read_header(0, 3 + HEADER_DEPTH) == expected


def test_a_failure_is_read_when_all_of_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, reader, _ = _pair(tmp_path)
    reference, _, _ = _pair(tmp_path)
    reference.int64 = reference.bytes.cast("q")
    fields, text = [1, 0, 3, 21, 5, 4, 2], "rank 0 sent"
    reference.failure.post(fields, text)
    content = reference.int64[: mailbox_module._FAULT_BYTES // 8].tolist()
    hidden = [place for place, word in enumerate(content) if word and place]
    assert len(hidden) > 7
    reader.int64[0] = content[0]  # that there is one, and nothing of what it is
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if hidden:
            place = hidden.pop()
            reader.int64[place] = content[place]

    monkeypatch.setattr(time, "sleep", sleep)
    assert reader.failure.is_posted and reader.failure.read() == (fields, text)
    assert len(slept) >= 7 and not hidden


def test_a_failure_that_never_fits_is_told_nevertheless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that were written at once."""
    monkeypatch.setattr(mailbox_module, "_FAULT_READ_S", 0.02, raising=False)
    reference, _, _ = _pair(tmp_path)
    reference.int64 = reference.bytes.cast("q")
    reference.failure.post([1, 0, 3, 21, 5, 4, 2], "")
    reference.int64[4] = 99
    assert reference.failure.read() == ([1, 0, 99, 21, 5, 4, 2], "")
