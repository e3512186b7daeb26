"""``--ditron muon`` inside megatron-core, on gloo: weights equal native's, whole, sharded, tensor parallel, with
experts."""

from __future__ import annotations

import importlib
import pathlib
import sys

import pytest

from tests.support.megatron_version import is_newer_than_0_17
from tests.support.processes import WorkerPool, run_workers, run_workers_once

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
workers = importlib.import_module("muon_workers")


@pytest.fixture(scope="module")
def fresh_workers():
    """Processes in which megatron-core's Muon has not been imported without emerging_optimizers."""
    with WorkerPool(2) as pool:
        yield pool


NATIVE_CASES = {
    "whole": (False, 1, {}),
    "whole, clipped, nesterov": (False, 1, dict(clip_grad=0.5, muon_use_nesterov=True)),
    "sharded": (True, 1, {}),
    "sharded, clipped, nesterov": (True, 1, dict(clip_grad=0.5, muon_use_nesterov=True)),
    "sharded, experts": (True, 1, dict(num_experts=4)),
    "bf16": (False, 1, dict(bf16=True, clip_grad=0.5)),
    "sharded, bf16": (True, 1, dict(bf16=True)),
    "sharded, bf16, clipped": (True, 1, dict(bf16=True, clip_grad=0.5)),
    "tensor parallel, blockwise": (False, 2, dict(muon_tp_mode="blockwise", clip_grad=0.5)),
    "sharded over one rank": (True, 2, dict(muon_tp_mode="duplicated")),
    "tensor parallel, duplicated": (False, 2, dict(muon_tp_mode="duplicated", clip_grad=0.5)),
    "tensor parallel, distributed": (False, 2, dict(muon_tp_mode="distributed", clip_grad=0.5)),
    "sharded, distributed": (True, 1, dict(muon_tp_mode="distributed")),
    "sharded, distributed, bf16": (True, 1, dict(muon_tp_mode="distributed", bf16=True, clip_grad=0.5)),
    "qkv together, fp32, other scale": (
        False, 1, dict(muon_split_qkv=False, muon_fp32_matmul_prec="highest", muon_scale_mode="unit_rms_norm"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NATIVE_CASES)
def test_weights_equal_those_of_the_native_optimizer(case, fresh_workers):
    layer_wise, _, options = NATIVE_CASES[case]
    if layer_wise and not options.get("bf16") and is_newer_than_0_17():
        pytest.skip("since 0.18 fp32 is not sharded layer-wise, natively neither")
    results = [r.value if r.ok else (r.error, r.traceback) for r in
               fresh_workers.run(workers.native_and_fused_agree, NATIVE_CASES[case], 200.0)]  # fmt: skip
    assert results == [([], True), ([], True)]


@pytest.mark.parametrize("num_experts, sharding", [(None, "native"), (None, "cost"), (4, "native"), (4, "auto")])
def test_layer_wise_sharding_gives_the_weights_of_the_whole_step(num_experts, sharding):
    results = run_workers(2, workers.muon_and_dist_muon_agree, num_experts, sharding)
    for different, same_losses, losses, owned, num_params in results:
        assert not different and same_losses and len(set(losses)) == 4
        assert 0 < owned < num_params
    assert sum(owned for _, _, _, owned, _ in results) == results[0][-1]


BY_COST, NATIVELY = (
    (["dist_muon: matrices dealt out by cost"], False),
    (["dist_muon: matrices dealt out as megatron-core does"], True),
)


@pytest.mark.parametrize(
    "sharding, tensor_parallel, options, expected",
    [
        ("auto", 1, {}, BY_COST),
        ("auto", 1, dict(clip_grad=1.0), NATIVELY),
        ("cost", 1, dict(clip_grad=1.0), BY_COST),
        ("cost", 2, {}, ([], True)),  # one data-parallel rank
        ("cost", 1, dict(muon_tp_mode="distributed"), ([], True)),  # no matrix takes our Muon
    ],
)
def test_matrices_are_dealt_out_by_cost_where_it_helps(sharding, tensor_parallel, options, expected, fresh_workers):
    call = (sharding, tensor_parallel, {"bf16": True, **options})
    first, second = fresh_workers.run(workers.how_matrices_are_dealt, call, 200.0)
    assert first.ok and second.ok, first.traceback or second.traceback
    assert first.value == expected and second.value == ([], expected[1])  # rank 0 logs


def test_layer_wise_sharding_sends_the_data_that_parameters_have():
    assert run_workers(2, workers.data_that_is_replaced, 2) == [[]] * 2


@pytest.mark.parametrize(
    "layer_wise, from_fused, sharding",
    [(False, True, "auto"), (True, True, "native"), (True, False, "native"), (True, False, "cost")],
)
def test_checkpoints_interchange_with_native(layer_wise, from_fused, sharding, fresh_workers, tmp_path):
    options = dict(muon_use_nesterov=True, bf16=layer_wise)  # native saves the sharded optimizer only in bf16
    call = (str(tmp_path), layer_wise, from_fused, sharding, options)
    results = [r.value if r.ok else (r.error, r.traceback) for r in
               fresh_workers.run(workers.checkpoints_interchange, call, 200.0)]  # fmt: skip
    assert results == [([], True), ([], True)]


@pytest.mark.parametrize("from_fused", [True, False])
@pytest.mark.parametrize(
    "job", [dict(ckpt_format="torch"), dict(ckpt_format="torch_dist", ckpt_convert_format="torch")], ids=str
)
def test_files_of_ranks_interchange_with_native(job, from_fused, fresh_workers, tmp_path):
    call = (str(tmp_path), from_fused, job)
    results = [r.value if r.ok else (r.error, r.traceback) for r in
               fresh_workers.run(workers.files_of_ranks_interchange, call, 200.0)]  # fmt: skip
    assert results == [([], True), ([], True)]


@pytest.mark.timeout(400)
def test_a_resumed_job_has_its_own_flags():
    (result,) = run_workers_once(1, workers.resumed_with_other_flags_agree)
    assert result.ok, result.traceback
    assert result.value


@pytest.mark.timeout(400)
def test_what_is_not_supported_builds_the_native_optimizer():
    (result,) = run_workers_once(1, workers.what_is_refused_runs_natively)
    assert result.ok, result.traceback
    kinds, lines, error, states, groups, momentum, generators = result.value
    assert kinds == {name: name != "taken" for name in kinds}
    assert len(lines) == len(kinds) - 1 and "muon: native, --muon-tp-mode distributed is another algorithm" in lines
    assert error == "num_ns_steps must be at least 1, got 0"
    assert states == {"momentum_buffer"}
    assert groups == [["lr", "lr_mult", momentum, "params", "weight_decay"]] * 3  # natively, fused, fused loaded
    assert generators == [2, 2]  # natively, fused


@pytest.mark.timeout(400)
def test_restore_brings_native_back():
    for during, restored in run_workers(2, workers.restore_brings_native_back):
        assert during == ("DitronTensorParallelMuon", True) and restored
