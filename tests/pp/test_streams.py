"""Which stream a message goes on, and what that stream is ordered behind: with streams that only write down what they are told."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from ditron_train.pp import lanes
from ditron_train.pp.lanes import Sender

SMALL, LARGE = 8192, 16 << 20
ASIDE = ["slots go back", "side behind compute"]  # before it may wait for one itself


class _Event:
    """A moment of ``stream``; ``over`` says whether it has come."""

    def __init__(self, stream: str, log: list[str]) -> None:
        self.stream, self.log, self.over = stream, log, False

    def hold(self, stream: str) -> None:
        self.log.append(f"{stream} behind {self.stream}")

    def is_over(self) -> bool:
        return self.over


class _Rig:
    """A sender on streams ``compute``, ``other`` and its own, ``side``."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.free = True
        sender = self.sender = object.__new__(Sender)
        sender.channel = SimpleNamespace(is_set=lambda index, epoch: self.free)
        sender.slots = SimpleNamespace(count=2)
        sender.lane, sender._uses, sender._ring_messages = 0, [0], 0
        sender._before_leaving = lambda: self.log.append("slots go back")
        sender._held, sender._stream, sender._inline_on = deque(), "side", None
        sender._events = SimpleNamespace(record=lambda stream: _Event(stream, self.log))

    def send(self, num_bytes: int, current: str = "compute", loan: int | None = 0) -> tuple[str, list[str]]:
        """The stream of a message and the orders that were made for it."""
        self.log.clear()
        stream = self.sender._stream_for(num_bytes, loan, current)
        if stream == "side":
            self.sender._held.append(SimpleNamespace(event=_Event("side", self.log)))
        return stream, list(self.log)

    def finish(self) -> None:
        for sent in self.sender._held:
            sent.event.over = True


def test_a_small_message_into_a_free_slot_needs_no_other_stream() -> None:
    rig = _Rig()
    assert rig.send(SMALL) == ("compute", [])
    assert rig.send(lanes._INLINE_BYTES) == ("compute", [])
    assert rig.send(lanes._INLINE_BYTES + 1) == ("side", ASIDE)


def test_a_small_message_stays_behind_a_large_one_of_its_lane() -> None:
    rig = _Rig()
    assert rig.send(LARGE) == ("side", ASIDE)
    assert rig.send(SMALL) == ("side", ASIDE)
    rig.finish()
    assert rig.send(SMALL) == ("compute", [])


@pytest.mark.parametrize("loan", [0, None])
def test_a_message_that_may_have_to_wait_for_its_slot_holds_up_nothing(loan: int | None) -> None:
    rig = _Rig()
    rig.free, rig.sender._ring_messages = False, 2
    assert rig.send(SMALL, loan=loan) == ("side", ASIDE)


def test_messages_from_several_streams_stay_in_order() -> None:
    rig = _Rig()
    assert rig.send(SMALL) == ("compute", [])
    assert rig.send(SMALL, "other") == ("other", ["other behind compute"])
    assert rig.send(LARGE, "compute") == ("side", [*ASIDE, "side behind other"])
    assert rig.send(LARGE, "compute") == ("side", ASIDE)


def test_what_was_sent_inline_is_waited_for_on_other_streams_alone() -> None:
    rig = _Rig()
    sent = lanes._InlineSend("compute", rig.sender._events)
    sent.hold("compute")
    assert rig.log == []
    sent.hold("other")
    assert rig.log == ["other behind compute"]
