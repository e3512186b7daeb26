"""Finds the rank that first went another way than its group, from the last calls and the errors of every rank.

Ranks of a group make the same calls in the same order, so calls are compared by their number on the group. A rank
*differs* if its call of a number is another one than the others'; it is *behind* if it never made a call that
others made, though nothing kept it from that (``postmortem.blame``). A difference that is older than every error is
what the errors came from. Else the first error tells: one that no peer caused is its rank's own, and the first wait
that was given up leads to the rank that was missing. Last come calls without errors, and a rank that ended without a
word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ditron_train.tools.postmortem.blame import (
    Wait,
    calls_on,
    first_own_errors,
    is_excused,
    root_of,
    stuck_in,
    waits_given_up,
    was_held_up,
)
from ditron_train.tools.postmortem.files import Call, Group, RankFile


@dataclass(frozen=True)
class Divergence:
    """Who went another way, where.

    Attributes:
        kind: ``differs`` (another call), ``behind`` (no call), ``raised`` (an error that no peer caused), ``missing``
            (others waited for it), ``silent`` (it ended without a word).
        ranks: Global ranks, all of them if nobody can say which of them is right.
        group: The group in question; None for ``raised`` and ``silent``.
        number: Of the call on the group, if calls tell.
        time_ns: When the first rank made that call, or raised.
        calls: By rank what each called there, None if it did not; empty if calls do not tell.
        text: One sentence.
    """

    kind: Literal["differs", "behind", "raised", "missing", "silent"]
    ranks: tuple[int, ...]
    group: Group | None
    number: int | None
    time_ns: int
    calls: dict[int, str | None]
    text: str


def find_divergence(files: Sequence[RankFile]) -> Divergence | None:
    """The first divergence, or None if all ranks ended alike."""
    by_rank = {file.rank: file for file in files}
    groups = sorted({group for file in files for group in file.groups})
    differing = _first(_differing(group, by_rank) for group in groups)
    own = _raised(first_own_errors(files))
    waits = waits_given_up(files)
    raised_ns = min([place.time_ns for place in (own, *waits[:1]) if place is not None], default=None)
    if differing is not None and (raised_ns is None or differing.time_ns <= raised_ns):
        return differing
    if own is not None and own.time_ns == raised_ns:
        return own
    behind = list(_behind(groups, by_rank))
    if waits:
        return _missing(waits[0], by_rank, behind)
    return _first(behind) or differing or _by_silence(files)


def _first(places: Iterable[Divergence | None]) -> Divergence | None:
    return min((place for place in places if place is not None), key=lambda place: place.time_ns, default=None)


def _differing(group: Group, files: dict[int, RankFile]) -> Divergence | None:
    """Where the ranks' calls first differ."""
    calls = calls_on(group, files)
    if not any(calls.values()):
        return None
    min_rows = min(max(made, default=0) for made in calls.values())
    oldest = max(min(made, default=1) for made in calls.values())  # before it, some rank's ring has forgotten
    for number in range(oldest, min_rows + 1):
        texts = {rank: made[number].text for rank, made in calls.items() if number in made}
        if len(set(texts.values())) > 1:
            return _differs(group, number, texts, calls)
    return None


def _differs(group: Group, number: int, texts: dict[int, str], calls: dict[int, dict[int, Call]]) -> Divergence:
    counts = Counter(texts.values())
    (usual, most), *others = counts.most_common()
    tied = bool(others) and others[0][1] == most
    ranks = tuple(sorted(rank for rank, text in texts.items() if tied or text != usual))
    time_ns = min(made[number].time_ns for made in calls.values() if number in made)
    gathered = "; ".join(f"{_names([r for r in texts if texts[r] == text])}: {text}" for text in counts)
    who = f"{_names(ranks)} differ from each other" if tied else f"{_names(ranks)} went another way"
    return Divergence(
        "differs", ranks, group, number, time_ns, dict(texts), f"{who} at call {number} of {_title(group)}: {gathered}"
    )


