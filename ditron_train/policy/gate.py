"""The gate: the one place where a call is sent to the fused path or to Megatron's.

Every rank of a group sees the same key, so the ranks agree without talking. What is new is decided once, by all ranks
together (`Op.decide`); afterwards a call costs one look-up. What is not covered runs natively, with one
log line a reason on rank 0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from triton.runtime.errors import TritonError

from ditron_train.policy.answer import Answer, log_native
from ditron_train.policy.audit import AuditedCall
from ditron_train.policy.cpu_bound import cpu_bound_of
from ditron_train.policy.decide import forget_decided, untimed
from ditron_train.policy.job_times import StepTimes
from ditron_train.policy.lengths import MEASURED, MOST_KEYS, Family, Lengths
from ditron_train.policy.op import Call, Context, Op, is_forward_only
from ditron_train.policy.probe import compares
from ditron_train.policy.self_check import self_check
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import ArenaError, NotSupportedError, PeerTimeoutError
from ditron_train.runtime.flight_recorder import note_unless_over
from ditron_train.runtime.groups import GroupCache, is_destroyed, unwrapped
from ditron_train.runtime.logs import get_logger, log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.exchange import exchange

#: What code raises if a library's interface is not the one that the code was written for.
INTERFACE_ERRORS = (TypeError, AttributeError, ImportError, LookupError)
#: These, and what is raised if Triton cannot compile or launch a kernel, or if a probe's tensors do not fit into the
#: GPU's memory next to the job's.
FAILURES = (*INTERFACE_ERRORS, NotImplementedError, TritonError, torch.OutOfMemoryError)
_CAPTURED = "a shape was first seen while a CUDA graph was being captured (run a warm-up step before)"


_Key = tuple[Hashable, ...]
_FAILED = "failed: "


class Gate:
    """Decisions of a process, by op, group and key.

    Attributes:
        most_shapes: The most shapes of one op and group: sequences of ever new lengths would be tried for ever.
        lengths: Decisions about calls whose number of rows varies.
    """

    def __init__(self, most_shapes: int = 256) -> None:
        self.most_shapes = most_shapes
        self._answers: GroupCache[_Key, Answer] = GroupCache()
        self._counts: GroupCache[_Key, int] = GroupCache()
        self._audit_every = 0
        self._audited: GroupCache[tuple[str, dist.ProcessGroup | None], int] = GroupCache()
        self.lengths = Lengths(self._decide_family, _native)

    def context_for(self, op: Op[Call, Context], call: Call) -> Context | None:
        """The context to run ``call`` by the fused path, or None for the native one (collective if the key is new)."""
        return self.answer_for(op, call).context  # type: ignore[no-any-return]

    def is_fused(self, op: Op[Call, Context], call: Call) -> bool:
        """Whether ``call`` runs by the fused path: of an op without a context (collective if the key is new)."""
        return self.answer_for(op, call).is_fused

    def answer_for(self, op: Op[Call, Context], call: Call) -> Answer:
        """Like ``context_for``, as an ``Answer`` that also holds the reason (collective if the key is new)."""
        call = _with_known_group(call)
        key = _key_of(op, call)
        answer = self._answer(op, call, key)
        if not self._audit_every or not op.is_observed or not answer.is_fused or answer.observer is not None:
            return answer
        counted = (op.name, op.group(call))
        self._audited[counted] = number = self._audited.get(counted, 0) + 1
        if number % self._audit_every or is_capturing(op.device(call)):
            return answer

        def distrust(reason: str) -> None:
            for kept in self.lengths.distrust(op, call, reason):
                self._answers.pop(kept, None)
            self._answers[key] = Answer(None, reason)

        return replace(answer, observer=AuditedCall(op, call, answer.context, distrust))

    def _answer(self, op: Op[Call, Context], call: Call, key: _Key) -> Answer:
        answer = self._answers.get(key)
        if answer is None:
            answer = self._ask(op, call, key)
        elif answer.cpu_bound is not None:
            answer.cpu_bound.count()
            if answer.cpu_bound.is_over:
                answer = self._answers[key] = _in_this_job(op, call, answer)
        return answer if answer.steps is None else self._in_this_step(op, call, key, answer, answer.steps)

    def _in_this_step(self, op: Op[Call, Context], call: Call, key: _Key, answer: Answer, steps: StepTimes) -> Answer:
        """The answer in the current step of the job; one for good, with a log line, once times are known."""
        is_fused = steps.path()
        if steps.is_fused is None:
            return answer if is_fused else Answer(None, MEASURED)
        shape, seen = op.describe_shape(call), f"{steps.fused_us:.0f} us, native {steps.native_us:.0f} us a microbatch"
        if is_fused:
            settled = Answer(answer.context)
            log_once(f"fused {key}", f"{shape}fused, faster in the job's steps ({seen})", name="policy")
        else:
            settled = _native(op, f"{shape}it is not faster in the job's steps by more than these differ ({seen})")
        self._answers[key] = settled
        return settled

    def recall(self, key: _Key) -> Answer | None:
        """What was decided for a key of ``key_of``: one lookup, which counts as a call. None if nothing was decided,
        or if the decision may change at this call: call ``answer_for`` then."""
        answer = self._answers.get(key)
        if answer is None or self._audit_every or answer.steps is not None:
            return None
        if answer.cpu_bound is None:
            return answer
        return answer if answer.cpu_bound.count_within() else None

    def knows(self, op: Op[Call, Context], call: Call) -> bool:
        """Whether ``call`` would be answered without communication: it was decided, or no more shapes are tried."""
        call = _with_known_group(call)
        is_full = self._counts.get(_key_of(op, call)[:3], 0) >= self.most_shapes or self.lengths.knows(op, call)
        return is_full or is_capturing(op.device(call)) or _key_of(op, call) in self._answers

    def answers(self, name: str = "", group: dist.ProcessGroup | None = None) -> list[Answer]:
        """Everything that was decided about one op (``tp column``), one subpackage (``tp``) or all; of one group, if
        named."""
        found = [(key, answer) for key, answer in self._answers.items() if _is_named(key, name)]
        return [answer for key, answer in found if group is None or key[1] is group]

    def forget(self, name: str = "") -> None:
        """Decides again from now on, and releases the contexts; of one op, one subpackage or all."""
        self._drop(lambda key: _is_named(key, name))
        forget_decided(name)

    def release(self) -> None:
        """Releases the contexts of groups. What was decided is remembered (``policy.decide``), and each shape is
        looked up again at its next call (collective)."""
        self._drop(lambda key: key[1] is not None)

    def _drop(self, is_meant: Callable[[_Key], bool]) -> None:
        caches: tuple[dict[Any, Any], ...] = (self._answers, self._counts, self.lengths.families)
        for cache in caches:
            for key in list(filter(is_meant, cache)):
                del cache[key]

    def _ask(self, op: Op[Call, Context], call: Call, key: _Key) -> Answer:
        group = op.group(call)
        if group is not None and is_destroyed(group):
            return _native(op, "torch.distributed does not know its process group")
        kind = op.family(call)
        found = None if kind is None else self.lengths.answer(op, call, *kind)
        if found is not None:
            answer, family = found
            if family is not None:
                self._keep(key, answer, family)
            return answer
        count = self._counts.get(key[:3], 0)
        if is_capturing(op.device(call)):
            return self._answers.get(_key_of(op, call, is_forward=False)) or _native(op, _CAPTURED)
        if count >= self.most_shapes:
            # The group's own shapes are counted, which all of its ranks know alike.
            return _native(op, _limit(self.most_shapes))
        self._audit_every = get_settings().audit
        answer = _decide(op, call)
        self._answers[key] = answer
        self._counts[key[:3]] = count + 1
        return answer

    def _keep(self, key: _Key, answer: Answer, family: Family) -> None:
        """Keeps a family's answer for the next call with the same key."""
        if len(family.keys) >= MOST_KEYS:
            for old in family.keys:
                self._answers.pop(old, None)
            family.keys.clear()
        self._answers[key] = answer
        family.keys.append(key)

    def _decide_family(self, op: Op[Call, Context], call: Call, most_rows: int | None, is_timed: bool) -> Answer:
        """A decision about a family at the call's rows; the first is not timed (collective)."""
        self._audit_every = get_settings().audit
        if is_timed:
            return _decide(op, call)
        counted = _key_of(op, call)[:3]
        if self._counts.get(counted, 0) >= self.most_shapes:
            return Answer(None, _limit(self.most_shapes))
        self._counts[counted] = self._counts.get(counted, 0) + 1
        with untimed():
            return _decide(op, call, lambda context: context.vary_lengths(most_rows))


