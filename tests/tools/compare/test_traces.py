"""Traces of one step of two jobs: what goes on in them, and what is refused; made traces, with names as GPUs gave
them."""

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
from ditron_train.tools.compare.traces import (
    StepTrace,
    alike_us,
    kernel_differences,
    phases_us,
    read_step_trace,
    short_name,
    show_traces,
)
from ditron_train.tools.trace.timeline import read_chrome_trace


def ran(name, start, length, stream=7, launched=None, category="kernel"):
    """A GPU's event and the host's call, of 5 us, that launched it; ``launched``: when the call returned."""
    correlation = int(start * 1000)
    details = {"stream": stream, "correlation": correlation}
    event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": details}
    if launched is None:
        return [event]
    call = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": launched - 5,
        "dur": 5,
        "args": details,
    }
    return [event, call]


NATIVE = [
    *ran("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1000, 100, 20, 900),
    *ran("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 1100, 300, 7, 910),
    *ran("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1350, 100, 20, 920),
    # From 1450 nothing runs; the host hands the next over at 1490.
    *ran(
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>(int, X)",
        1500,
        40,
        7,
        1490,
    ),
    *ran("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 1540, 60, 7, 1500),
]
OURS = [
    *ran("Memcpy PtoP (Device -> Device)", 1000, 80, 21, category="gpu_memcpy"),
    *ran("ag_gemm_kernel", 1000, 320, 7, 910),
    *ran("gemm_rs_kernel", 1330, 100, 7, 920),  # its launch was there: the device waited for something else
    *ran("gather_wait_kernel", 1430, 20, 7, 930),
    *ran("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", 1460, 40, 7, 935),
]


def job(folder, events=None, step=2, rank=0, features=(), **header):
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


def test_what_goes_on_in_a_step(tmp_path):
    native, ours = (
        read_chrome_trace(job(tmp_path / n, events) / "trace-rank0.json") for n, events in (("a", NATIVE), ("b", OURS))
    )
    assert list(phases_us(native).values()) == [600, 360, 40, 200, 150, 50, 40]
    assert list(phases_us(ours).values()) == [500, 420, 40, 100, 20, 20, 0]


def test_the_clock_shows_in_what_both_ran_alike(tmp_path):
    slow = [{**event, "ts": 1.05 * event["ts"], "dur": 1.05 * event["dur"]} for event in NATIVE]
    native, slower, ours = (
        read_chrome_trace(job(tmp_path / name, events) / "trace-rank0.json")
        for name, events in (("a", NATIVE), ("b", slow), ("c", OURS))
    )
    # The first GEMM has a reduce-scatter beside it: the addition and the second GEMM are left, of which the names and
    # numbers agree.
    assert alike_us(native, native) == (100, 100)
    assert alike_us(native, slower) == pytest.approx((100, 105))
    assert alike_us(native, ours) is None


def test_kernels_whose_time_differs_most(tmp_path):
    native, ours = (
        read_chrome_trace(job(tmp_path / n, events) / "trace-rank0.json") for n, events in (("a", NATIVE), ("b", OURS))
    )
    first, second, *others = kernel_differences(native, ours)
    assert (first.name, first.counts, first.us) == ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", (2, 0), (360, 0))
    assert (second.name, second.counts, second.us) == ("ag_gemm_kernel", (0, 1), (0, 320))
    assert len(others) == 7 and len(kernel_differences(native, ours, 3)) == 3
    assert [k.difference_us for k in kernel_differences(ours, ours)] == [0] * 5


@pytest.mark.parametrize(
    "name, short",
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllGather_RING_LL"),
        ("Memcpy PtoP (Device -> Device)", "Memcpy PtoP (Device -> Device)"),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", "spin_kernel"),
        (
            "void at::native::elementwise_kernel<4, at::f(at::T&)::{lambda()#3}>(int, X)",
            "elementwise_kernel<4, f(T&)::{lambda()#3}>",
        ),
        ("ag_gemm_kernel", "ag_gemm_kernel"),
        ("k" * 80, "k" * 53 + "..."),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short


def test_notes_with_traces_print_them(tmp_path, capsys):
    native, ours = job(tmp_path / "native", NATIVE), job(tmp_path / "ours", OURS, features=["tp"])
    assert read_job(native).step_ms(1) == pytest.approx(300)  # of step 3 alone
    assert compare("--notes", native, ours) == 0
    printed = capsys.readouterr().out
    assert "rank 0 in step 2, ms" in printed and "ag_gemm_kernel" in printed and "-0.10" in printed
    assert compare("--notes", native, job(tmp_path / "without", features=["tp"])) == 0
    assert "kernel" not in capsys.readouterr().out


def test_traces_that_are_not_there(tmp_path):
    native, without = job(tmp_path / "native", NATIVE), job(tmp_path / "without", features=["tp"])
    with pytest.raises(SettingError, match="without recorded no trace: start it with --ditron-record-trace"):
        compare("--trace", "--notes", native, without)
    ours = job(tmp_path / "ours", OURS, features=["tp"])
    trace = ours / "trace-rank0.json"
    for text, says in (
        ("{", "is no Chrome trace"),
        ("\xff", "is no Chrome trace"),
        ('{"traceEvents": []}', "holds nothing that ran"),
    ):
        trace.write_bytes(text.encode("latin-1"))
        with pytest.raises(SettingError, match=f"trace-rank0.json {says}"):
            compare("--notes", native, ours)
    trace.unlink()
    with pytest.raises(SettingError, match="no trace .*trace-rank0.json: did the job end before step 2"):
        compare("--notes", native, ours)
    with pytest.raises(SettingError, match="different ranks: 0 natively, 3 with"):
        compare("--notes", native, job(tmp_path / "other", OURS, rank=3, features=["tp"]))
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
