"""Native or fused, for one op at one shape, decided by all ranks of a group together.

| policy | the fused path runs if |
| --- | --- |
| ``strict`` (default) | it is bitwise identical, and faster by more than times vary from call to call |
| ``fast`` | it is faster, likewise |
| ``bits`` | it is bitwise identical |
| ``force`` | always |

With a plan file, decisions of an earlier run are reused, and new ones are added to it. If the native path sums by
NCCL, NCCL's order of addition is probed first: if the fused path cannot follow that order, the op stays native under
``strict`` and ``bits``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.policy.all_reduce_order import forget_all_reduce_orders
from ditron_train.policy.order import ReductionOrder, forget_orders, reduction_order
from ditron_train.policy.plan import Entry, Plan, load_plan, op_of, switches
from ditron_train.policy.probe import HostCounts, Observation, Run, probe
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.exchange import exchange

Decision = Entry

_plans: dict[Path, Plan] = {}
#: Decisions of this process, by the group's global ranks and a plan's key. They outlive the group and its memory.
_decided: dict[tuple[int, ...], dict[str, Decision]] = {}
_agreed: GroupCache[dist.ProcessGroup, tuple[int, ...]] = GroupCache()
_suited: GroupCache[tuple[Path, dist.ProcessGroup, str, str], bool] = GroupCache()


_is_untimed = False


@contextmanager
def untimed() -> Iterator[None]:
    """A context in which ``decide`` compares bits only: times are measured at the job's own calls
    (``policy.job_times``)."""
    global _is_untimed
    before, _is_untimed = _is_untimed, True
    try:
        yield
    finally:
        _is_untimed = before


def is_untimed() -> bool:
    """Whether ``untimed`` is active."""
    return _is_untimed


def forget_plans() -> None:
    """Drops plans, decisions and orders: plan files are read, and NCCL's orders probed, again at their next use."""
    _plans.clear()
    _suited.clear()
    forget_decided()
    forget_orders()
    forget_all_reduce_orders()


def forget_decided(name: str = "") -> None:
    """Drops what was decided about one op, one subpackage or all."""
    for decisions in _decided.values():
        for key in [key for key in decisions if key.startswith(name)]:
            del decisions[key]


def _decided_by(group: dist.ProcessGroup) -> dict[str, Decision]:
    """What the group's ranks have decided, in this group or in an earlier one of the same ranks. The first call is
    collective: if the ranks remember different decisions, all drop them."""
    if group not in _agreed:
        ranks = tuple(dist.get_process_group_ranks(group))
        mine = repr(sorted((key, astuple(decision)) for key, decision in _decided.get(ranks, {}).items()))
        if len(set(exchange(group, hashlib.sha256(mine.encode()).hexdigest()))) > 1:
            _decided.pop(ranks, None)
        _agreed[group] = ranks
    return _decided.setdefault(_agreed[group], {})


def check_plan(sizes: Mapping[str, int] | None = None) -> None:
    """Reads the plan file that ``DITRON_PLAN`` names, if it names one.

    Args:
        sizes: Sizes of the groups that subpackages will decide over, as far as the command line says.

    Raises:
        SettingError: The file is unreadable, from another device or outdated, or all its decisions for a subpackage
        are
            for groups of other sizes.
    """
    plan = _plan()
    if plan is None:
        return
    for package, size in (sizes or {}).items():
        places = plan.places_read(package, get_settings().policy)
        if places and not any(place.split(",")[0] == f"{size} ranks" for place in places):
            raise SettingError(_unsuited(plan, package, places, f"{size} ranks"))


def _plan() -> Plan | None:
    name = get_settings().plan
    if name is None:
        return None
    path = Path(name).absolute()
    if path not in _plans:
        _plans[path] = load_plan(path)
    return _plans[path]


def _unsuited(plan: Plan, name: str, places: set[str], here: str) -> str:
    elsewhere = "; ".join(sorted(places))
    return f"the plan {plan.path} holds decisions of {name} on {elsewhere}, here it is {here}: name another file"


