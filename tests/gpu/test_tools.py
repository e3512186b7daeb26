"""The tools on GPUs, under torchrun: verify with the ops of every subpackage, and traces of ops and steps."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed as dist

from tests.support import tool_arguments

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs"),
    pytest.mark.usefixtures("own_gpus"),
]
pytest.importorskip("megatron.core")

MODEL = (
    "--hidden-size 1024 --num-attention-heads 16 --num-query-groups 8 --seq-length 2048 --num-experts 8 "
    "--group-query-attention --swiglu --moe-ffn-hidden-size 512"
).split()
OPS = {
    "pp": {"send_recv", "pipeline_step"},
    "sp": {"gemm_a2a", "a2a_gemm", "qkv_projection", "output_projection", "to_heads", "to_sequence"},
    "muon": {"muon_step"},
    "ep": {
        *("dispatch", "combine", "flex_dispatch", "flex_combine", "group_gemm", "group_dgrad", "group_wgrad"),
        *("gathered_experts", "moe_layer"),
    },
}


@pytest.mark.parametrize("room", OPS)
def test_verify_of_a_room(folder, monkeypatch, room):
    """Every bit is equal, one row for each op stands in the file beside the layer's, and nothing is written
    elsewhere."""
    from ditron_train.tools.results import read_results
    from ditron_train.tools.verify.verifier import add_arguments, run

    monkeypatch.setenv("DITRON_POLICY", "bits")
    monkeypatch.chdir(folder)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--column", "1024", "512", "512", "--repetitions", "1", "--warmup", "1"]
    words = [*options, "--packages", room, "--output", str(folder / "out"), "--", *MODEL]
    assert run(tool_arguments.parse(parser, words)) == 0
    dist.barrier()
    (path,) = folder.glob("**/*.json")
    _, rows = read_results(path)
    assert path.name == "verify.json" and {row.op for row in rows} == {"column_linear"} | OPS[room]
    assert all(row.bitwise_equal for row in rows)


@pytest.mark.parametrize(
    "op", ["ag_gemm", "gemm_a2a", "send_recv", "layer", "layer_ar", "attention_layer", "moe_layer"]
)
def test_trace(folder, op):
    """Native's communication is found (the fused path may be inside its kernels), the head start is not."""
    from ditron_train.tools.trace.record import record_op
    from ditron_train.tools.trace.timeline import read_chrome_trace

    if op == "attention_layer":
        pytest.importorskip("transformer_engine")
    assert record_op(op, None, folder) == 0
    if dist.get_rank() == 0:
        for name in ("native", "fused"):
            intervals = read_chrome_trace(folder / f"{op}-{name}.json")
            assert intervals[0].start_us == 0.0 and not any("spin_kernel" in interval.name for interval in intervals)
            assert max(interval.end_us for interval in intervals) < 200_000
            assert name == "fused" or any(interval.kind == "communication" for interval in intervals)


def test_trace_of_a_step(folder):
    """One rank's work between ``start`` and ``stop``, and nothing else: not what the ranks meet by."""
    from ditron_train.megatron.plugin.record_trace import StepTracer, trace_path
    from ditron_train.tools.trace.timeline import is_gemm, read_chrome_trace

    x, total = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16), torch.ones(1 << 20, device="cuda")

    def step() -> None:
        torch.mm(x, x)
        dist.all_reduce(total)

    step()
    path = trace_path(folder, 1)
    tracer = StepTracer(path if dist.get_rank() == 1 else None)
    tracer.start()
    step()
    tracer.stop()
    step()
    intervals = read_chrome_trace(path)
    assert [is_gemm(interval) for interval in intervals].count(True) == 1
    assert [interval.kind for interval in intervals].count("communication") == 1
    assert all(interval.launched_us is not None for interval in intervals)
