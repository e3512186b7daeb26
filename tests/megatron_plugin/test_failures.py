"""Where a job learns of ops that have failed."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core")

from ditron_train.megatron.plugin import failures, patching
from ditron_train.runtime.errors import DitronError


@pytest.fixture
def calls(monkeypatch):
    """What is called, in order; a check fails where ``calls.failed`` is set."""

    class Calls(list):
        failed = False

    calls = Calls()

    def check_all():
        calls.append("check")
        if calls.failed:
            raise DitronError("an op has failed")

    monkeypatch.setattr(failures, "check_all", check_all)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    yield calls
    failures.stop()
    patching.undo_all()


def _step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=0.1).step()


def test_a_step_is_looked_at_and_does_not_wait(calls):
    failures.start()
    failures.start()
    _step()
    assert calls == ["check"]
    calls.failed = True
    with pytest.raises(DitronError, match="has failed"):
        _step()
    failures.stop()
    _step()


def test_what_a_failed_op_has_made_is_not_saved(calls):
    checkpointing, training = ModuleType("megatron.training.checkpointing"), ModuleType("megatron.training.training")

    def save_checkpoint(iteration, *, model):
        calls.append(f"saved {iteration} {model}")

    checkpointing.save_checkpoint = training.save_checkpoint = save_checkpoint
    modules = {module.__name__: module for module in (checkpointing, training)}
    with mock.patch.dict(sys.modules, modules):
        failures.start()
        failures.start()
        training.save_checkpoint(3, model="m")
        assert calls == ["wait", "check", "saved 3 m"]
        calls.clear()
        calls.failed = True
        for module in modules.values():
            with pytest.raises(DitronError, match="has failed"):
                module.save_checkpoint(4, model="m")
        assert calls == ["wait", "check"] * 2
        patching.undo_all()
        assert checkpointing.save_checkpoint is training.save_checkpoint is save_checkpoint


def test_cores_own_checkpoints_are_looked_at(calls):
    from megatron.core import dist_checkpointing

    native = dist_checkpointing.save
    failures.start()
    calls.failed = True
    with pytest.raises(DitronError, match="has failed"):
        dist_checkpointing.save({}, "nowhere")
    patching.undo_all()
    assert dist_checkpointing.save is native
