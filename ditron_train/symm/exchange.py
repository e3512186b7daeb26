"""What the ranks of a group tell each other on the host, with a deadline.

Through the group's store, not its communicator: a rank that does not come, since it died or was given another group,
is named after the deadline, whereas a collective would hold the others until torch ends the process.

One store serves all ranks of a job, so who waits looks at one key: the *outcome* of an exchange. Each rank sets its
value and counts itself; the last to come reads all values and publishes them as the outcome; who gives up publishes
that. The store takes the first, so an exchange succeeds for all of its ranks or for none. With 256 clients of one
TCPStore, the last of them 3 s late, that is 16,000 keys looked up instead of 3,200,000 if each waits for all
values: 0.3 instead of 0.9 s of the store's time.

What is in the store is plain data: whoever can reach the store's port can write there, so nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_train.runtime.errors import ArenaError, DitronError, PeerTimeoutError
from ditron_train.runtime.flight_recorder import note_error, records_of
from ditron_train.runtime.groups import GroupCache, check_member, unwrapped
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.plain import from_plain, to_plain

_LEAST_TIMEOUT_S = 30.0  # whatever DITRON_TIMEOUT_S says: ranks come here from imports and compilation
_POLL_S = 0.001  # at first; twice as long each time, up to
_MOST_POLL_S = 0.05
_UNPUBLISHED_S = 1.0  # after which the others ask whether the rank that came last has died before it told them
_GRACE_S = 0.5  # in which a rank that gave up shows that it has come back in a new group

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _GivenUp:
    """The outcome if a rank did not come: who gave up, in which rendezvous of its, whom it missed, after how
    long."""

    rank: int
    rendezvous: str
    missing_rank: int
    timeout_s: float


#: Rendezvous of which this process has heard that they gave up, and its own rendezvous then.
_heard: dict[str, str] = {}


def _written_outcome(outcome: list[bytes] | _GivenUp) -> bytes:
    return to_plain(outcome if isinstance(outcome, list) else astuple(outcome))


def _read_outcome(content: bytes) -> list[bytes] | _GivenUp:
    outcome = from_plain(content)
    if isinstance(outcome, list) and all(isinstance(word, bytes) for word in outcome):
        return outcome
    if isinstance(outcome, tuple) and [type(part) for part in outcome] == [int, str, int, float]:
        return _GivenUp(*outcome)
    raise DitronError("an agreement of all ranks is unreadable: something else writes to this job's store")


class _Rendezvous:
    """The exchanges of one group: numbered, since all ranks make the same ones in the same order.

    A group that is made anew may get the name, and so the part of the store, of one that was destroyed. The store
    counts, for these members, the groups that have met: all were there, so all find the same count when the next is
    made. What was given up in a group that never met is told from what is given up in this one by the mark of the
    rank's rendezvous.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: list[int], name: str) -> None:
        members = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        self._members = dist.PrefixStore(f"ditron_train exchange {members}", store)
        self._rank, self._world_size = rank, len(ranks)
        self._num_before = int(self._members.compare_set("groups that met", "", "0"))
        self.store = dist.PrefixStore(str(self._num_before), self._members)
        self._name = name or f"of {self._world_size}"
        self._mark = secrets.token_hex(8)
        self.store.set(f"rendezvous of {self._rank}", self._mark)
        self._has_met = False
        self._number = 0
        self._number_left = -1  # the last exchange that this rank left by an error other than that a rank did not come

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> _Rendezvous:
        """The rendezvous of a group's ranks in its own part of the store."""
        store, ranks = distributed_c10d._get_process_group_store(group), dist.get_process_group_ranks(group)
        return cls(store, dist.get_rank(group), ranks, getattr(group, "group_name", ""))

    def exchange(self, value: object, turns: int = 1) -> list[Any]:
        """``value`` of every rank, by group rank; ``turns``: how many deadlines to wait."""
        word = to_plain(value)
        outcome = self._next_outcome(word, turns)
        while isinstance(outcome, _GivenUp):
            if not self._is_past(outcome):
                raise self._timeout(outcome)
            outcome = self._next_outcome(word, turns)
        self._has_met = True
        self._forget(self._number - 1)  # all have read it: they are here
        return [from_plain(word) for word in outcome]

    def abort_next_exchange(self) -> None:
        """Gives the next exchange up before anybody has to wait for this rank; nothing if the last one raised."""
        if self._number_left == self._number:
            return
        self._number += 1
        self._settle(_GivenUp(self._rank, self._mark, self._rank, 0.0))

    def _next_outcome(self, word: Any, turns: int) -> list[bytes] | _GivenUp:
        """Of the next exchange: what all ranks said, as it is in the store, or who gave up."""
        self._number += 1
        begun_s = time.monotonic()
        keys = [f"{self._number}/{rank}" for rank in range(self._world_size)]
        try:
            if not self._is_settled():  # else the others have given up
                self.store.set(keys[self._rank], word)
                if self.store.add(f"{self._number}/arrived", 1) >= self._world_size and self.store.check(keys):
                    return self._settle_with_all(keys)
            timeout_s = turns * max(get_settings().timeout_s, _LEAST_TIMEOUT_S)
            if self._wait(begun_s + timeout_s):
                return _read_outcome(self.store.get(f"{self._number}/outcome"))
            if not self._is_asker() and self._wait(time.monotonic() + _UNPUBLISHED_S):
                return _read_outcome(self.store.get(f"{self._number}/outcome"))
            missing = first_missing(self.store, keys)
            if missing is None:  # the last one is about to settle it, or has died before it could
                return self._settle_with_all(keys)
            return self._settle(_GivenUp(self._rank, self._mark, missing, timeout_s))
        except BaseException:
            # An interrupt: the others are neither to wait for this rank nor to take what it said for an answer.
            self._number_left = self._number
            with suppress(RuntimeError):
                self._settle(_GivenUp(self._rank, self._mark, self._rank, round(time.monotonic() - begun_s, 1)))
            raise

    def _is_asker(self) -> bool:
        """Whether this rank, the first whose deadline has passed, is to look for the one that is missing: all others
        would ask the store the same, within a moment."""
        asker: bytes = self.store.compare_set(f"{self._number}/asker", "", str(self._rank))
        return asker == str(self._rank).encode()

    def _is_settled(self) -> bool:
        return self.store.check([f"{self._number}/outcome"])

    def _wait(self, deadline_s: float) -> bool:
        """Until the outcome is there; False if it is not by the deadline, or all ranks have come and the last of
        them has not published it."""
        pause_s, asked_s = _POLL_S, time.monotonic()
        while not self._is_settled():  # not ``wait``: it would keep the store from the communicators' own threads
            now_s = time.monotonic()
            if now_s > deadline_s:
                return False
            if now_s > asked_s + _UNPUBLISHED_S:
                if self.store.add(f"{self._number}/arrived", 0) >= self._world_size:
                    return False
                asked_s = now_s
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_POLL_S)
        return True

    def _settle_with_all(self, keys: list[str]) -> list[bytes] | _GivenUp:
        if not self._has_met:  # before anybody can know it and make the next group
            self._members.set("groups that met", str(self._num_before + 1))
        return self._settle(self.store.multi_get(keys))

    def _settle(self, outcome: list[bytes] | _GivenUp) -> list[bytes] | _GivenUp:
        """Publishes the outcome unless there is one; returns the one that holds."""
        word: Any = _written_outcome(outcome)  # torch's stubs name text alone; bytes are taken, too
        return _read_outcome(self.store.compare_set(f"{self._number}/outcome", "", word))

    def _is_past(self, outcome: _GivenUp) -> bool:
        """Whether that was given up in a group before this one. Who was not in it waits a moment: the rank that gave
        up shows that it has left that group when it comes to this one."""
        if _heard.setdefault(outcome.rendezvous, self._mark) != self._mark:
            return True
        deadline_s = time.monotonic() + (0.0 if self._has_met else _GRACE_S)
        while self.store.get(f"rendezvous of {outcome.rank}").decode() == outcome.rendezvous:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _forget(self, number: int) -> None:
        self.store.delete_key(f"{number}/{self._rank}")
        if self._rank == 0:
            self.store.delete_key(f"{number}/arrived")
            self.store.delete_key(f"{number}/outcome")

    def _timeout(self, outcome: _GivenUp) -> PeerTimeoutError:
        waiting_rank = self._rank if outcome.rank == outcome.missing_rank else outcome.rank
        return PeerTimeoutError(
            op="an agreement of all ranks",
            group=self._name,
            waiting_rank=waiting_rank,
            missing_rank=outcome.missing_rank,
            chunk=-1,
            expected_epoch=self._number,
            seen_epoch=self._number - 1,
            timeout_s=outcome.timeout_s,
        )


