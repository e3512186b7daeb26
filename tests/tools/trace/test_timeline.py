"""Timelines: what counts as communication, what is exposed, and a recorded run on CPU processes."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditron_train.runtime.errors import NotSupportedError, SettingError
from ditron_train.tools.trace.record import record_op
from ditron_train.tools.trace.timeline import (
    Interval,
    exposed,
    idle,
    is_gemm,
    not_launched,
    read_chrome_trace,
    total_us,
    union,
)  # fmt: skip
from tests.support.processes import run_workers


def gpu_event(name: str, start: float, length: float, stream: int, category: str = "kernel") -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": 1, "args": {"stream": stream}}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 5.0, "tid": 3},
    gpu_event("ncclDevKernel_AllGather_RING_LL", 100.0, 50.0, 20),
    gpu_event("nvjet_tst_128x256", 150.0, 100.0, 7),
    gpu_event("Memcpy PtoP (Device -> Device)", 240.0, 30.0, 21, "gpu_memcpy"),
    gpu_event("ag_gemm_kernel", 300.0, 100.0, 7),
    gpu_event("push_shard_kernel", 310.0, 50.0, 22),
]


def write(path: Path, events: list[dict]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_gpu_trace(tmp_path: Path) -> None:
    intervals = read_chrome_trace(write(tmp_path / "t.json", EVENTS))
    assert [(i.lane, i.kind, i.start_us, i.end_us) for i in intervals] == [
        ("stream 20", "communication", 0.0, 50.0),
        ("stream 7", "compute", 50.0, 150.0),
        ("copy engine, stream 21", "communication", 140.0, 170.0),
        ("stream 7", "compute", 200.0, 300.0),
        ("stream 22", "communication", 210.0, 260.0),
    ]
    assert exposed(intervals) == [(0.0, 50.0), (150.0, 170.0)]


def test_the_device_hold_is_left_out(tmp_path: Path) -> None:
    events = [
        gpu_event("ncclDevKernel_AllReduce_Sum_f32", 0.0, 5.0, 7),
        gpu_event("spin_kernel(long)", 10.0, 100.0, 7),
        gpu_event("ncclDevKernel_AllReduce_Sum_f32", 110.0, 20.0, 7),
        gpu_event("gemm", 150.0, 50.0, 7),
        gpu_event("push_shard_kernel", 150.0, 20.0, 9),
        gpu_event("ncclDevKernel_AllReduce_Sum_f32", 210.0, 5.0, 7),
    ]
    intervals = read_chrome_trace(write(tmp_path / "t.json", events))
    assert [(i.lane, i.start_us) for i in intervals] == [("stream 7", 0.0), ("stream 9", 0.0), ("stream 7", 60.0)]


@pytest.mark.parametrize("text", ["", "[]", '{"events": []}', "not json"])
def test_foreign_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "foreign.json").write_text(text)
    with pytest.raises(ValueError, match="foreign.json"):
        read_chrome_trace(tmp_path / "foreign.json")


#: What the fused ones launch, by what runs in it.
GEMMS = """
    ag_gemm_kernel gemm_rs_kernel gemm_kernel gemm_a2a_kernel a2a_gemm_kernel
    gemm_combine_kernel group_gemm_kernel group_wgrad_kernel addmm_kernel
    symmetric_kernel
""".split()
COMMUNICATION = """
    push_kernel push_shard_kernel gather_start_kernel gather_wait_kernel gather_wait_one_kernel push_and_reduce_kernel
    push_largest_kernel receive_kernel arrived_kernel await_kernel
    keys_wait_kernel
    await_message_kernel notify_kernel agree_kernel push_tokens push_ahead place_arrived return_rows sum_returned
    exchange_counts
""".split()
OTHERS = """
    copy_rows_kernel place_tokens sum_rows reduce_rows_kernel reduce_all_kernel reduce_local_shard_kernel
    normalize_kernel sum_tokens_kernel
    momentum_kernel update_kernel list_tiles plan_tiles count_chunks list_entries scale_kernel handover_kernel
    reduce_onto_kernel exponentials_kernel gradient_kernel add_steps_kernel sum_keys_kernel adam_kernel
