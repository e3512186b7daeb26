"""Which bytes of one reserve are taken: groups that overlap carve from it, each at an offset that is free on all its
ranks."""

from __future__ import annotations

from collections.abc import Sequence

Gap = tuple[int, int]  # from, to


class Reserve:
    """The pieces of this rank's reserve of ``num_bytes`` that are taken."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._taken: dict[int, int] = {}  # offset: bytes

    @property
    def gaps(self) -> list[Gap]:
        """What is free, in ascending order."""
        gaps, end = [], 0
        for offset, size in sorted(self._taken.items()):
            if offset > end:
                gaps.append((end, offset))
            end = offset + size
        if end < self.num_bytes:
            gaps.append((end, self.num_bytes))
        return gaps

    def take(self, offset: int, size: int) -> None:
        """Takes a piece, which must be free."""
        assert size > 0 and any(low <= offset and offset + size <= high for low, high in self.gaps), (offset, size)
        self._taken[offset] = size

    def give_back(self, offset: int) -> None:
        """Frees the piece that was taken at ``offset``."""
        del self._taken[offset]


def first_common_gap(gaps_of_ranks: Sequence[Sequence[Gap]], size: int) -> int | None:
    """The lowest offset at which ``size`` bytes are free on every rank; None if there is none."""
    common = list(gaps_of_ranks[0])
    for gaps in gaps_of_ranks[1:]:
        shared = [(max(low, start), min(high, end)) for low, high in common for start, end in gaps]
        common = [(low, high) for low, high in shared if low < high]
    return next((low for low, high in sorted(common) if high - low >= size), None)
