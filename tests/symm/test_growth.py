"""What agreements cost as groups grow: look-ups in the store, of each rank and of all together.

Ranks are threads of this process over one store in its memory; they run what processes run.
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from ditron_train.runtime.errors import PeerTimeoutError

module = importlib.import_module("ditron_train.symm.exchange")  # the package has a function of that name


class _Counted:
    """A store whose calls are counted, and the keys that they name."""

    def __init__(self, store: dist.Store, counts: Counter, lock: threading.Lock) -> None:
        self._store, self._counts, self._lock = store, counts, lock

    def __getattr__(self, name: str):
        method = getattr(self._store, name)

        def counted(*arguments):
            with self._lock:
                self._counts[name] += 1
                if isinstance(arguments[0], list):
                    self._counts["keys"] += len(arguments[0])
            return method(*arguments)

        return counted


def _run(world_size: int, absent: int | None = None) -> tuple[Counter, Counter, list[object]]:
    """Calls of the store for two exchanges, by all ranks: of a meeting's start, of the exchanges; and what ranks got.
    The rank ``absent`` does not come to the second."""
    store, lock, start, later = dist.HashStore(), threading.Lock(), Counter(), Counter()
    barrier = threading.Barrier(world_size)

    def rank_lives(rank: int) -> object:
        meeting = module._Meeting(_Counted(store, start, lock), rank, list(range(world_size)), "all")
        meeting.exchange("first")
        barrier.wait()
        meeting.store = _Counted(meeting.store._store, later, lock)
        if rank == absent:
            return None
        try:
            return meeting.exchange(rank)
        except PeerTimeoutError as error:
            return error.missing_rank

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(rank_lives, range(world_size)))
    return start, later, found


class _OfThread(threading.local):
    """What a process has heard, where ranks are threads."""

    def __init__(self) -> None:
        self.setdefault = {}.setdefault


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch):
    monkeypatch.setattr(module, "_heard", _OfThread())

    class Prefixed(_Counted):
        def __init__(self, prefix: str, store: _Counted) -> None:
            super().__init__(dist.PrefixStore.__new__(dist.PrefixStore), store._counts, store._lock)
            self._store = _prefix(prefix, store._store)

    _prefix = dist.PrefixStore
    monkeypatch.setattr(module.dist, "PrefixStore", Prefixed)


def test_an_exchange_costs_every_rank_the_same(monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.2)  # what is waited for is counted apart from what is done
    per_rank = {}
    for world_size in (8, 32, 128):
        start, later, found = _run(world_size)
        assert found == [list(range(world_size))] * world_size
        own = {name: count / world_size for name, count in (start + later).items() if name not in ("check", "keys")}
        per_rank[world_size] = sum(own.values())
        assert (start + later)["keys"] <= 40 * world_size
    assert per_rank[128] < 1.2 * per_rank[8]


def test_a_missing_rank_is_looked_for_once(monkeypatch):
    monkeypatch.setattr(module, "_LEAST_TIMEOUT_S", 1.0)
    monkeypatch.setenv("DITRON_TIMEOUT_S", "3")  # within 1 s a busy machine ran 127 of 128 threads
    keys = {}
    for world_size in (8, 32, 128):
        absent = world_size * 3 // 4
        _, later, found = _run(world_size, absent)
        assert [one for rank, one in enumerate(found) if rank != absent] == [absent] * (world_size - 1)
        keys[world_size] = later["keys"] / world_size  # 20 a second while the rank is waited for, then 2 W by one rank
    assert keys[128] < 2 * keys[8]