def _behind(groups: Sequence[Group], files: dict[int, RankFile]) -> Iterator[Divergence]:
    """Of each group the first call that a rank never made, which others made.

    Not for ranks that hang in a call of another group, unless there are no others: each waits for another one then.
    """
    lagging = {}
    for group in groups:
        calls = calls_on(group, files)
        last = {rank: max(made, default=0) for rank, made in calls.items()}
        late = [rank for rank, count in last.items() if count < max(last.values()) and not is_excused(files[rank])]
        if late:
            lagging[group] = (calls, last, late)
    free = {group: [rank for rank in late if not _hangs_elsewhere(rank, group, files)]
            for group, (_, _, late) in lagging.items()}  # fmt: skip
    for group, (calls, last, late) in lagging.items():
        guilty = free[group] if any(free.values()) else late
        if guilty:
            yield _never_made(group, guilty, calls, last)


def _hangs_elsewhere(rank: int, group: Group, files: dict[int, RankFile]) -> bool:
    stuck = stuck_in(rank, files)
    return stuck is not None and stuck[0].group != group


def _never_made(
    group: Group, late: Sequence[int], calls: dict[int, dict[int, Call]], last: dict[int, int]
) -> Divergence:
    number = min(last[rank] for rank in late) + 1
    ranks = tuple(sorted(rank for rank in late if last[rank] < number))
    made = {rank: calls[rank][number] for rank in calls if number in calls[rank]}
    time_ns = min((call.time_ns for call in made.values()), default=0)
    what = next(iter(made.values())).text if made else "a call that is no longer recorded"
    others = _names(sorted(rank for rank, count in last.items() if count >= number))
    text = f"{_names(ranks)} never made call {number} of {_title(group)} ({what}), which {others} made"
    texts = {rank: made[rank].text if rank in made else None for rank in last}
    return Divergence("behind", ranks, group, number, time_ns, texts, text)


def _raised(own: Sequence[RankFile]) -> Divergence | None:
    if not own:
        return None
    error = min((file.error for file in own if file.error is not None), key=lambda error: error["time_ns"])
    ranks = tuple(sorted(file.rank for file in own))
    text = f"{_names(ranks)} raised what no peer caused: {error['kind']}: {error['text']}"
    return Divergence("raised", ranks, None, None, error["time_ns"], {}, text)


def _missing(wait: Wait, files: dict[int, RankFile], behind: Sequence[Divergence]) -> Divergence:
    """The rank that the first wait came from: with the call that it did not make, if there is one."""
    rank = root_of(wait, files)
    place = _first(place for place in behind if rank in place.ranks and place.time_ns <= wait.time_ns)
    if place is not None:
        return place
    file = files.get(rank)
    silent = [other.rank for other in files.values() if other.state == "running"]
    if file is not None and silent and was_held_up(file, wait.time_ns):
        text = f"{_names(silent)} ended without a word (killed, or still running), while rank {rank} was in a " \
               f"collective of others and rank {wait.rank} waited for that one"  # fmt: skip
        return Divergence("silent", tuple(silent), None, None, wait.time_ns, {}, text)
    if file is None:
        what = "left no records here"
    elif file.calls and file.calls[-1].time_ns > wait.time_ns:
        what = "came too late"
    else:
        what = "did not go on"
    text = f"{_names([rank])} {what}: rank {wait.rank} was the first to give up waiting, in {_title(wait.group)}"
    return Divergence("missing", (rank,), wait.group, None, wait.time_ns, {}, text)


def _by_silence(files: Sequence[RankFile]) -> Divergence | None:
    silent = [file for file in files if file.state == "running"]
    spoke = [file for file in files if file.state != "running"]
    present = {file.rank for file in files}
    absent = [rank for rank in range(files[0].world_size) if rank not in present]
    if absent and any(file.state == "raised" for file in files):
        return Divergence(
            "silent", tuple(absent), None, None, 0, {}, f"{_names(absent)} left no records here, others raised errors"
        )
    raised = [file for file in files if file.state == "raised"]
    if raised and len(raised) < len(files) and not silent:
        early = tuple(file.rank for file in files if file.state == "ended")
        text = f"{_names(early)} ended without an error, while others raised what a peer's end causes"
        return Divergence("silent", early, None, None, 0, {}, text)
    if silent and spoke:
        ranks = tuple(file.rank for file in silent)
        ended = "raised errors" if raised else "ended"
        text = f"{_names(ranks)} ended without a word (killed, or still running), while others {ended}"
        return Divergence("silent", ranks, None, None, 0, {}, text)
    return None


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _title(group: Group) -> str:
    return f"group {group.name} (ranks {', '.join(map(str, group.ranks))})"
