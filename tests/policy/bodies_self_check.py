"""What the workers of the self-check's tests run: libraries that look newer, and what can go wrong beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ditron_train.policy import self_check as room
from ditron_train.policy.gate import Gate
from ditron_train.runtime import launch, versions
from ditron_train.runtime.groups import world_group
from ditron_train.symm import check_all
from ditron_train.symm.arena import SymmetricArena
from ditron_train.symm.exchange import _Rendezvous
from ditron_train.tp import get_tp_context

CPU = torch.device("cpu")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.printed: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.printed.append(record.getMessage())


def _without_launches(kernel_name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A launch that comes back without having run the kernel."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        original = launch.KernelLaunch.__call__

        def call(self, *arguments, **options):
            if self.identity[0] != kernel_name:
                original(self, *arguments, **options)

        monkeypatch.setattr(room.KernelLaunch, "__call__", call)

    return break_it


def _raising(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self, *arguments, **options):
        raise TypeError("function takes exactly 16 arguments (23 given)")

    monkeypatch.setattr(room.KernelLaunch, "__call__", call)


def _without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(self, name, num_bytes):
        raise AttributeError("module 'symmetric memory' has no attribute 'rendezvous'")

    monkeypatch.setattr(SymmetricArena, "_grow", grow)


def _with_a_store_that_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hand-over's first buffer on, a look at the store ends with an error, once."""
    tensor, is_settled, failures = SymmetricArena.tensor, _Rendezvous._is_settled, []

    def armed(self, name, shape, dtype):
        if name == "self-check":
            failures.append("Connection reset by peer")
        return tensor(self, name, shape, dtype)

    def look(self):
        if failures:
            raise RuntimeError(failures.pop())
        return is_settled(self)

    monkeypatch.setattr(SymmetricArena, "tensor", armed)
    monkeypatch.setattr(_Rendezvous, "_is_settled", look)


def _without_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    def channel(*arguments):
        raise TypeError("Channel() takes no arguments")

    monkeypatch.setattr(room, "Channel", channel)


def _keeping_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self):
        raise OSError("the memory is in use")

    monkeypatch.setattr(SymmetricArena, "_release", release)


def _reading_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an acquire that orders nothing looks like: the flag is there and the slot holds what it held before."""
    original = launch.KernelLaunch.__call__

    def call(self, *arguments, **options):
        original(self, *arguments, **options)
        if self.identity[0] == "handover_kernel":
            out = arguments[4]
            out[0, 5, 7] -= 1

    monkeypatch.setattr(room.KernelLaunch, "__call__", call)


def _refusing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(newer, group, device, turns):
        raise AssertionError(f"checked beside {newer}")

    monkeypatch.setattr(room, "_checked", check)


FAULTS = {
    "checks": _refusing_to_check,
    "none": lambda monkeypatch: None,
    "wrong results": _without_launches("scale_kernel"),
    "raises": _raising,
    "no rendezvous": _without_memory,
    "no channel": _without_channel,
    "the store fails once": _with_a_store_that_fails_once,
    "cannot be freed": _keeping_memory,
    "reads early": _reading_early,
    "no signal": _without_launches("handover_kernel"),
}


def gate_beside(triton: str, fault: str, broken_ranks: tuple[int, ...]) -> tuple[list[tuple[bool, str | None]], list]:
    """Whether the gate gives the fused path, and why not, for two shapes of an op; and what was logged here."""
    from bodies_specs import DoubledGather, GatherCall

    lines, logger = _Lines(), logging.getLogger("ditron_train")
    logger.addHandler(lines)
    before = logger.level
    logger.setLevel(logging.INFO)
    found = versions.find_versions()
    room.forget_self_checks()
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("DITRON_POLICY", "force")
            monkeypatch.setenv("DITRON_TIMEOUT_S", "2" if fault == "no signal" else "60")
            monkeypatch.setattr(versions, "find_versions", lambda: {**found, "triton": triton})
            group = world_group()
            calls = [GatherCall(torch.ones(rows, 16, dtype=torch.bfloat16), group) for rows in (16, 32)]
            if fault != "no rendezvous":
                get_tp_context(group, CPU)
            if dist.get_rank() in broken_ranks:
                FAULTS[fault](monkeypatch)
            gate = Gate()
            answers = [gate.answer_for(DoubledGather(), call) for call in calls]
            check_all()  # what the self-check provoked stops nobody's optimizer step
            return [(answer.context is not None, answer.reason) for answer in answers], lines.printed
    finally:
        room.forget_self_checks()
        logger.removeHandler(lines)
        logger.setLevel(before)


def gate_of_one_process(fault: str) -> list[str | None]:
    """The verdict without a group, for a matrix optimizer, and in a job whose WORLD has been checked."""
    found, logged = versions.find_versions(), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(versions, "find_versions", lambda: {**found, "torch": "2.99.0"})
        with monkeypatch.context() as broken:
            FAULTS[fault](broken)
            room.forget_self_checks()
            logged.append(room.self_check(None, CPU))
            room.forget_self_checks()
            logged.append(room.self_check(world_group(), CPU))
        logged.append(room.self_check(None, CPU))  # WORLD's
    room.forget_self_checks()
    return logged
