"""Messages between pipeline neighbours on CPU processes: nothing lost, doubled, overwritten early or waited for
forever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ditron_train.pp.messages import Header, fragment_ends
from ditron_train.runtime.errors import NotSupportedError
from tests.support.processes import run_workers, run_workers_once

sys.path.insert(0, str(Path(__file__).parent))
import bodies_pp as bodies  # noqa: E402


@given(st.integers(0, 1 << 31))
def test_fragments_cover_the_message_and_shrink(num_bytes):
    ends = fragment_ends(num_bytes)
    sizes = [end - begin for begin, end in zip([0, *ends], ends)]
    assert ends[-1] == num_bytes
    assert len(sizes) == 1 or all(size > 0 for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 8 << 20 and len(sizes) <= 6


@given(
    st.lists(st.integers(0, 2**40), max_size=10).map(tuple),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn]),
    st.booleans(),
)
def test_headers_survive_the_trip(shape, dtype, by_network):
    header = Header(shape, dtype, by_network)
    assert Header.from_words(header.to_words()) == header


def test_headers_that_do_not_fit_are_refused():
    with pytest.raises(NotSupportedError, match="11 dimensions"):
        Header((1,) * 11, torch.float32).to_words()
    with pytest.raises(NotSupportedError, match="complex64"):
        Header((1,), torch.complex64).to_words()


def test_a_thousand_messages_each_way():
    for world_size, num_slots, messages in ((2, 2, 1000), (4, 1, 150)):
        results = run_workers(world_size, bodies.ring, messages, num_slots, (33,), torch.float32, True)
        assert results == [2 * messages] * world_size


def test_messages_of_several_fragments():
    shape = (3, 4 << 20)  # 24 MiB of bf16: three fragments
    assert len(fragment_ends(2 * 3 * (4 << 20))) == 2
    assert run_workers(2, bodies.ring, 3, 2, shape, torch.bfloat16, False) == [6, 6]


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_random_programs_with_prefetched_receives(num_slots):
    for seed in range(6):
        assert run_workers(3, bodies.random_program, seed, num_slots) == [True] * 3


@pytest.mark.parametrize("num_slots, num_leases", [(1, 0), (2, 1), (1, 6)])
def test_received_tensors_lie_in_their_slots_until_let_go_of(num_slots, num_leases):
    for right, leased in run_workers(2, bodies.received_tensors_are_kept, 3, num_slots, num_leases):
        assert right
        assert (leased > 0) == (num_leases > 0)
        assert leased < 120  # some had to be copied


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_sender_is_never_more_than_the_slots_ahead(num_slots):
    (ahead, _), (_, right) = run_workers(2, bodies.slow_neighbour, num_slots)
    assert right
    assert 1 <= ahead <= num_slots
    if num_slots > 1:
        assert ahead > 1


def test_counters_wrap():
    assert run_workers(2, bodies.wrap_around) == [True, True]


@pytest.mark.parametrize("world_size, victim", [(2, 0), (4, 2)])
def test_a_dead_neighbour_becomes_an_error_on_every_survivor(world_size, victim):
    outcomes = run_workers_once(world_size, bodies.dead_neighbour, victim, 2, 3.0)
    assert outcomes[victim].exit_code is not None
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error is None, outcome.traceback
            assert outcome.value < 3 + 5


@pytest.mark.parametrize("stalled", [0, 1, 2])
def test_the_stage_that_stands_still_is_missing_not_one_that_waits_for_it(stalled):
    """Also where it had to wait for what it has got by now."""
    assert run_workers(4, bodies.stalled_stage, stalled, 2.0) == [(3, stalled)] * 4


@pytest.mark.parametrize("for_slots", [False, True], ids=["message", "slot"])
@pytest.mark.parametrize("turns", [1, 4])
def test_an_error_names_the_deadline_that_was_waited_for(turns, for_slots):
    for said_s, waited_s in run_workers(2, bodies.late_neighbour, turns, for_slots, env={"DITRON_TIMEOUT_S": "0.5"}):
        assert said_s == 0.5 * turns <= waited_s


def test_a_failure_of_one_rank_is_known_to_all():
    """A watchdog lets through what waits on a channel that has failed: on every rank, whoever recorded it."""
    outcomes = run_workers_once(3, bodies.failure_of_rank_1)
    told = {outcome.value for outcome in outcomes}
    assert len(told) == 1, told
    ((before, after, words),) = told
    assert not before and after and "rank 1 waited" in words and "for rank 0" in words


@pytest.mark.parametrize("case, words", [("size", "[8, 5] float32"), ("dtype", "[8, 4] int32")])
def test_neighbours_that_disagree_raise_the_same_error(case, words):
    outcomes = run_workers_once(3, bodies.disagree, case)
    told = {outcome.value for outcome in outcomes}
    assert len(told) == 1, told
    (text,) = told
    assert text.startswith("MismatchError") and words in text and "rank 0 sent [8, 4] float32" in text


@pytest.mark.parametrize("num_leases", [0, 3])
def test_as_many_elements_in_another_shape_arrive_in_the_shape_that_is_asked_for(num_leases):
    """As natively, where bytes go into the receiver's tensor and nobody compares shapes."""
    assert run_workers(3, bodies.another_shape, num_leases) == [True] * 3


def test_shapes_that_only_the_sender_knows():
    assert run_workers(3, bodies.variable, [1, 50, 7, 0, 3], False, 400) == [True] * 3


@pytest.mark.parametrize("num_bytes", [0, 400])
def test_messages_larger_than_a_slot_take_the_network(num_bytes):
    assert run_workers(3, bodies.variable, [0, 1, 50, 700, 20, 3], True, num_bytes) == [True] * 3


@pytest.mark.parametrize("variable_shapes", [False, True])
def test_two_nodes_on_one_machine(variable_shapes):
    results = run_workers(4, bodies.two_nodes, variable_shapes)
    assert [right for right, _ in results] == [True] * 4
    assert [local for _, local in results] == [[True, False], [False, True]] * 2


def test_what_is_refused_and_growth():
    for logged in run_workers(2, bodies.reserve_cases):
        assert len(logged) == 3
        assert logged[0].startswith("NotSupportedError: a pipeline of one stage")
        assert "260 bytes is larger than the slots of 256 bytes" in logged[1]
        assert "11 dimensions" in logged[2]


def test_slots_without_room_leave_other_rooms_their_memory():
    for words, is_equal in run_workers(2, bodies.arena_after_slots_found_no_room):
        assert words.startswith("symmetric buffer 'pp/slots' of") and is_equal


def test_a_rank_that_alone_wants_larger_messages_is_told_so():
    outcomes = run_workers_once(2, bodies.reserve_alone, env={"DITRON_TIMEOUT_S": "2"})
    assert outcomes[0].value.startswith("MismatchError") and "rank 1: not heard" in outcomes[0].value
    assert outcomes[0].value == outcomes[1].value


def test_a_gpu_has_one_context_however_it_is_named():
    """Two would have the same slots and not the same flags."""
    assert run_workers(2, bodies.contexts_of_one_gpu) == [(["cuda:3"], 1)] * 2
