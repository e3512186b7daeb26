"""Copies and their flags, in the order in which a stream takes them."""

from __future__ import annotations

import ctypes

import pytest

from ditron_train.stream import copies
from ditron_train.stream.copies import StridedCopy, copy_strided, copy_with_flags

CHUNKS = [(1000, 0, 64, 5000, 7000), (2000, 64, 0, 5004, 7004), (3000, 64, 32, 5008, 7008)]


@pytest.mark.parametrize("stream", [None, 77])
def test_a_flag_is_written_after_its_chunk(monkeypatch: pytest.MonkeyPatch, stream: int | None) -> None:
    """A peer that sees the flag reads the chunk at once. A chunk of no bytes has its flag all the same."""
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr(copies.ctypes, "memmove", lambda *copy: found.append(copy))
    monkeypatch.setattr(copies.driver, "memcpys_async", lambda given, handle: found.extend(given))

    class Stream:
        cuda_stream = stream

    copy_with_flags(CHUNKS, 100, None if stream is None else Stream())
    assert found == [(1000, 100, 64), (5000, 7000, 4), (5004, 7004, 4), (3000, 164, 32), (5008, 7008, 4)]


def test_a_strided_copy_copies_each_piece_from_its_place_to_its_place() -> None:
    source, target = (ctypes.c_uint8 * 32)(*range(32)), (ctypes.c_uint8 * 32)()
    copy_strided([StridedCopy(ctypes.addressof(target) + 1, 10, ctypes.addressof(source) + 2, 8, 3, 3)], None)
    assert list(target) == [0, 2, 3, 4, *[0] * 7, 10, 11, 12, *[0] * 7, 18, 19, 20, *[0] * 8]
