"""What newer versions of Megatron-core call differently or add: asked for by one question, or refused by name."""

from __future__ import annotations

import enum
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ditron_train.megatron import compat
from ditron_train.megatron.compat import config as compat_config

Part = enum.Enum("Part", ["attn", "moe_router", "moe_preprocess", "full_iteration"])
X = torch.zeros(2, 2, dtype=torch.bfloat16)


def _config(**values: Any) -> Any:
    return SimpleNamespace(**values)


@pytest.mark.parametrize("name", ["cuda_graph_scope", "cuda_graph_modules"])
def test_captured_parts_by_either_name(name: str) -> None:
    assert compat.captured_parts(_config(**{name: [Part.attn]})) is None
    assert compat.captured_parts(_config(cuda_graph_impl="none", **{name: [Part.attn]})) is None
    for nothing in ([], "full", None):
        config = _config(cuda_graph_impl="local", **{name: nothing})
        assert compat.captured_parts(config) == frozenset() and compat.captures_dispatch(config)
    config = _config(cuda_graph_impl="local", **{name: [Part.attn, Part.moe_router]})
    assert compat.captured_parts(config) == {"attn", "moe_router"} and not compat.captures_dispatch(config)
    config = _config(cuda_graph_impl="transformer_engine", **{name: [Part.moe_router, Part.moe_preprocess]})
    assert compat.captures_dispatch(config)


def test_newer_versions_clear_the_old_name() -> None:
    config = _config(cuda_graph_impl="local", cuda_graph_scope=None, cuda_graph_modules=[Part.attn])
    assert compat.captured_parts(config) == {"attn"} and not compat.captures_iteration(config)


def test_a_whole_iteration_is_an_implementation_or_a_scope() -> None:
    assert compat.captures_iteration(_config(cuda_graph_impl="full_iteration", cuda_graph_modules=[]))
    assert compat.captures_dispatch(_config(cuda_graph_impl="full_iteration", cuda_graph_modules=[]))
    assert compat.captures_iteration(_config(cuda_graph_impl="local", cuda_graph_scope=[Part.full_iteration]))
    assert compat.captures_iteration(_config(cuda_graph_impl="local", cuda_graph_scope="full_iteration"))
    assert not compat.captures_iteration(_config(cuda_graph_impl="local", cuda_graph_scope=[Part.attn]))


def _experts(**changes: Any) -> Any:
    values = dict(activation_func=F.silu, activation_func_clamp_value=None)
    linear = SimpleNamespace(weight0=SimpleNamespace(**changes.pop("weight", {})), **changes.pop("linear", {}))
    return SimpleNamespace(config=_config(**{**values, **changes}), linear_fc1=linear, linear_fc2=linear)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_transformer_engine_op_fuser": True}, "operation fuser"),
        ({"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size"),
        ({"linear": {"single_grouped_weight": True}}, "one grouped weight"),
        ({"weight": {"gtp_remat_size": 2}}, "shared by 2 ranks"),
    ],
)
def test_experts_that_are_computed_otherwise_stay_megatrons(changes: dict, words: str) -> None:
    assert compat.why_not_experts(_experts()) is None
    assert words in str(compat.why_not_experts(_experts(**changes)))


def test_a_clamp_of_swiglu_is_refused_where_megatron_applies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = _experts(activation_func_clamp_value=7.0)
    monkeypatch.setattr(compat_config, "_clamps_swiglu", lambda: True)
    assert "activation_func_clamp_value" in str(compat.why_not_experts(experts))
    monkeypatch.setattr(compat_config, "_clamps_swiglu", lambda: False)
    assert compat.why_not_experts(experts) is None


def test_a_call_that_asks_for_something_new_is_refused() -> None:
    known = {"bias": torch.zeros(1), "allreduce_dgrad": True, "tp_group": object(), "sequence_parallel": True}
    harmless = {"gtp_remat_size": 1, "output_dtype": None, "something": False}
    assert compat.why_not_arguments(X, known) is None and compat.why_not_arguments(X, {**known, **harmless}) is None
    assert compat.why_not_arguments(X, {**known, "output_dtype": torch.bfloat16}) is None
    for new in ({"output_dtype": torch.float32}, {"gtp_remat_size": 2}, {"something": "x"}):
        assert f"{next(iter(new))}=" in str(compat.why_not_arguments(X, {**known, **new}))


def test_a_weight_of_several_ranks_is_refused() -> None:
    assert compat.why_not_weight(torch.zeros(1)) is None and compat.why_not_weight(None) is None
    assert compat.why_not_weight(SimpleNamespace(gtp_remat_size=1)) is None
    assert "4 ranks" in str(compat.why_not_weight(SimpleNamespace(gtp_remat_size=4)))


def test_muon_of_newer_versions_stays_megatrons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.optimizer import muon as native_muon

    from ditron_train.megatron.muon import optimizer

    assert compat.why_not_muon() is None and optimizer.class_map()
    monkeypatch.setattr(native_muon, "get_supported_coefficient_types", tuple, raising=False)
    assert "newer than 0.16" in str(compat.why_not_muon())  # 0.17
    monkeypatch.undo()
    monkeypatch.delattr(native_muon, "TensorParallelMuon")  # 0.18
    assert "newer than 0.16" in str(compat.why_not_muon()) and optimizer.class_map() == {}
    with caplog.at_level(logging.INFO, "ditron_train"):
        optimizer.start()
    assert any("muon: Megatron's own" in message for message in caplog.messages)
