"""What the policy is asked about messages."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from ditron_train.policy import Decision, Op
from ditron_train.pp import kernel_channel
from ditron_train.pp.context import first_of_crossings
from ditron_train.pp.spec import MESSAGE, MessageCall


def ways_asked(monkeypatch, answers, *, nodes=(0, 0, 1, 1), rank=0):
    """(use_ditron, [(sends, receives) of each call that the policy is asked about])."""
    firsts = first_of_crossings(nodes)
    context = SimpleNamespace(device=torch.device("cpu"), first_of_crossings=firsts, rank=rank, group=None)
    asked = []

    def decide(_op, call, _context):
        asked.append((call.sends, call.receives))
        return Decision(answers[len(asked) - 1], "as told", None, None, None)

    monkeypatch.setattr(Op, "decide", decide)
    decision = MESSAGE.decide(MessageCall(context, 4096), context)
    return decision.use_ditron, asked


_IDLE, _SENDS, _RECEIVES = (False, False), (True, False), (False, True)


@pytest.mark.parametrize("is_faster", [True, False])
@pytest.mark.parametrize(
    "nodes, ways",
    [
        ((0, 0, 1, 1), [_IDLE, _SENDS, _RECEIVES, _IDLE]),
        ((0, 1, 2, 3), [_SENDS, _RECEIVES, _SENDS, _RECEIVES]),
        ((0, 1, 2), [_SENDS, _RECEIVES, _IDLE]),
        ((0, 0, 1), [_IDLE, _SENDS, _RECEIVES]),
    ],
)
def test_one_way_messages_are_asked_about_where_nodes_meet(monkeypatch, is_faster, nodes, ways):
    asked = [ways_asked(monkeypatch, [True, is_faster], nodes=nodes, rank=rank) for rank in range(len(nodes))]
    assert [use for use, _ in asked] == [is_faster] * len(nodes)
    assert [calls[1:] for _, calls in asked] == [[way] for way in ways]


@pytest.mark.parametrize("answer, nodes", [(False, (0, 1)), (True, (0, 0))])
def test_otherwise_the_ring_decides(monkeypatch, answer, nodes):
    assert ways_asked(monkeypatch, [answer], nodes=nodes) == (answer, [(True, True)])


def test_plans_tell_both_apart():
    ring = MessageCall(None, 4096)
    assert MESSAGE.describe(ring, None) != MESSAGE.describe(ring._replace(receives=False), None)


def test_a_kernels_timeout_is_told_as_one_deadline():
    posted = []
    channel = SimpleNamespace(
        _record_view=[kernel_channel.KIND_TIMEOUT] * 16,
        mailbox=SimpleNamespace(
            failure=SimpleNamespace(is_posted=False, post=posted.append),
            headers=SimpleNamespace(missing_behind=lambda peer: peer),
        ),
        arena=SimpleNamespace(rank=3),
    )
    for name in ("check", "_post_timeout"):
        setattr(channel, name, getattr(kernel_channel.KernelChannel, name).__get__(channel))
    with contextlib.suppress(TypeError):  # what comes behind is asked of a real channel's base
        channel.check()
    (words,) = posted
    assert words[1] == 3 and len(words) == 7 and words[-1] == 1
