"""Finds the rank that first went another way than its group, from the last calls of every rank.

Ranks of a group make the same calls in the same order, so calls are compared by their number on the group. A rank
*differs* where its call of a number is another one than the others'; it is *behind* where it never made a call that
others made. Of all such places the earliest by the clock is the one that the others suffered from. Where no calls tell
(a pipeline's stages each go their own way; a device may hang behind a host that went on), the first error that names a
missing rank does, and last a rank that ended without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ditron_train.runtime.flight_recorder import CAPACITY
from ditron_train.tools.postmortem.files import Call, Group, RankFile

__all__ = ["Divergence", "find_divergence"]


@dataclass(frozen=True)
class Divergence:
    """Who went another way, where.

    Attributes:
        kind: ``differs`` (another call), ``behind`` (no call), ``missing`` (others waited for it), ``silent`` (it
            ended without a word).
        ranks: Global ranks, all of them where nobody can say which of them is right.
        group: The group in question; None for ``silent``.
        number: Of the call on the group, where calls tell.
        time_ns: When the first rank made that call, or raised.
        calls: By rank what each called there, None where it did not; empty where calls do not tell.
        text: One sentence.
    """

    kind: Literal["differs", "behind", "missing", "silent"]
    ranks: tuple[int, ...]
    group: Group | None
    number: int | None
    time_ns: int
    calls: dict[int, str | None]
    text: str


def find_divergence(files: Sequence[RankFile]) -> Divergence | None:
    """The first divergence, or None where all ranks ended alike."""
    by_rank = {file.rank: file for file in files}
    groups = sorted({group for file in files for group in file.groups})
    found = [place for group in groups for place in _in_group(group, by_rank)]
    if found:
        return min(found, key=lambda place: place.time_ns)
    return _by_errors(files) or _by_silence(files)


def _in_group(group: Group, by_rank: dict[int, RankFile]) -> Iterator[Divergence]:
    """At most one place of each kind: the first."""
    calls = {
        rank: {call.number: call for call in file.calls if call.group == group and call.compared}
        for rank in group.ranks
        if (file := by_rank.get(rank)) is not None
    }
    # A ring that is full of other calls may have forgotten those of this group.
    calls = {rank: made for rank, made in calls.items() if made or len(by_rank[rank].calls) < CAPACITY}
    if not any(calls.values()):
        return
    last = {rank: max(made, default=0) for rank, made in calls.items()}
    fewest = min(last.values())
    oldest = max(min(made, default=1) for made in calls.values())  # before it, some rank's ring has forgotten
    for number in range(oldest, fewest + 1):
        texts = {rank: made[number].text for rank, made in calls.items() if number in made}
        if len(set(texts.values())) > 1:
            yield _differs(group, number, texts, calls)
            return
    if fewest < max(last.values()):
        yield _behind(group, fewest + 1, calls, last)


def _differs(group: Group, number: int, texts: dict[int, str], calls: dict[int, dict[int, Call]]) -> Divergence:
    counts = Counter(texts.values())
    (usual, most), *others = counts.most_common()
    tied = bool(others) and others[0][1] == most
    ranks = tuple(sorted(rank for rank, text in texts.items() if tied or text != usual))
    time_ns = min(made[number].time_ns for made in calls.values() if number in made)
    said = "; ".join(f"{_names([r for r in texts if texts[r] == text])}: {text}" for text in counts)
    who = f"{_names(ranks)} differ from each other" if tied else f"{_names(ranks)} went another way"
    return Divergence(
        "differs", ranks, group, number, time_ns, dict(texts), f"{who} at call {number} of {_title(group)}: {said}"
    )


def _behind(group: Group, number: int, calls: dict[int, dict[int, Call]], last: dict[int, int]) -> Divergence:
    ranks = tuple(sorted(rank for rank, count in last.items() if count < number))
    made = {rank: calls[rank][number] for rank in calls if number in calls[rank]}
    time_ns = min((call.time_ns for call in made.values()), default=0)
    what = next(iter(made.values())).text if made else "a call that is no longer recorded"
    text = f"{_names(ranks)} never made call {number} of {_title(group)} ({what}), which {_names(sorted(set(last) - set(ranks)))} made"
    texts = {rank: made[rank].text if rank in made else None for rank in last}
    return Divergence("behind", ranks, group, number, time_ns, texts, text)


def _by_errors(files: Sequence[RankFile]) -> Divergence | None:
    raised = [file for file in files if file.error is not None]
    for file in sorted(raised, key=lambda file: file.error["time_ns"]):
        error = file.error
        group = next((group for group in file.groups if group.name == error["group"]), None)
        if group is not None and error["missing_rank"] is not None and error["missing_rank"] < len(group.ranks):
            rank = group.ranks[error["missing_rank"]]
            text = f"{_names([rank])} did not come: rank {file.rank} waited for it in {_title(group)}; their calls do not differ"
            return Divergence("missing", (rank,), group, None, error["time_ns"], {}, text)
    return None


def _by_silence(files: Sequence[RankFile]) -> Divergence | None:
    silent = [file for file in files if file.state == "running"]
    spoke = [file for file in files if file.state != "running"]
    present = {file.rank for file in files}
    absent = [rank for rank in range(files[0].world_size) if rank not in present]
    if absent and any(file.state == "raised" for file in files):
        return Divergence(
            "silent", tuple(absent), None, None, 0, {}, f"{_names(absent)} left no records here, others raised errors"
        )
    if silent and spoke:
        ranks = tuple(file.rank for file in silent)
        ended = "raised errors" if any(file.state == "raised" for file in spoke) else "ended"
        text = f"{_names(ranks)} ended without a word (killed, or still running), while others {ended}"
        return Divergence("silent", ranks, None, None, 0, {}, text)
    return None


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _title(group: Group) -> str:
    return f"group {group.name} (ranks {', '.join(map(str, group.ranks))})"
