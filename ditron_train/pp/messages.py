"""What is sent with the data: the header of a message, and how a message is cut into fragments. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ditron_train.pp.mailbox import HEADER_WORDS
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.symm.control import DTYPES

FORWARD, BACKWARD = 0, 1
LANE_NAMES = ("forward", "backward")

MAX_DIMS = HEADER_WORDS - 6  # sequence, checksum and the four words below
_WHOLE_BYTES = 8 << 20
_ALIGNMENT_BYTES = 4096


def num_bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


class Copy(NamedTuple):
    """Bytes on their way: addresses and how many."""

    destination: int
    source: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """Shape and type of one message, and where it goes: the network group, the ring of slots, or a slot that is
    leased.

    Attributes:
        lease: Number of the slot to lease; None for the ring. The receiver does not expect one or the other.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    by_network: bool = False
    lease: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    def is_taken_as(self, expected: Header) -> bool:
        """Whether a receiver of ``expected`` takes this message: as natively, in any shape of as many elements."""
        kinds = (self.dtype, self.by_network), (expected.dtype, expected.by_network)
        return kinds[0] == kinds[1] and math.prod(self.shape) == math.prod(expected.shape)

    def agreed_words(self) -> list[int]:
        """What ``is_taken_as`` compares of a message that does not go by the network, as two integers."""
        return [DTYPES.index(self.dtype), math.prod(self.shape)]

    def to_words(self) -> list[int]:
        """The header as ``HEADER_WORDS - 2`` integers.

        Raises:
            NotSupportedError: More than ``MAX_DIMS`` dimensions, or a type that has no code.
        """
        if len(self.shape) > MAX_DIMS:
            raise NotSupportedError(f"a message of {len(self.shape)} dimensions; at most {MAX_DIMS}")
        if self.dtype not in DTYPES:
            raise NotSupportedError(f"messages of {self.dtype} are not supported")
        lease = 0 if self.lease is None else self.lease + 1
        words = [DTYPES.index(self.dtype), int(self.by_network), lease, len(self.shape), *self.shape]
        return words + [0] * (HEADER_WORDS - 2 - len(words))

    @classmethod
    def from_words(cls, words: list[int]) -> Header:
        """Inverse of ``to_words``."""
        code, by_network, lease, num_dims = words[:4]
        return cls(tuple(words[4 : 4 + num_dims]), DTYPES[code], bool(by_network), lease - 1 if lease else None)


def disagreement(group: str, lane: int, message: int, sent: tuple[int, str], expected: tuple[int, str]) -> str:
    """The error's words if a rank sent one thing and another expected something else, each given with its rank."""
    return (
        f"pp on group {group}: rank {sent[0]} sent {sent[1]} as {LANE_NAMES[lane]} message {message}, rank "
        f"{expected[0]} expected {expected[1]}; the stages of a pipeline must agree on the number and type of the "
        "elements that they exchange"
    )


def fragment_ends(num_bytes: int) -> list[int]:
    """Where the fragments of a message of ``num_bytes`` end.

    A fragment is taken out of its slot while the next one is on the wire. The local copy is at least three times as
    fast as a link, so every fragment is three quarters of what remains: each is copied out before the next has
    arrived, and only the last, small one is waited for. Up to 8 MiB the gap between two copies costs more than that
    saves.
    """
    ends = []
    begin = 0
    while num_bytes - begin > _WHOLE_BYTES:
        begin += (num_bytes - begin) * 3 // 4 // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        ends.append(begin)
    ends.append(num_bytes)
    return ends
