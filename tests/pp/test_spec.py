"""What the policy is asked about messages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ditron_train.policy import Decision, OpSpec
from ditron_train.pp.spec import MESSAGE, MessageCall


def ways_asked(monkeypatch, answers, *, network=None, rank=0, world_size=4):
    """(use_ditron, [(sends, receives) of each call that the policy is asked about])."""
    context = SimpleNamespace(
        device=torch.device("cpu"), network=network, rank=rank, world_size=world_size, group=None
    )
    asked = []

    def decide(_spec, call, _context):
        asked.append((call.sends, call.receives))
        return Decision(answers[len(asked) - 1], "as told", None, None, None)

    monkeypatch.setattr(OpSpec, "decide", decide)
    decision = MESSAGE.decide(MessageCall(context, 4096), context)
    return decision.use_ditron, asked


@pytest.mark.parametrize("is_faster", [True, False])
def test_one_way_messages_are_asked_about_between_nodes(monkeypatch, is_faster):
    asked = [ways_asked(monkeypatch, [True, is_faster], network=object(), rank=rank) for rank in range(4)]
    assert [use for use, _ in asked] == [is_faster] * 4
    assert [calls[1:] for _, calls in asked] == [[(True, False)], [(False, True)]] * 2


def test_a_last_stage_without_a_pair_takes_part_all_the_same(monkeypatch):
    assert ways_asked(monkeypatch, [True, True], network=object(), rank=2, world_size=3)[1][1:] == [(False, False)]


@pytest.mark.parametrize("answer, network", [(False, object()), (True, None)])
def test_otherwise_the_ring_decides(monkeypatch, answer, network):
    assert ways_asked(monkeypatch, [answer], network=network) == (answer, [(True, True)])


def test_plans_tell_both_apart():
    ring = MessageCall(None, 4096)
    assert MESSAGE.words(ring, None) != MESSAGE.words(ring._replace(receives=False), None)