def _decide(op: Op[Call, Context], call: Call, prepare: Callable[[Any], None] = lambda context: None) -> Answer:
    reason = op.unsupported_reason(call)
    if reason is not None:
        return _native(op, reason)
    reason = self_check(op.group(call), op.device(call))
    if reason is not None:  # it has said so, once for all ops
        return Answer(None, reason)
    is_timed_later = op.runs_concurrently and get_settings().policy in ("strict", "fast") and compares(op.device(call))
    try:
        context = op.make_context(call)
        prepare(context)
        with untimed() if is_timed_later else nullcontext():
            decision = op.decide(call, context)
    except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
        return _native(op, str(error))
    except FAILURES as error:
        return _native(op, reason_all_failed(op.log_name or op.name, error, op.group(call)))
    if decision.use_ditron and is_timed_later:
        group = op.group(call)
        assert group is not None, "ranks of a group time their steps"
        words = f"{op.describe_shape(call)}the job's first steps alternate between native and fused, which times both"
        log_once(f"steps {words}", words, name="policy")
        return Answer(context, steps=StepTimes(group))
    if decision.use_ditron:
        looks = op.looks_at_host and not is_forward_only(op) and get_settings().policy in ("strict", "fast")
        return Answer(context, cpu_bound=cpu_bound_of(decision, op.device(call)) if looks else None)
    return _native(op, f"{op.describe_shape(call)}{decision.reason}")


