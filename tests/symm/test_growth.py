"""What agreements cost as groups grow: look-ups in the store, of each rank and of all together.

Ranks are threads of this process over one store in its memory; they run what processes run.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ditron_train.runtime.errors import PeerTimeoutError

module = importlib.import_module("ditron_train.symm.exchange")  # the package has a function of that name


class _Clock:
    """A clock that stands still, whatever the machine does meanwhile, until it is set past every deadline."""

    def __init__(self) -> None:
        self.ticks: Iterator[int] = itertools.count()
        self.set_s = 0.0

    def monotonic(self) -> float:
        return self.set_s + next(self.ticks) * 1e-6  # it is later each time it is read


class _Counted:
    """A store whose calls are counted, and the keys that they look up, but for the outcome that all wait for."""

    def __init__(self, store: dist.Store, counts: Counter, lock: threading.Lock) -> None:
        self._store, self._counts, self._lock = store, counts, lock

    def __getattr__(self, name: str):
        method = getattr(self._store, name)

        def counted(*arguments):
            with self._lock:
                self._counts[name] += 1
                if isinstance(arguments[0], list):
                    self._counts["keys"] += sum(not key.endswith("/outcome") for key in arguments[0])
            return method(*arguments)

        return counted


def _run(clock: _Clock, world_size: int, absent: int | None = None) -> tuple[Counter, Counter, list[object]]:
    """Calls of the store for two exchanges, by all ranks: of a rendezvous' start, of the exchanges; and what ranks
    got. The rank ``absent`` does not come to the second, and the deadline passes once all others have."""
    clock.set_s = 0.0
    store, lock, start, later = dist.HashStore(), threading.Lock(), Counter(), Counter()
    barrier = threading.Barrier(world_size)

    def rank_lives(rank: int) -> object:
        rendezvous = module._Rendezvous(_Counted(store, start, lock), rank, list(range(world_size)), "all")
        rendezvous.exchange("first")
        barrier.wait()
        rendezvous.store = _Counted(rendezvous.store._store, later, lock)
        if rank == absent:
            limit_s = time.monotonic() + 100
            while later["add"] < world_size - 1 and time.monotonic() < limit_s:
                time.sleep(0.01)
            clock.set_s = 1e6
            return None
        try:
            return rendezvous.exchange(rank)
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
def clock(monkeypatch) -> _Clock:
    """Ranks are threads, and their time is this clock's."""
    monkeypatch.setattr(module, "_heard", _OfThread())
    clock = _Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep))

    class Prefixed(_Counted):
        def __init__(self, prefix: str, store: _Counted) -> None:
            super().__init__(dist.PrefixStore.__new__(dist.PrefixStore), store._counts, store._lock)
            self._store = _prefix(prefix, store._store)

    _prefix = dist.PrefixStore
    monkeypatch.setattr(module.dist, "PrefixStore", Prefixed)
    return clock


def test_an_exchange_costs_every_rank_the_same(clock):
    per_rank = {}
    for world_size in (8, 32, 128):
        start, later, found = _run(clock, world_size)
        assert found == [list(range(world_size))] * world_size
        own = {name: count / world_size for name, count in (start + later).items() if name not in ("check", "keys")}
        per_rank[world_size] = sum(own.values())
        assert (start + later)["keys"] == 2 * 2 * world_size  # the last rank's of each exchange: all there, all values
    assert per_rank[128] < 1.2 * per_rank[8]


@pytest.mark.parametrize("world_size", [8, 32, 128])
def test_a_missing_rank_is_looked_for_once(clock, world_size):
    absent = world_size * 3 // 4
    _, later, found = _run(clock, world_size, absent)
    assert [one for rank, one in enumerate(found) if rank != absent] == [absent] * (world_size - 1)
    assert world_size <= later["keys"] <= 2 * world_size  # by one rank, in halves