def first_missing(store: dist.Store, keys: list[str]) -> int | None:
    """Which of ``keys`` is the first that is not there, or None; each look-up halves what is left."""
    if not keys or store.check(keys):
        return None
    low, high = 0, len(keys)  # all before `low` are there, one before `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if store.check(keys[low:middle]) else (low, middle)
    return low


_rendezvous_of_groups: GroupCache[dist.ProcessGroup, _Rendezvous] = GroupCache()


def exchange(group: dist.ProcessGroup, value: object, turns: int = 1) -> list[Any]:
    """Returns ``value`` of every rank, by group rank (collective, host side, blocking).

    Args:
        group: Whose ranks.
        value: Plain data, as ``symm.plain`` has it.
        turns: How many deadlines to wait, if ranks come one behind the other; the same on every rank.

    Raises:
        DitronError: What is in the store was written by somebody else.
        PeerTimeoutError: A rank did not arrive within ``turns`` times ``DITRON_TIMEOUT_S``, 30 s each at least; also
        on
            that rank, if it comes later.
    """
    rendezvous, group = _rendezvous_of(group), unwrapped(group)
    try:
        return rendezvous.exchange(value, turns)
    except PeerTimeoutError as error:
        note_error(error, group.group_name)
        raise


def abort_next_exchange(group: dist.ProcessGroup) -> None:
    """Stands for the group's next exchange on a rank that will not come to it: the others raise ``PeerTimeoutError``
    there at once, not at their deadline, and the exchange behind it is everybody's again. A rank calls it that failed
    by itself between two exchanges, or all ranks do that failed alike. If an exchange raised on this rank since, by
    the store, the others have heard of that one: nothing is done."""
    _rendezvous_of(group).abort_next_exchange()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The group's own part of its store, once its ranks have exchanged something: nothing in it is of a destroyed
    group that had its name."""
    return dist.PrefixStore("others", _rendezvous_of(group).store)


def _rendezvous_of(group: dist.ProcessGroup) -> _Rendezvous:
    group = unwrapped(group)
    if group not in _rendezvous_of_groups:
        check_member(group)
        # Opens this rank's file: a rank that dies from here on has left one, and what the others raise is in theirs.
        records_of(group.group_name, dist.get_process_group_ranks(group))
        _rendezvous_of_groups[group] = _Rendezvous.of(group)
    return _rendezvous_of_groups[group]


def on_all_ranks(
    group: dist.ProcessGroup,
    what: str,
    step: Callable[[], _Result],
    errors: tuple[type[Exception], ...] = (Exception,),
) -> _Result:
    """``step()``, behind which every rank knows that all ranks have done it (collective).

    Args:
        group: Whose ranks.
        what: The step in words.
        step: What each rank does by itself.
        errors: What says that it failed; anything else is a mistake in this package, and the peers raise
            ``PeerTimeoutError``.

    Raises:
        ArenaError: It failed on a rank; the same on every rank.
        PeerTimeoutError: A rank did not arrive, to this or to what ``step`` exchanges.
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
