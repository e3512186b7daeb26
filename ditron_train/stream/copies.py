"""Copies between kernels: by a copy engine on a GPU, plain copies on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ditron_train.stream import driver


@dataclass(frozen=True)
class StridedCopy:
    """Pieces of one size that a copy engine moves in one command.

    Attributes:
        destination: Address of the first piece.
        destination_pitch: Bytes from one piece to the next.
        source: Address of the first piece.
        source_pitch: Bytes from one piece to the next.
        num_bytes: Bytes of each piece.
        count: Number of pieces.
    """

    destination: int
    destination_pitch: int
    source: int
    source_pitch: int
    num_bytes: int
    count: int


def copy_bytes(destination: int, source: int, num_bytes: int, stream: torch.cuda.Stream | None) -> None:
    """Copies between addresses: by a copy engine on ``stream``, or at once if ``stream`` is None (CPU)."""
    if stream is None:
        ctypes.memmove(destination, source, num_bytes)
    else:
        driver.memcpy_async(destination, source, num_bytes, stream.cuda_stream)


def copy_with_flags(
    chunks: Iterable[tuple[int, int, int, int, int]], source: int, stream: torch.cuda.Stream | None
) -> None:
    """Copies chunks of the memory at ``source`` in order, each given as (destination, offset, bytes, address of its
    flag, address of a word with the flag's value), and writes each flag after its chunk. A copy takes 2.6 us of host
    time, nearly all of it in the driver (H200)."""
    copy_in_sequence(_in_order(chunks, source), stream)


def copy_in_sequence(copies: Iterable[tuple[int, int, int]], stream: torch.cuda.Stream | None) -> None:
    """``copy_bytes`` of several (destination, source, bytes), in this order."""
    if stream is not None:
        driver.memcpys_async(copies, stream.cuda_stream)
        return
    for destination, source, num_bytes in copies:
        ctypes.memmove(destination, source, num_bytes)


def copy_strided(strided_copies: Iterable[StridedCopy], stream: torch.cuda.Stream | None) -> None:
    """Runs strided copies one after another, by a copy engine on ``stream``, or at once if it is None (CPU).

    A command of a copy engine takes 2 to 3 us in addition to its bytes, so one command for a few bytes of several
    peers is shorter than a command for each (``docs/measurements/runtime.md``)."""
    for strided_copy in strided_copies:
        if stream is None:
            for i in range(strided_copy.count):
                destination = strided_copy.destination + i * strided_copy.destination_pitch
                source = strided_copy.source + i * strided_copy.source_pitch
                ctypes.memmove(destination, source, strided_copy.num_bytes)
        else:
            driver.memcpy_2d_async(
                strided_copy.destination,
                strided_copy.destination_pitch,
                strided_copy.source,
                strided_copy.source_pitch,
                strided_copy.num_bytes,
                strided_copy.count,
                stream.cuda_stream,
            )


def _in_order(chunks: Iterable[tuple[int, int, int, int, int]], source: int) -> Iterator[tuple[int, int, int]]:
    for destination, offset, num_bytes, flag, word in chunks:
        if num_bytes:
            yield destination, source + offset, num_bytes
        yield flag, word, 4
