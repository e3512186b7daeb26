"""Says whether a job in which something went wrong ended as it should have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.postmortem.diverge import Divergence, find_divergence
from ditron_train.tools.postmortem.files import RankFile, read_folder
from tests.faults.fault import Fault

GRACE_S = 5.0
NEVER_CAME = "the fault never came"
_AGREEMENT = "an agreement of all ranks"
_AGREEMENT_S = 30.0  # at least: ranks come to one from imports and compilation
_DISKS = ("full disk", "read-only disk")
_WORDS_OF_DISKS = ("No space left", "Read-only file system", "OSError", "no records")


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    Attributes:
        rank: Its number.
        status: Exit code, or the negative number of a signal.
        is_late: Whether it still ran when the time was up, or was stopped.
        after_s: Seconds from the fault to its end.
        report: What it wrote behind its last step; None where it never came there.
        printed: What it printed.
        queued_s: Seconds from the fault to its end in which it was ready to run and no core took it.
    """

    rank: int
    status: int | None
    is_late: bool
    after_s: float | None
    report: dict[str, Any] | None
    printed: str
    queued_s: float = 0.0


def _without_folders(printed: str) -> str:
    """Where this package and others are installed says something about the machine, not about the fault."""
    package, libraries = f"{Path(__file__).parents[2]}/", f"{Path(os.__file__).parent}/"
    return printed.replace(package, "").replace(libraries, "")


@dataclass
class Outcome:
    """What became of one fault.

    Attributes:
        fault: Which.
        place: Where it struck.
        ended: ``raised`` (the survivors did), ``survived`` (with right results) or ``wrong``.
        after_s: From the fault to the end of the last survivor.
        queued_s: For how long of it survivors had to wait for a core of this machine, in all.
        named: What the postmortem says.
        calls: Function calls of the phase ``start``.
        wrong: What is not as it should be; empty where all is well.
        printed: What the ranks printed, where something is wrong.
    """

    fault: Fault
    place: str
    ended: str
    after_s: float | None = None
    queued_s: float = 0.0
    named: str = ""
    calls: int = 0
    wrong: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data, short where all is well."""
        after_s = None if self.after_s is None else round(self.after_s, 2)
        content = {**self.fault.to_json(), "place": self.place, "ended": self.ended, "after_s": after_s}
        content.update(at=round(self.fault.at, 4), queued_s=round(self.queued_s, 2))
        return {**content, "named": self.named, "wrong": self.wrong, "said": self.printed} if self.wrong else content


def judge(
    fault: Fault,
    fired: dict[str, Any] | None,
    endings: Sequence[Ending],
    records: Path,
    *,
    is_in_time: bool,
    orphans: Sequence[int],
    segments: Sequence[str],
    native_timeout_s: float,
) -> Outcome:
    """The outcome of a job whose ranks have all ended.

    Args:
        fault: What was to go wrong.
        fired: Place and time; None where it never did.
        endings: Of all ranks.
        records: Folder of the ranks' records.
        is_in_time: Whether nobody had to be ended but a stopped rank.
        orphans, segments: Processes and files of shared memory that were left.
        native_timeout_s: Of torch's own collectives.
    """
    outcome = Outcome(fault, "nowhere" if fired is None else fired["place"], "wrong")
    outcome.calls = max((ending.report["calls"] for ending in endings if ending.report is not None), default=0)
    wrong = outcome.wrong
    wrong += [f"processes were left: {list(orphans)}"] * bool(orphans)
    wrong += [f"shared memory was left: {sorted(segments)}"] * bool(segments)
    if not is_in_time:
        running = [ending.rank for ending in endings if ending.is_late]
        wrong.append(f"ranks {running} did not end")
    if any(ending.report is not None and not ending.report["equal"] for ending in endings):
        wrong.append("a rank went on with other results")
    if fired is None and fault.kind != "none":
        wrong.append(NEVER_CAME)
    if all(ending.report is not None and ending.status == 0 for ending in endings):
        outcome.ended = "survived"
        if not fault.may_be_survived:
            wrong.append("no rank noticed")
    elif fault.kind == "none":
        wrong.append("a job without a fault failed")
    else:
        outcome.ended = "raised"
        _judge_survivors(fault, endings, records, outcome, native_timeout_s)
    if wrong:
        outcome.ended = "wrong"
        outcome.printed = [
            f"rank {one.rank}, {one.status}: {_without_folders(one.printed)[-4000:]}" for one in endings
        ]
    return outcome


def _judge_survivors(
    fault: Fault, endings: Sequence[Ending], records: Path, outcome: Outcome, native_timeout_s: float
) -> None:
    try:
        files = read_folder(records)
    except SettingError as error:
        files, outcome.named = [], str(error)
    by_rank = {file.rank: file for file in files}
    survivors = [ending for ending in endings if ending.rank != fault.rank]
    outcome.after_s = max((survivor.after_s or 0.0 for survivor in survivors), default=None)
    outcome.queued_s = sum(survivor.queued_s for survivor in survivors)  # each of them may wait for another
    for one in survivors:
        if one.status == 0:
            outcome.wrong.append(f"rank {one.rank} ended with 0")
        limit_s = _deadline_s(fault, one, by_rank.get(one.rank), native_timeout_s) + GRACE_S
        if one.after_s is not None and one.after_s > limit_s + outcome.queued_s:
            queued = f" and {outcome.queued_s:.1f} without a core" if outcome.queued_s else ""
            outcome.wrong.append(f"rank {one.rank} ended after {one.after_s:.1f} s, allowed are {limit_s:g}{queued}")
    divergence = find_divergence(files) if files else None
    if divergence is not None:
        outcome.named = divergence.text
    if not _is_named(fault, divergence, endings):
        outcome.wrong.append(f"rank {fault.rank} is not named")


def _deadline_s(fault: Fault, one: Ending, file: RankFile | None, native_timeout_s: float) -> float:
    """Of the wait that a survivor gave up."""
    error = "" if file is None or file.error is None else file.error["text"]
    if _AGREEMENT in error or _AGREEMENT in one.printed:
        return max(_AGREEMENT_S, fault.timeout_s)
    if "PeerTimeoutError" in one.printed:
        return fault.timeout_s
    return max(native_timeout_s, fault.timeout_s)


def _is_named(fault: Fault, divergence: Divergence | None, endings: Sequence[Ending]) -> bool:
    if fault.kind in _DISKS and any(words in ending.printed for ending in endings for words in _WORDS_OF_DISKS):
        return True  # all ranks share the disk; on a busy machine others may give up waiting for who fills it
    if divergence is None:
        return False
    if divergence.ranks == (fault.rank,):
        return True
    if divergence.kind == "differs" and divergence.group is not None and len(divergence.group.ranks) == 2:
        return fault.rank in divergence.ranks  # nobody can say which of two is right
    # An error that every rank raises alike says in its words which rank it is about.
    return divergence.kind == "raised" and f"rank {fault.rank}:" in divergence.text
