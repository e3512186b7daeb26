"""Training with Adam in one pass, against the same training natively: losses, norms, parameters, state."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
import adam_workers as workers  # noqa: E402

from tests.support.processes import WorkerPool, run_workers  # noqa: E402

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
Case = workers.jobs.Case
FUSED = {
    "clipped, overlapped": (workers.BF16,),
    "not overlapped": (workers.BF16, {}, False),
    "not clipped": (workers.BF16, {"clip_grad": 0.0}),
    "clipped to more": (workers.BF16, {"clip_grad": 1e3}),
    "l2, no decay": (workers.BF16, {"decoupled_weight_decay": False, "weight_decay": 0.0}),
    "zeros are counted": (workers.BF16, {"log_num_zeros_in_grad": True}),
    "fp32": (Case("adam", {}, sharded=True),),
    "not distributed": (Case("adam", {}, dtype=torch.bfloat16),),
    "not distributed, not clipped": (Case("adam", {}, dtype=torch.bfloat16), {"clip_grad": 0.0}, False),
    "experts": (
        Case("adam", {"expert_model_parallel": 2}, dtype=torch.bfloat16, config=EXPERTS, sharded=True),
        {"clip_grad": 0.05},
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_as_natively(name):
    for differ, lines, count in run_workers(2, workers.compared, *FUSED[name]):
        assert not differ and count == (4 if name == "experts" else 2), (differ, lines, count)  # the first is native


@pytest.fixture(scope="module")
def fresh_workers():
    """Processes in which megatron-core's Muon has not been imported without emerging_optimizers."""
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.parametrize("features", ["adam", "muon,adam"])
@pytest.mark.parametrize("layer_wise, clip_grad", [(False, 0.5), (True, 0.5), (True, 0.0)])
def test_what_adamw_steps_beside_muon(layer_wise, clip_grad, features, fresh_workers):
    for outcome in fresh_workers.run(workers.with_muon, (layer_wise, clip_grad, features), 200.0):
        assert outcome.ok, outcome.traceback
        differ, count, lines = outcome.value
        assert not differ and count == 3, (differ, lines, count)  # the first is native


def test_a_checkpoint_is_loaded_natively(tmp_path):
    assert run_workers(2, workers.loaded, tmp_path) == [[], []]


def test_only_contiguous_parameters_and_gradients_are_stepped_in_one_pass():
    from ditron_train.megatron.adam.optimizer import _is_ready

    def is_ready(param, grad):
        param = torch.nn.Parameter(param)
        param.grad = grad
        inner = SimpleNamespace(
            state={param: {"exp_avg": 0}}, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={}
        )
        return _is_ready(SimpleNamespace(optimizer=inner, get_parameters=lambda: [param]))

    plain, transposed = torch.zeros(3, 4), torch.zeros(4, 3).t()
    assert is_ready(plain, plain.clone())
    assert not (is_ready(plain, transposed) or is_ready(transposed, plain) or is_ready(plain, None))
