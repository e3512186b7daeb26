"""The reserve that groups carve NVSHMEM memory from, and the start of NVSHMEM; with a stand-in for nvshmem4py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nvshmem as bodies  # noqa: E402

from ditron_train.runtime.errors import ArenaError  # noqa: E402
from ditron_train.symm.reserve import Reserve, first_common_gap  # noqa: E402
from ditron_train.symm.transport import Segment  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402

SIZE = 64


@given(st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(1, 24), st.booleans()), max_size=40))
def test_groups_share_a_reserve_without_overlap(steps: list[tuple[set[int], int, bool]]) -> None:
    """Four ranks; each step is a group that takes a piece, and perhaps the group before gives its piece back."""
    reserves = [Reserve(SIZE) for _ in range(4)]
    held: list[tuple[set[int], int, int]] = []
    for ranks, size, gives_back in steps:
        offset = first_common_gap([reserves[rank].gaps for rank in sorted(ranks)], size)
        free = [at for at in range(SIZE - size + 1) if all(
            at + size <= start or start + length <= at for others, start, length in held if others & ranks
        )]  # fmt: skip
        assert offset == (free[0] if free else None)
        if offset is not None:
            for rank in ranks:
                reserves[rank].take(offset, size)
            held.append((ranks, offset, size))
        if gives_back and held:
            ranks, offset, _ = held.pop(0)
            for rank in ranks:
                reserves[rank].give_back(offset)
    for ranks, offset, _ in held:
        for rank in ranks:
            reserves[rank].give_back(offset)
    assert all(reserve.gaps == [(0, SIZE)] for reserve in reserves)


@pytest.mark.parametrize("what", ["import", "get_unique_id", "init", "tensor"])
def test_a_rank_that_cannot_start_is_the_same_error_on_every_rank(what: str) -> None:
    words = run_workers(3, bodies.one_rank_fails, what)
    assert len(set(words)) == 1
    whole, alone = words[0]
    assert whole == alone and "NVSHMEM failed on 1 of 3 ranks: rank 1: " in whole
    assert what == "import" or f"{what} does not work here" in whole


def test_a_group_that_is_not_the_whole_job_does_not_wait_for_the_others() -> None:
    *pair, (words, _) = run_workers(3, bodies.a_part_of_the_job)
    assert words == []
    for words, seconds in pair:
        assert (
            "starts on all 3 ranks of a job at once, and this group has 2: call ditron_train.symm.start_nvshmem()"
            in words[0]
        )
        assert words[1:] == ["no error"] and seconds < 25


def test_reserves_of_different_sizes_are_the_same_error_on_every_rank() -> None:
    words = run_workers(2, bodies.different_reserves)
    assert words[0] == words[1] and "DITRON_ARENA_BYTES says [4096, 8192]" in words[0]


def test_overlapping_groups_carve_from_one_reserve_and_give_back() -> None:
    results = run_workers(3, bodies.groups_carve_from_one_reserve)
    (first, words), (both, words_1), (second, _) = results
    assert first == [
        [(1, 10)],
        [(1, 10)],
        [(0, 2), (4, 10)],
        [(0, 2), (5, 10)],
        [(0, 2), (5, 10)],
        [(0, 2), (6, 10)],
        [(0, 10)],
    ]
    assert second == [[(0, 10)], [(0, 1), (2, 10)]]
    assert both[-1] == [(0, 1), (2, 10)]
    assert words == words_1 and "no 32768 bytes are free on all ranks in the NVSHMEM reserve of 40960" in words


def test_memory_that_torch_copies_on_one_rank_is_the_same_error_on_every_rank() -> None:
    (words, pages), (words_1, pages_1) = run_workers(2, bodies.memory_that_one_rank_copies)
    assert (
        words == words_1
        and "on 1 of 2 ranks: rank 1: ArenaError: torch does not take the memory of group ranks [0]" in words
    )
    assert pages == pages_1 and pages[0][0] == 0 and len(pages) == 1


def test_memory_of_peers_that_torch_copies_is_refused() -> None:
    """As torch copies what the driver says is another GPU's: what was stored there would reach nobody."""
    own, peer = torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    segment = Segment(own, [own, None, peer], [own.data_ptr(), 0, peer.data_ptr()])
    assert segment.num_bytes == 16
    with pytest.raises(ArenaError, match=r"the memory of group ranks \[2\]"):
        Segment(own, [own, None, peer.clone()], [own.data_ptr(), 0, peer.data_ptr()])
