"""Rendezvous of ranks that have been through different ones before (torch numbers what it exchanges by process)."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import bodies_rendezvous as bodies  # noqa: E402

from ditron_train.symm.rendezvous import RenumberedStore  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402


def test_overlapping_groups_meet():
    results = run_workers(3, bodies.overlapping_groups)
    for rank, found in enumerate(results):
        for name, ranks, times in (("low", (0, 1), 2), ("high", (1, 2), 1), ("all", (0, 1, 2), 1)):
            expected = [[100 * turn + peer for peer in ranks] for turn in range(3) for _ in range(times)]
            assert found[name] == (expected if rank in ranks else [])
    assert [found["aliases"] for found in results] == [2, 3, 2]


def test_ranks_in_step_take_torchs_own_way():
    assert run_workers(2, bodies.ranks_in_step_take_torchs_own_way) == [0, 0]


def test_the_stand_in_for_torch_shows_the_fault():
    assert all("Error" in words for (words,) in run_workers(2, bodies.stand_in_shows_the_fault))


def test_after_one_that_failed_there_is_no_other_to_hang_in():
    results = run_workers(4, bodies.a_rendezvous_fails)
    assert [num_met for _, num_met in results] == [1] * 4
    first = {words[0] for words, _ in results}
    assert first == {
        "reaching the peers' symmetric memory failed on 1 of 4 ranks: rank 2: RuntimeError: no way to rank 0"
    }
    again = (
        "allocating 512 bytes of symmetric memory failed on {0} of {0} ranks: rank 0: RuntimeError: not again after "
        "reaching"
    )
    low, both, *high = (words[1:] for words, _ in results)
    assert low == both[:1] and low[0].startswith(again.format(2))
    assert [both[1:]] * 2 == high and both[1].startswith(again.format(3))


def test_a_renumbered_store_serves_c_plus_plus():
    """Two ranks whose counters differ by five, through a C++ store above and one below."""
    shared, done = dist.HashStore(), []

    def one_rank(rank: int, number: int) -> None:
        renumbered = RenumberedStore(shared)  # C++ would not keep its methods alive
        store = dist.PrefixStore("word", renumbered)
        for step in range(3):
            store.set(f"{number}/{rank}", bytes([rank, step, 0, 255]))
            assert store.multi_get([f"{number}/0", f"{number}/1"]) == [bytes([peer, step, 0, 255]) for peer in (0, 1)]
            bodies.barrier(store, str(number + 1), 2)
            store.wait([f"{number}/{1 - rank}"], timedelta(seconds=20))
            assert store.get(f"{number}/{1 - rank}")[0] == 1 - rank and store.check([f"{number}/0"])
            number += 2
        done.append(rank)

    threads = [threading.Thread(target=one_rank, args=arguments, daemon=True) for arguments in ((0, 7), (1, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == [0, 1]


def test_other_keys_stay_as_they_are():
    below = dist.HashStore()
    store = RenumberedStore(below)
    store.set("name", b"1")
    store.set("word/41/x", b"2")
    store.set("word/40", b"3")
    assert store.add("count/9", 2) == 2 and store.add("count/9", 3) == 5
    assert [below.get(key) for key in ("name", "word/0/x", "word/1", "count/2")] == [b"1", b"2", b"3", b"5"]
