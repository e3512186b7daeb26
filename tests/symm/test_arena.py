"""Symmetric arenas over POSIX shared memory: peers, growth, groups, caps."""

from __future__ import annotations

import glob
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_symm as bodies  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402


def test_peers_see_writes_and_no_file_is_left():
    assert run_workers(4, bodies.peers_see_writes) == [True] * 4
    assert not [path for pid in run_workers(4, os.getpid) for path in glob.glob(f"/dev/shm/ditron-{pid}-*")]


def test_a_buffer_grows_collectively():
    results = run_workers(2, bodies.grows)
    assert results[0] == results[1]
    capacity_bytes, num_bytes = results[0]
    assert capacity_bytes == 4 * 4096 and num_bytes >= capacity_bytes


def test_old_memory_is_free_before_new_is_taken():
    assert run_workers(2, bodies.what_is_held_while_it_grows) == [[False, True]] * 2


def test_captured_graphs_find_their_tables_of_addresses():
    assert run_workers(2, bodies.tables_that_graphs_know) == [[False, True, True]] * 2


def test_overlapping_groups():
    low, high = [20.0, 21.0], [30.0, 31.0, 32.0]
    assert run_workers(4, bodies.overlapping_groups) == [low, low + high, high, high]


def test_nobody_writes_into_memory_that_was_closed():
    first, second, third = run_workers(3, bodies.late_writes_and_close_all)
    assert first[0] == [1, 3] and second[0] == [1, 2, 3] and third[0] == [2, 3]
    assert all(closed and seconds >= 0.5 for _, closed, seconds in (first, second, third))


def test_a_cap_is_the_same_error_on_every_rank():
    (words, after), (words_1, after_1) = run_workers(2, bodies.above_the_cap)
    assert words == words_1 and "rank 1's cap DITRON_ARENA_BYTES=65536" in words
    assert after == after_1 == "this arena was closed"


def test_different_requests_are_the_same_error_on_every_rank():
    words = run_workers(2, bodies.different_requests)
    assert words[0] == words[1] and "different symmetric buffers" in words[0]


def test_a_transport_that_does_not_serve_the_device():
    assert set(run_workers(2, bodies.wrong_transport)) == {"transport 'torch' does not serve cpu tensors"}


def test_the_transport_of_one_node_is_not_tried_between_nodes():
    (words,) = set(run_workers(2, bodies.torch_between_nodes))
    assert words == "the transport torch reaches the ranks of one torchrun agent, and this group has several"


def test_a_buffer_stays_where_a_peer_does_not_come_to_see_it_move():
    (words, num_bytes, values), (words_1, num_bytes_1, values_1) = run_workers(
        2, bodies.a_peer_does_not_come_while_a_buffer_grows
    )
    assert (words, words_1) == ("rank 1 is missing", "rank 0 is missing")
    assert num_bytes == num_bytes_1 == 256 and values == values_1 == [3.0]


def test_a_transport_that_does_not_exist():
    assert set(run_workers(2, bodies.unknown_transport)) == {"transport 'shmem' does not serve cpu tensors"}


def test_a_deadline_beyond_the_kernels_clock():
    assert run_workers(2, bodies.longest_deadline) == [2**62] * 2


def test_different_transports_are_the_same_error_on_every_rank():
    words = run_workers(2, bodies.different_transports)
    assert words[0] == words[1] and words[0].startswith("ranks chose different transports: ['shm', 'nvshmem']")


@pytest.mark.parametrize(
    "what, words", [("reserve", "reserving 256 bytes in /dev/shm"), ("map", "mapping the peers' shared memory")]
)
def test_too_little_memory_is_the_same_error_on_every_rank(what, words):
    (mine, left), (theirs, left_1) = run_workers(2, bodies.memory_is_full, what)
    assert mine == theirs and "failed on 1 of 2 ranks: rank 1: " in mine and words in mine and "No space left" in mine
    assert left == left_1 == ""


def test_peers_out_of_reach_are_an_error_on_every_rank():
    for rank, (words, refusal) in enumerate(run_workers(2, bodies.peers_out_of_reach)):
        assert words == f"the memory of group rank {1 - rank} cannot be addressed from this rank"
        assert refusal == "test.alone: the group has ranks on other nodes, whose memory cannot be addressed from here"


def test_new_flags_start_at_the_epoch():
    assert run_workers(2, bodies.signals_grow_with_the_epoch) == [[-(2**31) + 5]] * 2


def test_flags_that_find_no_room_leave_as_many_as_before():
    for words, is_held, flags in run_workers(2, bodies.flags_where_more_find_no_room):
        assert words == "no room" and is_held and flags == [6] * 4


def test_a_channel_does_not_see_the_flags_of_one_before():
    assert run_workers(2, bodies.flags_after_another_channel) == [[0] * 4] * 2


def test_the_rank_that_never_began_is_missing_not_one_that_waits_for_it():
    """Whose wait was recorded, of two that end together, is chance."""
    for recorded, chunk, behind in ((0, -1, 2), (1, -1, 2), (2, 5, 1)):
        assert run_workers(3, bodies.who_is_missing, recorded)[:2] == [(2, chunk, -behind, rank) for rank in range(2)]


def test_a_mismatch_waits_for_the_words_of_ranks_that_are_on_their_way():
    """A difference is recorded as soon as two ranks have called; the error names what all of them called."""
    words = run_workers(3, bodies.words_of_a_mismatch)
    assert len(set(words)) == 1
    assert words[0].endswith("rank 0: elements=10; rank 1: elements=11; rank 2: elements=12")
