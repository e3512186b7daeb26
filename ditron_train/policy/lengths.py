"""Decisions about calls whose number of rows differs from microbatch to microbatch.

A call is split into a *family*, everything that it depends on but the rows (op, group, weight, types, options), and
the number of rows. Three things are decided separately:

- Once per family: both paths are compared as at any new shape, but not timed.
- At each new number of rows, whether the fused path is bitwise identical: ``Op.bits_proof`` says so on this rank
  without communication. All families of a group whose rows changed together are proven together, followed by one
  agreement of the ranks.
- Per range of rows (eight to an octave) and pass (forward, or forward and backward), which path is faster:
  ``JobTimes``, at the job's own calls. If an op's calls are not observed, both paths are timed at the first number of
  rows of a range, as at a new shape.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.policy.answer import Answer
from ditron_train.policy.decide import unseen_by_saved_tensors_hooks
from ditron_train.policy.job_times import JobTimes
from ditron_train.policy.op import Call, Context, Op, ProofPart
from ditron_train.policy.probe import compares
from ditron_train.runtime.device import device_name, is_capturing
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.runtime.sizes import top_of_range
from ditron_train.runtime.versions import find_versions
from ditron_train.stream.agreement import agree_on_rows
from ditron_train.symm.exchange import exchange

_MANY_LENGTHS = 256  # after which one line advises to pad
_FIXED_LENGTHS = 2  # of a family, that are decided one by one: those of training and of evaluation
MOST_KEYS = 1024  # calls of a family whose answer is kept by all that they depend on
_OF_LIBRARIES = ("CUBLAS", "NVIDIA_", "NVTE_")  # names of variables that libraries read
_CAPTURED = "a length was first seen while a CUDA graph was being captured (run a warm-up step before)"
MEASURED = "its times are being measured"


class Family:
    """What is known about one family on one group.

    Attributes:
        name: Name of the op for log lines.
        context: Context of the fused path, once the family was compared.
        reason: Why all of its calls are native, or None.
        fixed: Numbers of rows that were decided one by one, before it was known that they vary.
        varies: Whether rows vary.
        most_rows: ``DITRON_ROWS`` when the family was compared.
        proof: Parts of the proof of bits at one number of rows; empty if nothing has to be compared.
        divides_proof: Whether ranks are so alike that a part's result on one of them holds for all.
        proven: For each number of rows so far, whether all ranks found the bits identical.
        last_rows: Rows of the last call.
        is_timed: Whether times decide; else the fused path runs if bits are identical.
        times: Times, by the most rows of a range and whether a backward follows.
        num_calls, num_fused: Calls of a timed family, and how many of them were fused.
        probed: Answers of an op whose calls are not observed, by the same keys as ``times``.
        keys: Keys of the gate's answers that came from this family.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name, self.group = name, group
        self.context: Any = None
        self.reason: str | None = None
        self.fixed: set[int] = set()
        self.varies = self.is_open = self.is_timed = False
        self.most_rows: int | None = None
        self.proof: Sequence[ProofPart] = ()
        self.divides_proof = False
        self.proven: dict[int, bool] = {}
        self.last_rows = self.num_calls = self.num_fused = 0
        self.times: dict[tuple[int, bool], JobTimes] = {}
        self.probed: dict[int, Answer] = {}
        self.keys: list[tuple[Hashable, ...]] = []

    def starts_to_vary(self, rows: int, most_rows: int | None) -> bool:
        """Whether a call of ``rows`` is decided by its family; without ``DITRON_ROWS`` the first few numbers of rows
        are not."""
        self.varies |= most_rows is not None or (rows not in self.fixed and len(self.fixed) >= _FIXED_LENGTHS)
        if not self.varies:
            self.fixed.add(rows)
        return self.varies


