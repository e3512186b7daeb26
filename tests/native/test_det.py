"""Feature ``det``: the fill of new tensors goes where no bit depends on it, and training is as it was."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
import det_workers as workers  # noqa: E402

from ditron_train.megatron.det.step_state import unsupported_reason  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402

Case = workers.jobs.Case
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
SMALL = Case("det", {}, config=DROPOUT)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
CASES = {
    "one_rank": (1, SMALL),
    "data_parallel_overlapped": (2, Case("det", {}, config=DROPOUT, sharded=True)),
    "tensor_parallel_bf16": (2, Case("det", {"tensor_model_parallel": 2}, dtype=torch.bfloat16, config=DROPOUT)),
    "interleaved": (
        2,
        Case(
            "det",
            {"pipeline_model_parallel": 2, "virtual_pipeline_model_parallel": 2},
            layers=4,
            config=DROPOUT,
            sharded=True,
        ),
    ),
    "mtp_tied_pipeline": (
        2,
        Case("det", {"pipeline_model_parallel": 2}, config={"variable_seq_lengths": True}, mtp=True, tied=True),
    ),
    "experts": (2, Case("det", {"expert_model_parallel": 2}, config={**EXPERTS, **DROPOUT})),
    "fused_wgrad": (
        2,
        Case(
            "det,wgrad",
            {"tensor_model_parallel": 2},
            dtype=torch.float16,
            config={"gradient_accumulation_fusion": True},
            needed="wgrad",
        ),
    ),
    "with_tp": (2, Case("tp", {"tensor_model_parallel": 2}, config=DROPOUT, needed="tp")),
}


@pytest.mark.parametrize("name", CASES)
def test_fill_goes_and_training_stays(name):
    ranks, case = CASES[name]
    for rank, (different, is_filled, lines) in enumerate(run_workers(ranks, workers.compared, case)):
        assert different == [] and not is_filled
        assert [line.partition(" (")[0] for line in lines] == (
            ["det: fill of new tensors off: bits do not depend on it"] if rank == 0 else []
        )


def _reasons(outcomes):
    """Why new tensors stay filled, as rank 0 says; nothing differs on any rank."""
    assert all(different == [] and is_filled for different, is_filled, _ in outcomes)
    assert all(lines == [] for *_, lines in outcomes[1:])
    (line,) = [line for line in outcomes[0][2] if line.startswith("det: ")]
    return line.removeprefix("det: new tensors stay filled with NaN: ")


def test_modules_that_keep_numbers_and_tensors():
    ((different, is_filled, _),) = run_workers(1, workers.count_calls, SMALL)
    assert different == [] and not is_filled


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_unwritten_memory_is_found(ranks):
    reason = _reasons(run_workers(2, workers.read_unwritten, ranks, Case("det", {})))
    line = 1 + Path(workers.__file__).read_text().split("\n").index(
        "        unwritten = torch.empty(3, device=x.device)"
    )
    place = f"aten.empty.memory_format at {workers.__file__}:{line} (rank {ranks[0]})"
    assert reason.startswith(f"a result depends on what {place} left unwritten")


@pytest.mark.parametrize(
    ("place", "ranks", "number"),
    [("digest", (0, 1), 1), ("digest", (1,), 2), ("_RandomStates", (1,), 1), ("_forward_step", (0, 1), 4)],
)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_an_error_inside_the_check(place, ranks, number, error):
    reason = _reasons(run_workers(2, workers.fail, Case("det", {}, config=DROPOUT), place, ranks, error, number))
    assert f"{error.__name__}: inside the check" in reason


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gradients", "there are gradients already"),
        ("iterator", "the data come from something that is no iterator"),
        ("batches", "batches cannot be copied"),
    ],
)
def test_steps_that_cannot_run_again(kind, words):
    assert words in _reasons(run_workers(1, workers.refused, kind, SMALL))


def test_the_setting_switches_it_off():
    ((different, is_filled, lines),) = run_workers(1, workers.compared, SMALL, env={"DITRON_DET": "off"})
    assert (different, is_filled, lines) == ([], True, ["det: off by DITRON_DET"])


@pytest.mark.parametrize("kind", ["not deterministic", "no fill"])
def test_nothing_is_done_without_the_fill(kind):
    ((different, is_filled, lines),) = run_workers(1, workers.without_the_fill, kind, SMALL)
    assert different == [] and lines == [] and is_filled == (kind == "not deterministic")


def test_steps_without_the_fill_are_counted():
    assert run_workers(1, workers.counted_steps, SMALL) == [{"det": 3}]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_embeddings_are_taken_from_here(tp, tied):
    sizes = {"tensor_model_parallel": tp}
    case = Case("det", sizes, dtype=torch.bfloat16, config={"deterministic_mode": True}, tied=tied)
    outcomes = run_workers(2, workers.embedded, case, env={"DITRON_POLICY": "bits"})
    assert outcomes == [([], False, 3 + 3 * 2)] * 2  # steps, and the embeddings of two microbatches each


class _Model(torch.nn.Linear):
    def __init__(self, **options):
        super().__init__(2, 2)
        self.config = SimpleNamespace(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "FP8 by a recipe with a history"),
        ({"fp8": "e4m3", "fp8_recipe": "custom"}, "FP8 by a recipe with a history"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise", "cuda_graph_impl": "none", "fp4": None}, None),
        ({"fp4": "e2m1"}, "FP4"),
        ({"cuda_graph_impl": "local"}, "CUDA graphs"),
        ({"enable_cuda_graph": True}, "CUDA graphs"),
        ({"fine_grained_activation_offloading": True}, "offloaded"),
        ({"cpu_offloading": True}, "offloaded"),
        ({}, None),
    ],
    ids=str,
)
def test_configurations_whose_steps_cannot_run_again(options, words):
    reason = unsupported_reason([_Model(**options)], [None, iter([])])
    assert reason is None if words is None else words in reason


def test_other_wrappers_of_gradients():
    wrapped = _Model()
    assert unsupported_reason(wrapped, [1, 2]) == "the data come from something that is no iterator"
    wrapped.weight.grad = torch.ones(2, 2)
    assert unsupported_reason(wrapped, None) == "there are gradients already"
    wrapped.weight.to_local = None
    assert unsupported_reason(wrapped, None) == "parameters are split over ranks (FSDP)"


def test_a_rank_without_batches():
    ((different, is_filled, _),) = run_workers(1, workers.without_iterator, SMALL)
    assert different == [] and not is_filled
