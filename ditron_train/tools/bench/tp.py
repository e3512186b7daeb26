"""Benchmark of tensor parallelism: AG-GEMM and GEMM-RS, the backward of both linear layers, and a transformer layer.

Native is what Megatron runs (NCCL, then cuBLAS or the reverse; for the backward megatron-core's own function), the
peer is PyTorch's async-TP. All of them, the GEMM alone and the collective alone are measured in one run on the same
inputs.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from ditron_train.data import load_workloads
from ditron_train.runtime.logs import get_logger
from ditron_train.tools.arguments import add_common_arguments, add_shape_argument, check_sizes, choose_models
from ditron_train.tools.bench.tp_contenders import Case, Linear, backward_contenders, op_contenders
from ditron_train.tools.results import Pass, Row
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.timing import Contender, Timing
from ditron_train.tp import TPContext, get_context
from ditron_train.tp.choices import Problem, choose, rates_of
from ditron_train.tp.cost_model import Prediction, predict, wire_bytes

__all__ = ["WIRE_GBPS", "add_arguments", "cases_of", "run"]

WIRE_GBPS = 370.0  # what a copy engine moves over NVLink on an H200, the link speed that limits are computed with
_PARTS = ("ag_gemm", "gemm_rs", "backward", "layer")
_PEER = "async-TP"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench tp``."""
    add_common_arguments(parser, model_option=False)
    parser.add_argument(
        "--model",
        nargs="?",
        action="append",
        metavar="NAME",
        help="alone: show what the cost model predicts beside what was measured; with a name: only this model's shapes "
        "(may be repeated)",
    )
    parser.add_argument("--part", action="append", choices=_PARTS, help="only this part (may be repeated)")
    add_shape_argument(
        parser, "global sizes instead of workloads.json's (may be repeated; default without a GPU: 256 256 256)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, CPU: float32")


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for; returns 1 where bits differ.

    Raises:
        SettingError: No shape is left, or one does not divide over the ranks.
    """
    with bench_session("tp", arguments) as session:
        parts = arguments.part or _PARTS
        with_model = None in (arguments.model or ())
        context = get_context(dist.group.WORLD, session.device)
        cases = {op: cases_of(op, arguments, session) for op in ("ag_gemm", "gemm_rs")}
        dtype = getattr(torch, arguments.dtype) if arguments.dtype else session.dtype
        for op in ("ag_gemm", "gemm_rs"):
            for case in cases[op] if op in parts else ():
                session.add(_op_row(session, case, context, dtype, with_model=with_model))
        if "backward" in parts or "layer" in parts:
            _megatron_rows(session, parts, cases, context, dtype)
        return session.finish()


def _megatron_rows(
    session: BenchSession, parts: tuple[str, ...], cases: dict[str, list[Case]], context: TPContext, dtype: torch.dtype
) -> None:
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        get_logger("bench").warning("megatron-core is not installed: no rows for the backward and the layer")
        return
    from ditron_train.tools.bench.megatron_tp import layer_rows, megatron_world, native_linear

    with megatron_world(session):
        if "backward" in parts:
            for case in (*cases["ag_gemm"], *cases["gemm_rs"]):
                session.add(_backward_row(session, case, context, dtype, native_linear(case.op)))
        if "layer" in parts and session.device.type == "cuda":  # on the CPU a layer's bits are those of another GEMM
            for row in layer_rows(session):
                session.add(row)


def cases_of(op: str, arguments: argparse.Namespace, session: BenchSession) -> list[Case]:
    """The shapes that ``--shape`` and ``--model`` ask for.

    Raises:
        SettingError: A model is unknown, a size not above 0, or a shape does not divide over the ranks.
    """
    check_sizes("--shape", arguments.shape)
    published = [
        Case(op, shape["model"], shape["M"], shape["N"], shape["K"]) for shape in load_workloads()[op]["shapes"]
    ]
    wanted = choose_models([name for name in arguments.model or () if name], [case.model for case in published])
    shapes = arguments.shape or ([(256, 256, 256)] if session.device.type == "cpu" else None)
    if shapes is not None:
        cases = [Case(op, "custom", *shape) for shape in shapes]
    else:
        cases = [case for case in published if case.model in wanted]
    for case in cases:
        case.check(session.world_size)
    return cases


def _op_row(session: BenchSession, case: Case, context: TPContext, dtype: torch.dtype, *, with_model: bool) -> Row:
    contenders = op_contenders(session, case, context, dtype)
    _drop_idle_peer(session, case.op, contenders)
    equal = all(session.equal([contenders["ditron"](i)], [contenders["native"](i)]) for i in range(2))
    timings = session.measure(contenders)
    problem = case.problem(dtype, session.world_size)
    predicted = None
    if with_model:
        predicted = predict(problem, choose(problem, context.machine), context.machine, rates_of(context.machine))
    return _row(
        session, case, "forward", dtype, equal, timings, wire_bytes(problem), _comm_sms(problem, context), predicted
    )


def _drop_idle_peer(session: BenchSession, what: str, contenders: dict[str, Contender]) -> None:
    if session.device.type == "cpu" or not session.attempt(f"{_PEER} {what}", contenders["peer"]):
        del contenders["peer"]


def _backward_row(session: BenchSession, case: Case, context: TPContext, dtype: torch.dtype, native: Linear) -> Row:
    """dgrad with its communication, and wgrad: the whole backward of the layer whose forward is ``case.op``."""
    contenders, results = backward_contenders(session, case, context, dtype, native)
    name = "column_linear" if case.op == "ag_gemm" else "row_linear"
    _drop_idle_peer(session, f"{name} backward", contenders)
    equal = session.equal(results["ditron"], results["native"])
    timings = session.measure(contenders)
    # Column: the input is gathered and its gradient scattered; row: the output's gradient is gathered.
    num_bytes = wire_bytes(case.problem(dtype, session.world_size)) * (2 if case.op == "ag_gemm" else 1)
    comm_sms = 0
    if case.op == "gemm_rs":
        problem = Problem("ag_gemm", case.m, case.k // session.world_size, case.n, "nn", dtype, session.world_size)
        comm_sms = _comm_sms(problem, context)
    renamed = Case(name, case.model, case.m, case.n, case.k)
    return _row(session, renamed, "backward", dtype, equal, timings, num_bytes, comm_sms)


def _comm_sms(problem: Problem, context: TPContext) -> int:
    """SMs that the GEMM leaves to the communication; the tiles of GEMM-RS are sent by the GEMM itself."""
    if problem.op == "gemm_rs" or context.target == "interpreter":
        return 0
    plan = choose(problem, context.machine).gather
    return plan.push_programs if plan.mode == "push" else 1  # behind copy engines one program forwards their signals


def _row(
    session: BenchSession,
    case: Case,
    direction: Pass,
    dtype: torch.dtype,
    equal: bool,
    timings: dict[str, Timing],
    num_bytes: float,
    comm_sms: int,
    predicted: Prediction | None = None,
) -> Row:
    times = {name: timing.median_us for name, timing in timings.items()}
    on_gpu = session.device.type == "cuda"
    return session.row(
        case.op, direction, case.model, case.shape, timings, equal,
        dtype=dtype,
        comm_sms=comm_sms,
        gemm_us=times["gemm"],
        comm_us=times["comm"],
        limit_us=max(times["gemm"], num_bytes / WIRE_GBPS / 1e3) if on_gpu else None,
        peer=_PEER if "peer" in times else None,
        peer_us=times.get("peer"),
        wire_gbps=num_bytes / times["ditron"] / 1e3,
        model_native_us=predicted and predicted.native_us,
        model_us=predicted and predicted.ditron_us,
    )  # fmt: skip
