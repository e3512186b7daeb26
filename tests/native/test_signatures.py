"""Every override has the signature of what it stands for, so that callers by keyword and tools find what they know."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import types

import pytest
import torch

megatron = pytest.importorskip("megatron.core")

from ditron_train.megatron.plugin.arguments import FEATURE_MODULES  # noqa: E402
from tests.support.processes import run_workers_once  # noqa: E402

_TE_MODULES = ("tp/te_layers.py", "ep/te_experts.py", "sp/te_attention.py")


def _form(function):
    """Names, kinds and defaults of parameters; not what they are annotated with."""
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]


def _overrides(fused, native):
    """(name, our function, native's) of every function of ``native`` that ``fused``, or a mixin of it, defines
    anew."""
    for owner in fused.__mro__:
        if not owner.__module__.startswith("ditron_train."):
            continue
        for name, member in vars(owner).items():
            inherited = getattr(native, name, None)
            if isinstance(member, types.FunctionType) and callable(inherited):
                yield name, member, inherited


def _compare_overrides(feature):
    module, seen = importlib.import_module(FEATURE_MODULES[feature]), 0
    for native, fused in module.class_map().items():
        for name, member, inherited in _overrides(fused, native):
            own, expected = _form(member), _form(inherited)
            for kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                if own[-1][1] is kind and expected[-1][1] is not kind:
                    own = own[:-1]  # what newer versions pass besides
            assert own == expected, f"{fused.__qualname__}.{name}"
            seen += 1
    assert seen


def _compare_what_is_replaced_by_name():
    from megatron.core.optimizer.muon import TensorParallelMuon
    from megatron.core.parallel_state import initialize_model_parallel

    from ditron_train.megatron.muon.optimizer import DitronTensorParallelMuon
    from ditron_train.megatron.plugin.job_start import _make_groups_and_rendezvous

    assert _form(DitronTensorParallelMuon.__init__) == _form(TensorParallelMuon.__init__)
    assert _form(_make_groups_and_rendezvous) == _form(initialize_model_parallel)


@pytest.mark.parametrize(
    "feature", sorted(FEATURE_MODULES.keys() - {"adam", "det", "loss", "wgrad"})
)  # which override nothing
def test_overrides_have_the_signatures_of_what_they_override(feature):
    """In a process of its own: what is imported here is imported by the workers of all later tests."""
    (outcome,) = run_workers_once(1, _compare_overrides, feature)
    assert outcome.ok, outcome.traceback


def test_what_is_replaced_by_name_has_the_signature_of_what_it_replaces():
    (outcome,) = run_workers_once(1, _compare_what_is_replaced_by_name)
    assert outcome.ok, outcome.traceback


def _classes(*paths):
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _functions(name, classes):
    """Functions of a class and of its bases, by name, as far as their source is among ``classes``."""
    found = {}
    if name not in classes:
        return found
    for base in reversed(classes[name].bases):
        found.update(_functions(ast.unparse(base), classes))
    found.update({node.name: node for node in classes[name].body if isinstance(node, ast.FunctionDef)})
    return found


def _written_form(function):
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(function.args)


@pytest.mark.parametrize("name", _TE_MODULES)
def test_overrides_beside_transformer_engine_are_written_as_what_they_override(name):
    """By their source: without Transformer Engine these classes cannot be imported."""
    core = pathlib.Path(megatron.__path__[0])
    native = _classes(core / "extensions/transformer_engine.py", core / "transformer/moe/experts.py")
    package = pathlib.Path(importlib.import_module("ditron_train.megatron").__path__[0])
    fused, seen = _classes(package / name), 0
    for kind, node in fused.items():
        natives = [base for base in map(ast.unparse, node.bases) if base in native]
        for base in natives:
            inherited = _functions(base, native)
            for method, function in _functions(kind, fused).items():
                if method in inherited:
                    assert _written_form(function) == _written_form(inherited[method]), f"{kind}.{method}"
                    seen += 1
    assert seen


def test_experts_are_called_by_keyword(monkeypatch):
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from ditron_train.megatron.ep.experts import DitronTEGroupedMLP

    experts = DitronTEGroupedMLP.__new__(DitronTEGroupedMLP)
    torch.nn.Module.__init__(experts)
    monkeypatch.setattr(TEGroupedMLP, "forward", lambda self, *args: (args, None))
    rows, counts, probs = torch.zeros(2, 3), torch.tensor([1, 1]), torch.ones(2)
    out, _ = experts(permuted_local_hidden_states=rows, tokens_per_expert=counts, permuted_probs=probs)
    assert out[0] is rows and out[1] is counts and out[2] is probs