""".split()


def read_names(tmp_path: Path, names: list[str]) -> list[Interval]:
    return read_chrome_trace(
        write(tmp_path / "names.json", [gpu_event(name, index, 1, 7) for index, name in enumerate(names)])
    )


def test_every_kernel_of_fused_is_known(tmp_path: Path) -> None:
    """By their names: a new one has to be put into a list here, and be told apart there."""
    package = Path(__file__).parents[3] / "ditron_train"
    functions = (
        node for path in package.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    kernels = {
        node.name
        for node in functions
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(mark).startswith("triton.jit") for mark in node.decorator_list)
    }
    known = {*GEMMS, *COMMUNICATION, *OTHERS}
    assert {name for name in kernels if name.endswith("_kernel")} <= known <= kernels
    assert all(is_gemm(interval) for interval in read_names(tmp_path, GEMMS))
    assert all(interval.kind == "communication" for interval in read_names(tmp_path, COMMUNICATION))
    assert not any(interval.kind == "communication" or is_gemm(interval) for interval in read_names(tmp_path, OTHERS))


def test_kernels_of_others(tmp_path: Path) -> None:
    gemms = [
        "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(X)",
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "void gemv2T_kernel_val<int, float>(X)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<X>>>(Y)",
    ]
    others = [
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26",
        "triton_poi_fused_mul_silu_split_0",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::Fwd<cutlass::gemm::X>>>(Y)",
        "_permute_kernel",
        "void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel<X>(Y)",
        "Memset (Device)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<X>(Y)",
    ]
    moves = ["ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "Memcpy PtoP (Device -> Device)",
             "void c10d::symmetric_memory::barrier_kernel(X)", "void nvshmemi_transfer_rma_kernel(X)"]  # fmt: skip
    assert all(is_gemm(interval) for interval in read_names(tmp_path, gemms))
    assert not any(is_gemm(interval) or interval.kind == "communication" for interval in read_names(tmp_path, others))
    assert all(interval.kind == "communication" for interval in read_names(tmp_path, moves))


def test_the_device_waits_for_the_host_or_for_something_else() -> None:
    def ran(start: int, end: int, launched: int | None) -> Interval:
        return Interval("lane", "compute", "x", start, end, launched_us=launched)

    assert idle([]) == not_launched([]) == []
    early, none, late = ran(0, 10, None), ran(15, 20, None), ran(30, 40, 27)
    assert idle([late, none, early]) == [(10, 15), (20, 30)] and not_launched([late, none, early]) == [(20, 27)]
    assert not_launched([early, ran(20, 30, 5)]) == []
    assert not_launched([early, ran(20, 30, 25)]) == [(10, 20)], "a call that returned when the kernel ran already"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 20)), max_size=12))
def test_exposed_equals_counting_microseconds(spans: list[tuple[bool, int, int]]) -> None:
    intervals = [Interval("lane", "compute" if c else "communication", "x", s, s + n) for c, s, n in spans]
    busy = {kind: {t for i in intervals if i.kind == kind for t in range(int(i.start_us), int(i.end_us))}
            for kind in ("compute", "communication")}  # fmt: skip
    assert total_us(exposed(intervals)) == len(busy["communication"] - busy["compute"])
    both = busy["communication"] | busy["compute"]
    assert total_us(union(intervals)) == len(both)
    assert total_us(idle(intervals)) == (max(both) - min(both) + 1 - len(both) if both else 0)


def _record(folder: str) -> int:
    return record_op("ag_gemm", (64, 64, 64), Path(folder))


def _record_other(op: str, folder: str) -> int:
    return record_op(op, None, Path(folder))


def _record_model(op: str, model: str, folder: str) -> int:
    return record_op(op, None, Path(folder), model=model)


def _refused(op: str, shape: tuple[int, int, int] | None, folder: str, model: str | None = None) -> str:
    try:
        record_op(op, shape, Path(folder), model=model)
    except (SettingError, NotSupportedError) as error:
        return str(error)
    return "accepted"


def test_record_on_cpu_processes(tmp_path: Path) -> None:
    assert run_workers(2, _record, str(tmp_path)) == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ag_gemm-fused.json", "ag_gemm-native.json"]
    kinds = {interval.kind for interval in read_chrome_trace(tmp_path / "ag_gemm-native.json")}
    assert kinds == {"compute", "communication"}
    assert any("ditron_train" in interval.name for interval in read_chrome_trace(tmp_path / "ag_gemm-fused.json"))


@pytest.mark.parametrize("op", ["gemm_a2a", "moe_layer", "send_recv"])
def test_ops_of_the_other_packages(tmp_path: Path, op: str) -> None:
    assert run_workers(2, _record_other, op, str(tmp_path)) == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{op}-fused.json", f"{op}-native.json"]


def test_an_op_at_the_shape_of_a_model(tmp_path: Path) -> None:
    assert run_workers(2, _record_model, "send_recv", "ring", str(tmp_path)) == [0, 0]
    assert (tmp_path / "send_recv-ring-fused.json").exists()
    refused = {("send_recv", None, "nobody's"), ("ag_gemm", (64, 64, 64), "LLaMA3.1-70B"), ("moe_layer", None, "x")}
    words = {op: run_workers(2, _refused, op, shape, str(tmp_path), model) for op, shape, model in refused}
    assert len(set(words["send_recv"])) == 1 and "nobody's" in words["send_recv"][0]
    assert words["ag_gemm"] == ["--shape and --model are two shapes"] * 2
    assert words["moe_layer"] == ["--model is of ops; moe_layer is a layer"] * 2


def test_what_cannot_be_recorded_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert (
        run_workers(2, _refused, "ag_gemm", (63, 64, 64), folder)
        == ["ag_gemm 63x64x64 does not divide over 2 ranks: M and N have to"] * 2
    )
    assert run_workers(2, _refused, "layer", None, folder) == ["layer is recorded on GPUs only"] * 2
    assert "has one of its own" in run_workers(2, _refused, "moe_layer", (64, 64, 64), folder)[0]
    assert "take an even number of ranks" in run_workers(1, _refused, "send_recv", None, folder)[0]
    assert "cannot write into /proc/nowhere" in run_workers(2, _refused, "ag_gemm", None, "/proc/nowhere")[0]