def _in_this_job(op: Op[Call, Context], call: Call, answer: Answer) -> Answer:
    """The answer once the job has shown whether the job is CPU-bound (collective: all ranks are at the same call);
    the same one while its first steps may be to blame."""
    cpu_bound, group = answer.cpu_bound, op.group(call)
    assert cpu_bound is not None, "it was asked whether there is one"
    mine = cpu_bound.lateness(), cpu_bound.age_s
    gathered = [mine] if group is None else exchange(group, mine)
    lateness, age_s = (max(values) for values in zip(*gathered))
    reason = cpu_bound.unsupported_reason(lateness)
    if reason is None:
        return Answer(answer.context)
    return answer if cpu_bound.looks_on(age_s) else _native(op, f"{op.describe_shape(call)}{reason}")


def _native(op: Op[Call, Context], reason: str) -> Answer:
    if op.logs_native:
        log_native(op.log_name or op.name, reason)
    return Answer(None, reason)


def _limit(most_shapes: int) -> str:
    return f"more than {most_shapes} shapes: each has to be tried, which would cost more than it gives"


def reason_all_failed(name: str, error: Exception, group: dist.ProcessGroup | None, turns: int = 1) -> str:
    """Why op ``name`` runs natively although nobody has foreseen ``error``, one of `FAILURES`: every rank has met it
    (collective). One of `INTERFACE_ERRORS` may be a fault of this package as well: rank 0 warns of it, once.

    Raises:
        Exception: ``error`` itself under ``force``; of `INTERFACE_ERRORS` in tests, which set ``DITRON_TEST_RAISES``;
            or if other ranks met none: they say so, or do not come within ``turns`` deadlines (``symm.exchange``),
            waiting for this rank elsewhere.
    """
    words = f"the fused path cannot run here: {type(error).__name__}: {error}"
    is_unexpected = isinstance(error, INTERFACE_ERRORS)
    if get_settings().policy == "force" or (is_unexpected and os.environ.get("DITRON_TEST_RAISES")):
        raise error
    if group is not None:
        with note_unless_over(error):
            try:
                gathered = exchange(group, _FAILED + words, turns)
            except PeerTimeoutError as timeout:
                raise error from timeout
            if not all(str(one).startswith(_FAILED) for one in gathered):
                raise error
    if is_unexpected:
        advice = "a library's interface has changed, or this is a fault of ditron_train: please report it"
        log_once(f"failed {name} {words}", f"{name} runs natively, {words} ({advice})", level=logging.WARNING)
    get_logger("policy").debug("%s", words, exc_info=error)
    return words


def key_of(op: Op[Call, Context], call: Call) -> _Key:
    """Where the answer to ``call`` is kept, for ``recall``."""
    return _key_of(op, _with_known_group(call))


def _key_of(op: Op[Call, Context], call: Call, is_forward: bool | None = None) -> _Key:
    """Op, group, whether it is a call without a backward, and what else the answer depends on."""
    return (op.name, op.group(call), is_forward_only(op) if is_forward is None else is_forward, *op.key(call))


def _with_known_group(call: Call) -> Call:
    """``call`` with the group that ``torch.distributed`` knows, if its own wraps that one."""
    group = getattr(call, "group", None)
    known = unwrapped(group)
    return call if known is group else call._replace(group=known)  # type: ignore[attr-defined]


def _is_named(key: _Key, name: str) -> bool:
    return not name or key[0] == name or str(key[0]).split()[0] == name


#: Decisions of this process.
gate = Gate()