def decide(
    key: str,
    native: Run,
    fused: Run,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    sums: torch.dtype | None = None,
    extra_cases: Sequence[tuple[Run, Run]] = (),
    host_counts: HostCounts = False,
    log_decision: bool = True,
) -> Decision:
    """The decision for `key` (collective over `group`; a host sync the first time).

    Args:
        key: Op, shape and dtype, in words, the subpackage first; the group's size, the order of sums, the mode and the
            process's switches are added to it.
        native: Forward and backward of the native path on some data.
        fused: Forward and backward of the fused path on the same data.
        group: The ranks that decide together.
        device: Device of the tensors.
        sums: Type in which the native path adds up over ranks by NCCL's reduce-scatter, if it does.
        extra_cases: Further runs of both paths on other data: compared, not timed.
        host_counts: As of ``probe``.
        log_decision: Whether to log that the fused path runs; False for a part of another decision.

    Raises:
        SettingError: The plan file is unreadable, from another device, outdated, for groups of another size, or made
            with another order of NCCL's sums; on every rank alike.
        ArenaError, NotSupportedError: `fused` cannot run here; on every rank alike.
    """
    mode, plan = get_settings().policy, _plan()
    order = None
    if sums is not None and device.type == "cuda" and mode in ("strict", "bits"):
        order = reduction_order(group, device, sums)
    op, place = op_of(key), _place(group, order)
    if _is_untimed:
        key, log_decision = f"{key}, bits", False
    key = f"{key} on {place} ({mode}{'; ' * bool(switches())}{', '.join(switches())})"
    if plan is not None:
        _check_suited(plan, op, mode, place, group)
    known = _agreed_entry(plan, key, group, device) if plan is not None else None
    decided = _decided_by(group) if mode != "force" else {}
    known = known or decided.get(key)
    with unseen_by_saved_tensors_hooks():
        if known is not None or mode == "force":
            decision = known or Decision(True, "forced", None, None, None)
            if decision.use_ditron:
                # Allocates memory and loads kernels now, while all ranks can still go native; also for the other data,
                # since a product with a bias is another kernel.
                for run in (fused, *(one for _, one in extra_cases)):
                    run()
        elif order is not None and not order.is_fused:
            decision = Decision(False, str(order.reason), None, None, None)
        else:
            requested: dict[str, Any] = dict(timed=mode != "bits" and not _is_untimed, needs_bits=mode != "fast")
            requested |= dict(host_counts=host_counts, extra_cases=extra_cases)
            decision = _judge(mode, probe(native, fused, group=group, device=device, **requested))
    # The caller logs what stays native, since there are also reasons other than the policy's.
    if decision.use_ditron and log_decision:
        log_once(f"fused {key}", f"{key}: fused, {decision.reason}", name="policy")
    decided[key] = decision
    if plan is not None and known is None and mode != "force":
        plan.entries[key] = decision
        if dist.get_rank(group) == 0:  # of every group: stages of a pipeline have other layers
            plan.add(key, decision)
    return decision


def unseen_by_saved_tensors_hooks() -> torch.autograd.graph.saved_tensors_hooks:
    """Hides what is saved inside from hooks that count, move or recompute what a layer saves (checkpointing,
    offloading): the innermost hooks win."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _place(group: dist.ProcessGroup, order: ReductionOrder | None) -> str:
    """Size of the group, and NCCL's order of sums over it if that matters."""
    return f"{dist.get_world_size(group)} ranks" + (f", {order.name}" if order is not None else "")


def _suits(place: str, read: str) -> bool:
    """Whether two groups have the same size, and the same order of NCCL's sums if that matters to both."""
    (size, _, order), (size_read, _, order_read) = place.partition(", "), read.partition(", ")
    return size == size_read and (order == order_read or not order or not order_read)


def _check_suited(plan: Plan, op: str, mode: str, place: str, group: dist.ProcessGroup) -> None:
    """Refuses a plan whose decisions for this op are all for groups of other sizes or orders (collective once).
    Decisions for other ops of the subpackage do not count: some have an order of sums, others not, and a job may end
    before it has decided about all ops."""
    once = (plan.path, group, op, f"{place} {mode}")
    if once in _suited:
        return
    read, mine = plan.places_read(op, mode), None
    if read and not any(_suits(place, one) for one in read):
        mine = _unsuited(plan, op, read, place)
    refusals = [text for text in exchange(group, mine) if text is not None]
    if refusals:
        raise SettingError(refusals[0])
    _suited[once] = True


def _judge(mode: str, seen: Observation) -> Decision:
    fields = (seen.bits_equal, seen.native_us, seen.ditron_us, seen.host_longer_us)
    if seen.bits_equal is None:
        return Decision(True, "in the interpreter nothing is compared", *fields)
    if mode != "fast" and not seen.bits_equal:
        return Decision(False, "its bits would not be those of cuBLAS and NCCL on this machine", *fields)
    if seen.native_us is None or seen.ditron_us is None:
        return Decision(True, "its bits are those of native", *fields)
    times = f"{seen.ditron_us:.0f} us, native {seen.native_us:.0f} us"
    if seen.ditron_us >= seen.native_us:
        return Decision(False, f"it is not faster ({times})", *fields)
    if not seen.is_clear:
        return Decision(False, f"it is not faster by more than its times differ ({times})", *fields)
    return Decision(True, f"faster ({times})", *fields)


def _agreed_entry(plan: Plan, key: str, group: dist.ProcessGroup, device: torch.device) -> Entry | None:
    """The plan's entry, if every rank of the group read the same decision and the same times."""
    entry = plan.entries.get(key)
    mine = [-1.0, 0.0, 0.0, 0.0]
    if entry is not None:  # of its times, too: by them ranks look at a job together
        mine = [float(entry.use_ditron), entry.native_us or 0.0, entry.ditron_us or 0.0, entry.host_longer_us]
    lowest_and_negated_highest = torch.tensor([mine, [-one for one in mine]], dtype=torch.float64, device=device)
    dist.all_reduce(lowest_and_negated_highest, op=dist.ReduceOp.MIN, group=group)
    lowest, negated_highest = lowest_and_negated_highest.tolist()
    return entry if lowest == [-one for one in negated_highest] and lowest[0] >= 0 else None
