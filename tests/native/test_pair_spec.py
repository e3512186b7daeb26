"""Pairs of a movement and a grouped GEMM: what they are compared on is made while kernels run."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")
from ditron_train.megatron.ep import pair_spec, spec  # noqa: E402
from ditron_train.megatron.shared import values  # noqa: E402


def test_data_is_made_before_kernels_are_only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, is_compiling = [], []

    @contextlib.contextmanager
    def compiling(context):
        is_compiling.append(True)
        yield
        is_compiling.pop()

    def data(self):
        seen.append(bool(is_compiling))
        bodies = dict.fromkeys(pair_spec._PAIRS, lambda call: [])
        return SimpleNamespace(), bodies, [], "words"

    monkeypatch.setattr(pair_spec, "compiling", compiling)
    monkeypatch.setattr(pair_spec._PairRuns, "_data", property(data))
    monkeypatch.setattr(pair_spec._PairRuns, "_call", lambda self, chosen: None)
    monkeypatch.setattr(
        pair_spec,
        "dist",
        SimpleNamespace(get_rank=lambda g: 0, get_world_size=lambda g: 1, barrier=lambda group: None),
    )
    linear = SimpleNamespace(weight0=torch.empty(8, 8), fuse_wgrad_accumulation=True)
    experts = SimpleNamespace(linear_fc1=linear, linear_fc2=linear)
    runs = pair_spec._PairRuns(experts, None, None, torch.empty(1, 8), "descending", None)
    runs.compile()
    assert seen and not seen[0]


def test_weights_that_are_not_there_yet_have_values() -> None:
    """Megatron-FSDP's fine-grained gathers give experts' weights memory when their own layer is called."""
    weight = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    own = values.own_or_normal(weight, 3)
    assert own.data_ptr() == weight.data_ptr() and not own.requires_grad
    weight.data.untyped_storage().resize_(0)
    first, again, other = (values.own_or_normal(weight, seed) for seed in (3, 3, 4))
    assert first.shape == weight.shape and first.dtype == weight.dtype and not first.requires_grad
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_plan_tells_jobs_apart_whose_gradients_are_rounded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal in bf16 is not yet equal in the fp32 of ``main_grad``."""
    monkeypatch.setattr(pair_spec._PairRuns, "_data", property(lambda self: (None, {}, [], "sizes")))

    def words(ragged: bool, fused: bool, dtype: torch.dtype | None) -> str:
        weight = torch.empty(8, 8)
        if dtype is not None:
            weight.main_grad = torch.empty(8, 8, dtype=dtype)
        linear = SimpleNamespace(weight0=weight, fuse_wgrad_accumulation=fused)
        experts, layout = SimpleNamespace(linear_fc1=linear, linear_fc2=linear), SimpleNamespace(ragged=ragged)
        return pair_spec._PairRuns(experts, layout, None, torch.empty(1, 8), "descending", None).words

    jobs = [(False, False, None), (True, False, None), (False, True, torch.float32), (False, True, torch.bfloat16)]
    assert len({words(*job) for job in jobs}) == len(jobs)
    assert words(False, True, None) == words(False, True, torch.float32)


def test_a_plan_tells_routers_of_other_types_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allgather dispatcher adds results up over ranks in the type of the probabilities."""
    monkeypatch.setattr(spec, "num_nodes", lambda group: 1)

    def words(dtype: torch.dtype) -> str:
        tokens, routed = torch.empty(2, 4, 8, dtype=torch.bfloat16), torch.empty(8, 4, dtype=torch.bool)
        call = spec.MovementCall(lambda native: None, tokens, routed, routed.to(dtype), 2, False, None)
        return spec._words("ep movement", call, 8, None)

    assert words(torch.bfloat16) == "ep movement 8 tokens x 8, top-2 of 4, torch.bfloat16"
    assert words(torch.float32) == f"{words(torch.bfloat16)}, probabilities torch.float32"
