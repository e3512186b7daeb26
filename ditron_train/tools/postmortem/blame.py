"""Tells the ranks that are at fault from those that only suffered: by what each of them raised, and when.

A rank that gave up waiting makes no further call, and a rank that waits for another one comes to nothing else. Neither
is to blame for the calls that it did not make. The first wait that anybody gave up leads to the rank that is, from one
waiting rank to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ditron_train.runtime.flight_recorder import CAPACITY
from ditron_train.tools.postmortem.files import Call, Group, RankFile

_TOLD_BY_PEERS = ("MismatchError", "DistBackendError", "DistNetworkError", "DistStoreError")
_WORDS_OF_PEERS = (
    "closed by peer", "reset by peer", "Broken pipe", "NCCL error", "[gloo]", "gloo/transport", "pair closure",
)  # fmt: skip

Files = dict[int, RankFile]


@dataclass(frozen=True)
class Wait:
    """A wait that a rank gave up.

    Attributes:
        rank, missing: Global ranks: who waited, for whom.
        group: In a call on which group.
        time_ns, began_ns: When it gave up, and when the wait had begun.
    """

    rank: int
    missing: int
    group: Group
    time_ns: int
    began_ns: int


def calls_on(group: Group, files: Files) -> dict[int, dict[int, Call]]:
    """The calls that can be compared, by rank and number; without ranks whose ring holds other groups' calls alone."""
    calls = {
        rank: {call.number: call for call in file.calls if call.group == group and call.compared}
        for rank in group.ranks
        if (file := files.get(rank)) is not None
    }
    return {rank: made for rank, made in calls.items() if made or len(files[rank].calls) < CAPACITY}


def waits_given_up(files: Sequence[RankFile]) -> list[Wait]:
    """Of all ranks, the first one first."""
    return sorted((wait for file in files if (wait := _wait_of(file))), key=lambda wait: wait.time_ns)


def _wait_of(file: RankFile) -> Wait | None:
    error = file.error
    if error is None or error["missing_rank"] is None:
        return None
    named = [group for group in file.groups if group.name == error["group"]]
    if file.calls and file.calls[-1].group in named:
        named.append(file.calls[-1].group)
    if not named or error["missing_rank"] >= len(named[-1].ranks):  # the last group that bore the name
        return None
    waited_ns = int((error.get("waited_s") or 0) * 1e9)
    missing = named[-1].ranks[error["missing_rank"]]
    return Wait(file.rank, missing, named[-1], error["time_ns"], error["time_ns"] - waited_ns)


def first_own_errors(files: Sequence[RankFile]) -> list[RankFile]:
    """The ranks that raised first what no peer caused, all of them if they say the same; empty if none did."""
    own = [(file, file.error) for file in files if file.error is not None and _has_own_error(file)]
    if not own:
        return []
    first = min((error for _, error in own), key=lambda error: error["time_ns"])
    return [file for file, error in own if (error["kind"], error["text"]) == (first["kind"], first["text"])]


def _has_own_error(file: RankFile) -> bool:
    error = file.error
    return (
        error is not None
        and error["missing_rank"] is None
        and error["kind"] not in _TOLD_BY_PEERS
        and not any(words in error["text"] for words in _WORDS_OF_PEERS)
    )


def is_excused(file: RankFile) -> bool:
    """Whether the rank could not go on for what a peer did or left out."""
    if file.error is None or _has_own_error(file):
        return False
    wait = _wait_of(file)
    return wait is None or wait.missing != file.rank  # a rank that came too late is told that it was missed


def was_held_up(file: RankFile, by_ns: int) -> bool:
    """Whether the rank was, at that time, in a collective that is not fused and never came out of it: it made no call
    after that, and what it raised says that a peer failed, not which."""
    return _is_told_by_peers(file) and not any(call.time_ns > by_ns for call in file.calls)


def _is_told_by_peers(file: RankFile) -> bool:
    return file.error is not None and file.error["missing_rank"] is None and not _has_own_error(file)


def stuck_in(rank: int, files: Files) -> tuple[Call, tuple[int, ...]] | None:
    """The last call of a rank that left no word, and who never came to it; None if all came."""
    file = files.get(rank)
    if file is None or file.state != "running" or not file.calls or not file.calls[-1].compared:
        return None
    call = file.calls[-1]
    absent = tuple(peer for peer, made in calls_on(call.group, files).items() if max(made, default=0) < call.number)
    return (call, absent) if absent else None


def root_of(wait: Wait, files: Files) -> int:
    """The rank at the end of the chain of waits that had begun when ``wait`` was given up."""
    seen = {wait.rank}
    rank = wait.missing
    while rank not in seen:
        seen.add(rank)
        following = next((peer for peer in _waited_for(rank, wait.time_ns, files) if peer not in seen), None)
        if following is None:
            return rank
        rank = following
    return wait.missing


def _waited_for(rank: int, by_ns: int, files: Files) -> Iterator[int]:
    """For whom a rank was waiting at that time."""
    file = files.get(rank)
    if file is None:
        return
    wait = _wait_of(file)
    if wait is not None and wait.began_ns < by_ns:
        yield wait.missing
    if file.state == "running" or _is_told_by_peers(file):  # it did not say for whom
        yield from _not_come_to_the_call_of(file, by_ns, files)


def _not_come_to_the_call_of(file: RankFile, by_ns: int, files: Files) -> Iterator[int]:
    """Who had not come, at that time, to the call that the rank was in."""
    made = [call for call in file.calls if call.time_ns < by_ns]
    if not made or not made[-1].compared:
        return
    for peer, calls in calls_on(made[-1].group, files).items():
        if max((number for number, call in calls.items() if call.time_ns < by_ns), default=0) < made[-1].number:
            yield peer