class Lengths:
    """The families of one gate.

    Args:
        decide: The gate's decision about a family at one number of rows, with or without times.
        native: Makes the answer of a call that runs natively for a reason, with a log line.
    """

    def __init__(
        self,
        decide: Callable[[Op[Any, Any], Any, int | None, bool], Answer],
        native: Callable[[Op[Any, Any], str], Answer],
    ) -> None:
        self._decide, self._native = decide, native
        self.families: GroupCache[tuple[Hashable, ...], Family] = GroupCache()

    def answer(
        self, op: Op[Call, Context], call: Call, kind: tuple[Hashable, ...], rows: int
    ) -> tuple[Answer, Family | None] | None:
        """The answer to a call of ``rows`` of the family ``kind``, and the family if the answer holds for all such
        calls. None: the call is decided by its shape (collective if something is new)."""
        group = op.group(call)
        assert group is not None, "a family belongs to a group"
        key = (op.name, group, *kind)
        family = self.families.get(key)
        if family is None:
            family = self.families[key] = Family(op.log_name or op.name, group)
        most_rows = family.most_rows if family.is_open else get_settings().rows
        if not family.starts_to_vary(rows, most_rows):
            return None
        reason = op.unsupported_reason(call)
        if reason is None and most_rows is not None and rows > most_rows:
            reason = f"more tokens than DITRON_ROWS={most_rows}"
        if reason is not None:
            return self._native(op, reason), family
        if is_capturing(op.device(call)) and rows not in family.proven:
            return self._native(op, _CAPTURED), None
        if not family.is_open:
            self._open(op, call, family, rows, most_rows)
        if family.reason is not None:
            return self._native(op, family.reason), family
        if rows not in family.proven:
            self.prove(family, rows)
        family.last_rows = rows
        if not family.proven[rows]:
            reason = f"at {rows} rows its bits would not be those of the library's products on this machine"
            return self._native(op, reason), family
        return self._by_times(op, call, family, rows)

    def knows(self, op: Op[Call, Context], call: Call) -> bool:
        """Whether the call belongs to a family whose rows vary: then the caller compares rows over the ranks."""
        kind = op.family(call)
        family = None if kind is None else self.families.get((op.name, op.group(call), *kind[0]))
        return family is not None and family.varies

    def distrust(self, op: Op[Call, Context], call: Call, reason: str) -> list[tuple[Hashable, ...]]:
        """Makes all calls of the call's family native; returns the keys of the answers that no longer hold."""
        kind = op.family(call)
        family = None if kind is None else self.families.get((op.name, op.group(call), *kind[0]))
        if family is None or not family.is_open:
            return []
        family.reason = reason
        return family.keys

    def _open(self, op: Op[Call, Context], call: Call, family: Family, rows: int, most_rows: int | None) -> None:
        answer = self._decide(op, call, most_rows, False)
        family.is_open, family.most_rows = True, most_rows
        family.context, family.reason = answer.context, answer.reason
        if answer.reason is not None:
            return
        policy, device = get_settings().policy, op.device(call)
        family.is_timed = policy in ("strict", "fast") and device.type == "cuda"
        if policy in ("strict", "bits") and compares(device):
            family.proof = op.bits_proof(call, answer.context)
            family.divides_proof = len(set(exchange(family.group, _machine(device)))) == 1
        advice = "" if most_rows else "; DITRON_ROWS=<most tokens of a microbatch> reserves memory once"
        log_once(
            f"lengths {family.name} {family.group.group_name} {len(self.families)}",
            f"{family.name}: lengths vary, so bits are proven at each number of tokens, and times are measured at the "
            f"job's calls for each range of lengths{advice}",
            name="policy",
        )

    def prove(self, family: Family, rows: int) -> None:
        """Proves the bits at ``rows``, also for the families that had the same rows as this one so far
        (collective)."""
        if not family.proof:
            family.proven[rows] = True
            return
        together = [
            one
            for one in self.families.values()
            if one.group is family.group and one.last_rows == family.last_rows and rows not in one.proven and one.proof
        ]
        parts = [(one, part) for one in together for part in one.proof]
        takers = _takers([part.work if one.divides_proof else None for one, part in parts], family.context.world_size)
        found = torch.ones(len(parts), dtype=torch.int32, device=family.context.device)
        with torch.no_grad(), unseen_by_saved_tensors_hooks():
            for index, ((_, part), taker) in enumerate(zip(parts, takers)):
                if taker is None or taker == family.context.rank:
                    found[index] = part.run(rows)
        equal = agree_on_rows(family.context, rows, found)
        for one in together:
            one.proven[rows] = all(is_equal for (other, _), is_equal in zip(parts, equal) if other is one)
        if len(family.proven) == _MANY_LENGTHS:
            log_once(
                "many lengths",
                f"{family.name}: {_MANY_LENGTHS} lengths so far, {sum(family.proven.values())} of them proven and "
                f"{family.num_fused / max(family.num_calls, 1):.0%} of the calls fused; each costs a proof, "
                "so padding microbatches to a multiple of 64 or more tokens pays if that is a small part of them",
                name="policy",
            )

    def _by_times(self, op: Op[Call, Context], call: Call, family: Family, rows: int) -> tuple[Answer, Family | None]:
        fused = Answer(family.context)
        if not family.is_timed:
            return fused, family
        top = top_of_range(rows)
        if not op.is_observed:
            if top not in family.probed:
                family.probed[top] = self._decide(op, call, None, True)
            return family.probed[top], family
        has_backward = torch.is_grad_enabled() and op.inputs(call)[0].requires_grad
        family.num_calls += 1
        times = family.times.get((top, has_backward))
        if times is None:
            times = family.times[top, has_backward] = JobTimes(family.group)
        if times.is_due:
            times.look()
            self._log_times(family, top, has_backward, times)
        if times.is_fused is None:
            if is_capturing(op.device(call)):
                return Answer(None, MEASURED), None
            observer = times.next_call(rows, has_backward)
            family.num_fused += observer.is_fused
            context, reason = (family.context, None) if observer.is_fused else (None, MEASURED)
            return Answer(context, reason, observer=observer), None
        family.num_fused += times.is_fused
        # Not kept by the call's key: a key does not say whether a backward follows.
        return (fused if times.is_fused else Answer(None, "it is not faster in this range of rows")), None

    def _log_times(self, family: Family, top: int, has_backward: bool, times: JobTimes) -> None:
        if times.is_fused is None:
            return
        passes = "forward and backward" if has_backward else "forward"
        seen = f"{times.fused_us * top:.0f} us, native {times.native_us * top:.0f} us"
        path = "fused, faster" if times.is_fused else "native, fused is not faster by more than its times differ"
        log_once(
            f"times {id(family)} {top} {has_backward}",
            f"{family.name} {passes} up to {top} rows: {path} ({seen})",
            name="policy",
        )


def _takers(works: Sequence[float | None], num_ranks: int) -> list[int | None]:
    """Which rank runs each part of a proof: the part with the most work first, each on the rank with the least work so
    far. None: all ranks run it. The same on every rank."""
    loads, takers = [0.0] * num_ranks, [None] * len(works)  # type: list[float], list[int | None]
    for index in sorted(range(len(works)), key=lambda index: -(works[index] or 0.0)):
        work = works[index]
        if work is not None:
            takers[index] = rank = loads.index(min(loads))
            loads[rank] += work
    return takers


def _machine(device: torch.device) -> tuple[object, ...]:
    """What a library's choice of a kernel depends on besides the shape."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(_OF_LIBRARIES))
    versions = sorted((name, str(version)) for name, version in find_versions().items())
    return device_name(device), torch.version.cuda, *versions, *variables
