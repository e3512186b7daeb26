"""Hooks on an attention's projections see what they see without fused projections, and what they return counts."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
import sp_workers  # noqa: E402

LENGTH = 16
# What is fused where such a hook is on a layer of the attention.
CASES = [
    ("linear_qkv", "forward_pre", ["projections"]),
    ("linear_qkv", "forward", ["output"]),
    ("linear_qkv", "full_backward", ["output"]),
    ("linear_qkv", "full_backward_pre", ["output"]),
    ("linear_proj", "forward_pre", []),
    ("linear_proj", "forward", []),
    ("linear_proj", "full_backward", []),
    ("linear_proj", "full_backward_pre", ["projections"]),
]


@contextlib.contextmanager
def _fused():
    """What was fused inside, as the layers came to it."""
    from ditron_train.megatron.sp import output, projections

    found, patches = [], contextlib.ExitStack()
    for module, name in ((projections, "projections"), (output, "output")):
        route = getattr(module, f"route_{name}")

        def routed(*arguments, name=name, route=route):
            context = route(*arguments)
            found.extend([name] * (context is not None))
            return context

        patches.enter_context(mock.patch.object(module, f"route_{name}", routed))
    with patches:
        yield found


def _tensors(given):
    if torch.is_tensor(given):
        return [given.detach().clone()]
    return [tensor for part in given or () for tensor in _tensors(part)] if isinstance(given, tuple) else []


def _changed(result):
    """Another first tensor in what a hook may return."""
    return result * 1.5 if torch.is_tensor(result) else (result[0] * 1.5, *result[1:])


def _seen_and_changed(layer_name, kind):
    """Tensors that a hook sees, and losses and gradients where it changes the last of them, by both paths; what was
    fused."""
    seen = []

    def hook(layer, *given):
        seen.extend(_tensors(given))
        return _changed(given[0] if kind == "full_backward" else given[-1])

    with sp_workers.groups(2):
        model = sp_workers.build(2, num_layers=1)
        plain = sp_workers.run(model, 2, LENGTH)  # hooks may come later
        layer = getattr(model.decoder.layers[0].self_attention, layer_name)
        handle = getattr(layer, f"register_{kind}_hook")(hook)
        with sp_workers.without("projections", "output"):
            native, seen_natively = sp_workers.run(model, 2, LENGTH), seen[:]
        seen.clear()
        with _fused() as fused:
            changed = sp_workers.run(model, 2, LENGTH)
        handle.remove()
        with _fused() as fused_later:
            again = sp_workers.run(model, 2, LENGTH)
    assert seen and all(torch.equal(*pair) for pair in zip(seen, seen_natively, strict=True))
    sp_workers.assert_same_bits(changed, native)
    assert any(not torch.equal(changed[2][name], one) for name, one in plain[2].items())
    sp_workers.assert_same_bits(again, plain)
    return fused, fused_later


@pytest.mark.parametrize("layer, kind, fused", CASES)
def test_hooks_on_a_projection_see_and_change_what_they_do_natively(layer, kind, fused):
    assert run_workers(2, _seen_and_changed, layer, kind) == [(fused, ["projections"])] * 2


def _hooks_of_libraries():
    """What is fused with hooks that gather parameters, and with one of Megatron's that logs."""

    def gather(layer, *given):
        """As a distributed optimizer's, which look at no tensor."""

    def log(layer, *given):
        """As of Megatron's ``--save-activations``."""

    gather.__module__, log.__module__ = "megatron.core.distributed.somewhere", "megatron.training.activation_logging"
    with sp_workers.groups(2):
        model = sp_workers.build(2, num_layers=1)
        attention, found = model.decoder.layers[0].self_attention, []
        for hook in (functools.partial(gather), log):
            for layer in (attention.linear_qkv, attention.linear_proj):
                layer.register_forward_pre_hook(hook)
                layer.register_forward_hook(hook)
            with _fused() as fused:
                sp_workers.run(model, 2, LENGTH)
            found.append(fused)
    return found


def test_hooks_that_gather_parameters_leave_projections_fused():
    assert run_workers(2, _hooks_of_libraries) == [[["projections"], []]] * 2


def _hooks_of_one_rank():
    """The first rank alone looks at its layers from the start, and stops after a step: what is fused in each."""
    found = []
    with sp_workers.groups(2):
        model = sp_workers.build(2, num_layers=1)
        attention, handles = model.decoder.layers[0].self_attention, []
        if torch.distributed.get_rank() == 0:
            handles = [layer.register_forward_hook(print) for layer in (attention.linear_qkv, attention.linear_proj)]
        with sp_workers.without("projections", "output"):
            native = sp_workers.run(model, 2, LENGTH)
        for _ in range(2):
            with _fused() as fused:
                sp_workers.assert_same_bits(sp_workers.run(model, 2, LENGTH), native)
            found.append(fused)
            for handle in handles:
                handle.remove()
    return found


def test_hooks_of_one_rank_leave_all_ranks_native():
    """Else they would wait for each other: natively that rank's hooks are nobody else's business."""
    assert run_workers(2, _hooks_of_one_rank) == [[[], []]] * 2
