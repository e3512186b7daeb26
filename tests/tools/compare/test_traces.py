"""Traces of one step of two jobs: what is printed of them, and what is refused; made traces."""

from __future__ import annotations

import argparse
import json

import pytest

from ditron_train.megatron.plugin.arguments import options_from_argv
from ditron_train.megatron.plugin.record_trace import TraceRequest, parse_trace_request
from ditron_train.megatron.plugin.switch import apply_options
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.compare.comparison import add_arguments, run
from ditron_train.tools.compare.steps import read_job
from ditron_train.tools.compare.traces import StepTrace, read_step_trace, show_traces
from ditron_train.tools.trace.timeline import read_chrome_trace
from tests.support.made_traces import FUSED, NATIVE


def job(folder, events=None, step=2, rank=0, features=(), fused_calls=None, **header):
    """Notes of three steps, and a trace where there are events."""
    folder.mkdir(parents=True)
    trace = None if events is None else {"step": step, "rank": rank}
    header = {
        "world_size": 1,
        "features": list(features),
        "train_iters": 3,
        "dtype": "",
        "sizes": {},
        "trace": trace,
        **header,
    }
    steps = [
        {
            "losses": {"lm loss": (1.0).hex()},
            "grad_norm": None,
            "step": n,
            "seconds": None if n in (1, step) else n / 10,
            "fused_calls": fused_calls or {},
        }
        for n in (1, 2, 3)
    ]
    (folder / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (header, *steps)))
    if events is not None:
        (folder / f"trace-rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    return folder


def compare(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def test_notes_with_traces_print_them(tmp_path, capsys):
    native, fused = (
        job(tmp_path / "native", NATIVE),
        job(tmp_path / "fused", FUSED, fused_calls={"tp": 3}, features=["tp"]),
    )
    assert read_job(native).step_ms(1) == pytest.approx(300)  # of step 3 alone
    assert compare("--notes", native, fused) == 0
    printed = capsys.readouterr().out
    assert "rank 0 in step 2, ms" in printed and "ag_gemm_kernel" in printed and "-0.10" in printed
    assert compare("--notes", native, job(tmp_path / "without", fused_calls={"tp": 3}, features=["tp"])) == 0
    assert "kernel" not in capsys.readouterr().out


def test_traces_that_are_not_there(tmp_path):
    native, without = job(tmp_path / "native", NATIVE), job(tmp_path / "without", features=["tp"])
    with pytest.raises(SettingError, match="without recorded no trace: start it with --ditron-record-trace"):
        compare("--trace", "--notes", native, without)
    fused = job(tmp_path / "fused", FUSED, fused_calls={"tp": 3}, features=["tp"])
    trace = fused / "trace-rank0.json"
    for text, says in (
        ("{", "is no Chrome trace"),
        ("\xff", "is no Chrome trace"),
        ('{"traceEvents": []}', "holds nothing that ran"),
    ):
        trace.write_bytes(text.encode("latin-1"))
        with pytest.raises(SettingError, match=f"trace-rank0.json {says}"):
            compare("--notes", native, fused)
    trace.unlink()
    with pytest.raises(SettingError, match="no trace .*trace-rank0.json: did the job end before step 2"):
        compare("--notes", native, fused)
    with pytest.raises(SettingError, match="different ranks: 0 natively, 3 with"):
        compare("--notes", native, job(tmp_path / "other", FUSED, rank=3, features=["tp"]))
    with pytest.raises(SettingError, match="name no trace"):
        read_step_trace(native, read_job(job(tmp_path / "foreign", trace={"step": "last"})))


def test_traces_without_a_gpu_say_so(tmp_path, capsys):
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "ts": 5.0, "dur": 10.0, "tid": 1}]
    intervals = read_chrome_trace(job(tmp_path / "cpu", events) / "trace-rank0.json")
    show_traces(StepTrace(2, 0, intervals), StepTrace(3, 0, intervals))
    printed = capsys.readouterr().out
    assert "hold no GPU's work" in printed and "step 2 natively, 3 with ditron_train" in printed


@pytest.mark.parametrize(
    "text, first, last, step",
    [("middle", 1, 20, 15), ("middle", 1, 4, 3), ("middle", 1, 1, 1), ("middle", 101, 104, 103), ("7,3", 1, None, 7)],
)
def test_the_step_that_is_traced(text, first, last, step):
    assert parse_trace_request(text).step_of(first, last) == step


def test_steps_that_cannot_be_traced(tmp_path):
    for text in ("", "0", "last", "3,-1", "3,x", "3,1,2"):
        with pytest.raises(ValueError, match="is not STEP"):
            parse_trace_request(text)
    with pytest.raises(SettingError, match="no step 9 in a job of the steps 1 to 4"):
        TraceRequest(9, 0).step_of(1, 4)
    with pytest.raises(SettingError, match="no step 3 in a job of the steps 101 to its end"):
        TraceRequest(3, 0).step_of(101, None)
    with pytest.raises(SettingError, match="needs to know how long the job is"):
        TraceRequest(None, 0).step_of(1, None)
    with pytest.raises(SettingError, match="needs --ditron-record"):
        apply_options(options_from_argv(["--ditron-record-trace", "3"]))
    with pytest.raises(SettingError, match="--trace-rank has to be 0 or more"):
        compare("--trace", "--trace-rank", -1, "--output", tmp_path, "--ditron", "tp", "torchrun", __file__)
