"""What the ranks of a group tell each other on the host, with a deadline.

Through the group's store, not its communicator: a rank that does not come, since it died or was given another group, is named
after the deadline, where a collective would hold the others until torch ends the process.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_train.runtime.errors import ArenaError, PeerTimeoutError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.settings import get_settings

__all__ = ["exchange", "on_all_ranks", "store_of"]

_LEAST_TIMEOUT_S = 30.0  # whatever DITRON_TIMEOUT_S says: ranks come here from imports and compilation
_POLL_S = 0.001  # at first; twice as long each time, up to
_MOST_POLL_S = 0.05  # one store serves all ranks of a job

_Result = TypeVar("_Result")


class _Meeting:
    """The exchanges of one group: numbered, since all ranks make the same ones in the same order.

    A group that is made anew may get the name, and so the part of the store, of one that was destroyed: each rank counts in the
    store how many there have been of these members, all of whom have been in each.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        members = hashlib.sha256(str(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]
        store = dist.PrefixStore(f"ditron_train exchange {members}", distributed_c10d._get_process_group_store(group))
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self.store = dist.PrefixStore(str(store.add(f"groups of rank {self._rank}", 1)), store)
        self._name = getattr(group, "group_name", "") or f"of {self._world_size}"
        self._number = 0

    def exchange(self, value: object) -> list[Any]:
        self._number += 1
        keys = [f"{self._number}/{rank}" for rank in range(self._world_size)]
        self.store.set(keys[self._rank], pickle.dumps(value))
        self._wait(keys, f"{self._number}/given up")
        values = [pickle.loads(word) for word in self.store.multi_get(keys)]
        self.store.delete_key(f"{self._number - 1}/{self._rank}")  # all have read it: they are here
        return values

    def _wait(self, keys: list[str], given_up: str) -> None:
        """Until all ``keys`` are there; who comes when others have given up hears it, and so counts as they do."""
        timeout_s = max(get_settings().timeout_s, _LEAST_TIMEOUT_S)
        deadline_s, pause_s = time.monotonic() + timeout_s, _POLL_S
        while not self.store.check(keys):  # not ``wait``: it would keep the store from the communicators' own threads
            if time.monotonic() > deadline_s:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                if missing:
                    self.store.set(given_up, pickle.dumps((self._rank, missing[0], timeout_s)))
                    raise self._timeout(self._rank, missing[0], timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_POLL_S)
        if self.store.check([given_up]):
            raise self._timeout(*pickle.loads(self.store.get(given_up)))

    def _timeout(self, waiting_rank: int, missing_rank: int, timeout_s: float) -> PeerTimeoutError:
        return PeerTimeoutError(
            op="an agreement of all ranks", group=self._name, waiting_rank=waiting_rank, missing_rank=missing_rank,
            chunk=-1, expected_epoch=self._number, seen_epoch=self._number - 1, timeout_s=timeout_s,
        )  # fmt: skip


_meetings: GroupCache[dist.ProcessGroup, _Meeting] = GroupCache()


def exchange(group: dist.ProcessGroup, value: object) -> list[Any]:
    """Returns ``value`` of every rank, by group rank (collective, host side, blocking).

    Raises:
        PeerTimeoutError: A rank did not come within ``DITRON_TIMEOUT_S``, 30 s at least; also on that rank, where it comes later.
    """
    return _meeting_of(group).exchange(value)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The group's own part of its store: nothing in it is of a destroyed group that had its name. All ranks ask for it."""
    return dist.PrefixStore("others", _meeting_of(group).store)


def _meeting_of(group: dist.ProcessGroup) -> _Meeting:
    if group not in _meetings:
        _meetings[group] = _Meeting(group)
    return _meetings[group]


def on_all_ranks(
    group: dist.ProcessGroup, what: str, step: Callable[[], _Result], errors: tuple[type[Exception], ...] = (Exception,)
) -> _Result:
    """``step()``, behind which every rank knows that all ranks have done it (collective).

    Args:
        group: Whose ranks.
        what: The step in words.
        step: What each rank does by itself.
        errors: What says that it failed; anything else is a mistake of ours, and the peers raise ``PeerTimeoutError``.

    Raises:
        ArenaError: It failed on a rank; the same on every rank.
        PeerTimeoutError: A rank did not come, to this or to what ``step`` exchanges.
    """
    text, result = None, None
    try:
        result = step()
    except PeerTimeoutError:  # it met the group itself: nobody would come to hear of it
        raise
    except errors as failure:
        text = f"{type(failure).__name__}: {failure}"
    texts = exchange(group, text)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failed:
        raise ArenaError(f"{what} failed on {len(failed)} of {len(texts)} ranks: " + "; ".join(failed))
    return cast(_Result, result)
