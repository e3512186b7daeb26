"""A job of some ranks in which one thing goes wrong, event by event, and the records that its ranks leave.

Ranks make the same calls on their groups, row by row and column by column of a grid. A call ends for a rank once all
ranks of the group have made it. Who waits longer than the deadline raises, and names a rank that it missed; a call of
other words raises on all of its ranks; a launcher may end the rest once one rank has ended badly.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

from ditron_train.tools.postmortem.files import Call, Group, RankFile

FAULTS = ("late", "killed between calls", "killed in a call", "raises", "skips", "calls another op", "exits")
TIMEOUT_S = 5.0
_STEPS = 8


@dataclass
class _Rank:
    """One rank: what it has still to call, what it has called, and how it ended."""

    number: int
    todo: list[tuple[Group, str]]
    calls: list[Call] = field(default_factory=list)
    state: str = "running"
    error: dict[str, Any] | None = None
    alive: bool = True
    waits_in: tuple[Group, int] | None = None


class Job:
    """A grid of ``rows`` x ``columns`` ranks, one of which is ``guilty`` of ``fault``.

    Args:
        seed: Of everything that is left to chance.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fault = FAULTS[seed % len(FAULTS)]
        rows, columns = self.random.choice(((1, 3), (1, 4), (2, 3), (3, 3), (2, 4), (3, 2)))
        self.world_size = rows * columns
        self.guilty = self.random.randrange(self.world_size)
        self._groups = [
            Group(f"row {row}", tuple(range(row * columns, (row + 1) * columns))) for row in range(rows)
        ] + [Group(f"column {column}", tuple(range(column, self.world_size, columns))) for column in range(columns)]
        self._alike = self.random.random() < 0.5  # all calls of a group have the same words
        self._ring = self.random.random() < 0.5  # data goes from rank to rank: the one before is missed, not the dead
        kills = self.random.random() < 0.5 and not (self._ring and self.fault == "killed in a call")
        self._launcher_s = self.random.uniform(0.0, TIMEOUT_S) if kills else None
        self._ranks = [_Rank(number, self._calls_of(number)) for number in range(self.world_size)]
        self._fault_at = self.random.randrange(3, len(self._ranks[0].todo) - 1)
        self._met: dict[tuple[Group, int], dict[int, str]] = {}
        self._died_inside: set[tuple[Group, int]] = set()
        self._events: list[tuple[float, int, str, int, Any]] = []

    def _calls_of(self, rank: int) -> list[tuple[Group, str]]:
        row, column = (
            next(g for g in self._groups if g.name.startswith(w) and rank in g.ranks) for w in ("row", "col")
        )
        names = ("gather", "gather", "sum") if self._alike else ("gather", "scatter", "sum")
        return [
            (group, names[i])
            for _ in range(_STEPS)
            for i, group in enumerate((row, row, column if len(column.ranks) > 1 else row))
        ]

    def run(self) -> list[RankFile]:
        """What every rank leaves once all of them have ended, or can go no further."""
        for rank in self._ranks:
            self._go_on(rank, 0.0)
        while self._events:
            time_s, _, what, number, about = heapq.heappop(self._events)
            if self._ranks[number].alive:
                getattr(self, f"_{what}")(self._ranks[number], time_s, about)
        return [
            RankFile(rank.number, self.world_size, "host", 1, rank.state, rank.error, tuple(rank.calls),
                     tuple(group for group in self._groups if rank.number in group.ranks))
            for rank in self._ranks
        ]  # fmt: skip

    def _later(self, time_s: float, what: str, rank: _Rank, about: Any = None) -> None:
        heapq.heappush(
            self._events, (time_s, len(self._events) + self.random.getrandbits(30), what, rank.number, about)
        )

    def _go_on(self, rank: _Rank, time_s: float) -> None:
        rank.waits_in = None
        if not rank.todo:
            rank.state, rank.alive = "ended", False
            return
        self._later(time_s + self.random.uniform(0.01, 0.1), "next", rank)

    def _next(self, rank: _Rank, time_s: float, about: Any) -> None:
        """The rank comes to its next call, or does what it is guilty of."""
        place = 3 * _STEPS - len(rank.todo)
        if rank.number == self.guilty and place == self._fault_at:
            self._fault_at = -1
            if self.fault == "killed in a call":
                rank.alive = False
            if self.fault == "late":
                self._later(time_s + self.random.uniform(1.2, 3.0) * TIMEOUT_S, "next", rank)
                return
            if self.fault in ("killed between calls", "raises", "exits"):
                rank.alive = False
                rank.state = {"raises": "raised", "exits": "ended"}.get(self.fault, "running")
                if self.fault == "raises":
                    self._raise(rank, time_s, "ValueError", None, None)
                return
            if self.fault == "skips":
                rank.todo.pop(0)
            elif self.fault == "calls another op":
                rank.todo[0] = (rank.todo[0][0], "something else")
        self._make(rank, time_s)

    def _make(self, rank: _Rank, time_s: float) -> None:
        """The rank makes its next call; who makes it last lets all of them go on."""
        group, text = rank.todo.pop(0)
        number = 1 + sum(call.group == group for call in rank.calls)
        rank.calls.append(Call(group, number, int(time_s * 1e9), True, text))
        call = rank.waits_in = (group, number)
        met = self._met.setdefault(call, {})
        met[rank.number] = text
        if not rank.alive:
            self._died_inside.add(call)
        self._later(time_s + TIMEOUT_S, "abort", rank, call)
        waiting = [self._ranks[member] for member in group.ranks if self._ranks[member].waits_in == call]
        for member in waiting if len(met) == len(group.ranks) else ():
            if member.alive and len(set(met.values())) > 1:
                self._raise(member, time_s, "MismatchError", group, None)
            elif member.alive and call not in self._died_inside:
                self._go_on(member, time_s)

    def _abort(self, rank: _Rank, time_s: float, call: tuple[Group, int]) -> None:
        if rank.waits_in != call:
            return
        group = call[0]
        missing = [number for number in group.ranks if number not in self._met[call]]
        if not missing:  # all have begun: data is what does not come
            before = group.ranks[group.ranks.index(rank.number) - 1]
            missing = [before if self._ring else self.guilty]
        self._raise(rank, time_s, "PeerTimeoutError", group, group.ranks.index(missing[0]))

    def _raise(self, rank: _Rank, time_s: float, kind: str, group: Group | None, missing: int | None) -> None:
        rank.alive, rank.state = False, "raised"
        rank.error = {
            "kind": kind, "text": f"{kind} of rank {rank.number}" if group is None else "its words",
            "time_ns": int(time_s * 1e9), "group": group and group.name, "missing_rank": missing,
            "waited_s": None if missing is None else TIMEOUT_S,
        }  # fmt: skip
        if self._launcher_s is not None:
            for other in self._ranks:
                self._later(time_s + self._launcher_s, "end", other)

    def _end(self, rank: _Rank, time_s: float, about: Any) -> None:
        rank.alive = False
