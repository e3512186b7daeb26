"""What ranks tell each other on the host: by group rank, with a deadline, nothing left behind."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bodies_exchange as bodies  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402


def test_groups_that_overlap_exchange_in_sequence_and_leave_the_last_values() -> None:
    for rank, (logged, left) in enumerate(run_workers(3, bodies.overlapping_groups_in_sequence)):
        lists = [ranks for ranks in ([0, 1, 2], [0, 1], [1, 2]) if rank in ranks]
        assert logged == [[(9, member) for member in ranks] for ranks in lists]
        assert left == ["10/0", "10/1", "10/2", "10/arrived", "10/outcome"]


def test_a_rank_that_does_not_come_is_named() -> None:
    first, second, absent = run_workers(3, bodies.a_rank_does_not_come)
    assert first == second and first[0] == 2 and absent is None, "the same words, whoever gave up first"
    assert re.search("an agreement of all ranks on group .*: rank [01] waited 1 s for rank 2", first[1])


def test_who_is_asked_to_wait_several_deadlines_does() -> None:
    first, second, absent = run_workers(3, bodies.a_rank_does_not_come_in_three_turns)
    assert first == second and first[0] == 2 and absent is None
    assert re.search("rank [01] waited 1.5 s for rank 2", first[1])


def test_who_comes_too_late_hears_that_the_others_have_given_up() -> None:
    *waited, late = run_workers(3, bodies.a_rank_comes_too_late)
    logged = [f"rank {rank}" for rank in range(3)]
    assert [(missing, words) for missing, *_, words in (*waited, late)] == [(2, logged)] * 3
    assert late[1] - late[2] < 3.0 <= min(seconds for _, seconds, *_ in waited)


def test_a_step_that_waits_for_its_peers_waits_once() -> None:
    *present, absent = run_workers(3, bodies.a_step_that_meets_nobody)
    assert absent is None
    assert all(missing == 2 and 2.5 <= seconds and seconds - late_s < 5.0 for missing, seconds, late_s in present)


def test_groups_of_different_sizes_end_in_an_error_on_every_rank() -> None:
    answers = run_workers(3, bodies.groups_of_different_sizes)
    assert [missing for missing, _ in answers] == [1, 0, 0]
    assert all("never called this op" in words for _, words in answers)


def test_a_group_made_anew_does_not_hear_the_old_ones_words() -> None:
    assert run_workers(2, bodies.groups_of_one_name) == [[["old", "old"], ["new", "new"]]] * 2


def test_a_group_made_anew_of_other_ranks_does_not_hear_the_old_ones_words() -> None:
    old, new = ["old"] * 2, ["new"] * 3
    assert run_workers(3, bodies.groups_of_one_name_and_other_ranks) == [[old, new], [old, new], [new]]


def test_a_group_made_anew_meets_though_one_of_its_ranks_never_came_to_the_old_one() -> None:
    for rank, (words, logged) in enumerate(run_workers(3, bodies.a_group_that_never_met)):
        assert logged == [["new"] * 3, ["newer"] * 3]
        assert len(words) == (0 if rank == 2 else 2) and all("waited 1 s for rank 2" in text for text in words)


def test_who_leaves_an_exchange_takes_nobody_in() -> None:
    interrupted, *others = run_workers(3, bodies.a_rank_is_interrupted)
    assert interrupted[0].startswith("KeyboardInterrupt")
    assert all(words == "PeerTimeoutError 0" and seconds < 25 for words, seconds, _ in others)
    assert all(logged == [f"rank {rank}" for rank in range(3)] for _, _, logged in (interrupted, *others))


def test_a_rank_that_stays_away_is_not_waited_for() -> None:
    first, absent, third = run_workers(3, bodies.a_rank_stays_away)
    assert absent[0] == "no error"
    assert all(words == "PeerTimeoutError 1" and seconds < 25 for words, seconds, _ in (first, third))
    assert all(logged == [f"rank {rank}" for rank in range(3)] for _, _, logged in (first, absent, third))


def test_ranks_that_have_all_come_meet_though_the_last_is_slow_to_say_so() -> None:
    assert run_workers(3, bodies.the_last_is_slow_to_publish) == [(["first"] * 3, ["second"] * 3)] * 3


def test_an_exchange_that_one_rank_has_given_up_fails_on_all() -> None:
    words = run_workers(3, bodies.one_gives_up_when_the_last_comes)
    assert len(set(words)) == 1 and re.search("rank 0 waited .* for rank 2", words[0])


def test_a_waiting_rank_looks_at_one_key() -> None:
    (checks, keys), *_ = run_workers(4, bodies.keys_that_a_waiting_rank_looks_up)
    assert checks == keys > 3


def test_over_the_store_that_torchrun_serves() -> None:
    results = run_workers(4, bodies.over_a_tcp_store)
    assert all(all(right) and logged == [f"rank {rank}" for rank in range(4)] for right, _, logged in results)
    assert len({words for _, words, _ in results}) == 1 and "waited 1 s for rank 3" in results[0][1]
