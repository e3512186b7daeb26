"""Benchmark of tensor parallelism: AG-GEMM and GEMM-RS, the backward of both linear layers, and a transformer layer.

Native is what Megatron runs (NCCL, then cuBLAS or the reverse; for the backward megatron-core's own function), the peer is
PyTorch's async-TP. All of them, the GEMM alone and the collective alone are measured in one run on the same inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ditron_train.bench.rows import Row
from ditron_train.bench.session import BenchSession, add_common_arguments, bench_session
from ditron_train.bench.timing import Contender, Timing
from ditron_train.data import load_workloads
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.tp import TPContext, ag_gemm, column_linear, gemm_rs, get_context, row_linear
from ditron_train.tp.tuning import Problem, choose

__all__ = ["WIRE_GBPS", "Case", "add_arguments", "cases_of", "op_contenders", "run"]

WIRE_GBPS = 370.0  # what a copy engine moves over NVLink on an H200, the link speed that limits are computed with
_PARTS = ("ag_gemm", "gemm_rs", "backward", "layer")
_PEER = "async-TP"


@dataclass(frozen=True)
class Case:
    """A shape of ``workloads.json``: global sizes."""

    op: str
    model: str
    m: int
    n: int
    k: int

    @property
    def shape(self) -> dict[str, int]:
        """As it stands in a row."""
        return {"m": self.m, "n": self.n, "k": self.k}

    def problem(self, dtype: torch.dtype, world_size: int) -> Problem:
        """Its forward as one rank sees it."""
        n, k = (self.n // world_size, self.k) if self.op == "ag_gemm" else (self.n, self.k // world_size)
        return Problem(self.op, self.m, n, k, "nt", dtype, world_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench tp``."""
    add_common_arguments(parser)
    parser.add_argument("--part", action="append", choices=_PARTS, help="only this part (may be repeated)")
    parser.add_argument(
        "--shape",
        nargs=3,
        type=int,
        metavar=("M", "N", "K"),
        action="append",
        help="global sizes instead of workloads.json's (may be repeated; default without a GPU: 256 256 256)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, CPU: float32")


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for; returns 1 where bits differ.

    Raises:
        SettingError: No shape is left, or one does not divide over the ranks.
    """
    with bench_session("tp", arguments) as session:
        parts = arguments.part or _PARTS
        context = get_context(dist.group.WORLD, session.device)
        cases = {op: cases_of(op, arguments, session) for op in ("ag_gemm", "gemm_rs")}
        dtype = getattr(torch, arguments.dtype or ("bfloat16" if session.device.type == "cuda" else "float32"))
        for op in ("ag_gemm", "gemm_rs"):
            for case in cases[op] if op in parts else ():
                session.add(_op_row(session, case, context, dtype))
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
    from ditron_train.bench.megatron_tp import layer_rows, megatron_world, native_linear

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
        SettingError: A model is unknown, or a shape does not divide over the ranks.
    """
    shapes = arguments.shape or ([(256, 256, 256)] if session.device.type == "cpu" else None)
    if shapes is not None:
        cases = [Case(op, "custom", *shape) for shape in shapes]
    else:
        workload = load_workloads()[op]["shapes"]
        cases = [Case(op, shape["model"], shape["M"], shape["N"], shape["K"]) for shape in workload]
        wanted = arguments.model or [case.model for case in cases]
        unknown = sorted(set(wanted) - {case.model for case in cases})
        if unknown:
            raise SettingError(f"unknown model {', '.join(unknown)}; there are {', '.join(c.model for c in cases)}")
        cases = [case for case in cases if case.model in wanted]
    for case in cases:
        split = case.n if op == "ag_gemm" else case.k
        if case.m % session.world_size or split % session.world_size:
            raise SettingError(f"{op} {case.m}x{case.n}x{case.k} does not divide over {session.world_size} ranks")
    return cases


def _inputs(session: BenchSession, case: Case, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sets of this rank's (x, weight), used in turn."""
    w = session.world_size
    if case.op == "ag_gemm":
        x_shape, weight_shape = (case.m // w, case.k), (case.n // w, case.k)
    else:
        x_shape, weight_shape = (case.m, case.k // w), (case.n, case.k // w)
    count = session.num_input_sets((x_shape[0] * x_shape[1] + weight_shape[0] * weight_shape[1]) * dtype.itemsize)
    return [
        (session.values(x_shape, dtype, 2 * i), session.values(weight_shape, dtype, 2 * i + 1)) for i in range(count)
    ]


def op_contenders(
    session: BenchSession, case: Case, context: TPContext, dtype: torch.dtype
) -> dict[str, Callable[[int], torch.Tensor]]:
    """Returns ``native``, ``gemm`` alone, ``comm`` alone, ``peer`` and ``ditron`` for a shape, all on the same inputs."""
    build = _ag_gemm_contenders if case.op == "ag_gemm" else _gemm_rs_contenders
    return build(case, context, _inputs(session, case, dtype))


def _op_row(session: BenchSession, case: Case, context: TPContext, dtype: torch.dtype) -> Row:
    contenders = op_contenders(session, case, context, dtype)
    if session.device.type == "cpu" or not session.attempt(f"{_PEER} {case.op}", contenders["peer"]):
        del contenders["peer"]
    equal = all(session.equal([contenders["ditron"](i)], [contenders["native"](i)]) for i in range(2))
    timings = session.measure(contenders)
    return _row(session, case, "forward", dtype, equal, timings, _wire_bytes(case, session, dtype), _comm_sms(case, context, dtype))


def _ag_gemm_contenders(
    case: Case, context: TPContext, inputs: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Callable[[int], torch.Tensor]]:
    gathered = inputs[0][0].new_empty(case.m, case.k)

    def pick(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs[index % len(inputs)]

    def gather(index: int) -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, pick(index)[0], group=context.group)
        return gathered

    def peer(index: int) -> torch.Tensor:
        import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

        x, weight = pick(index)
        name = context.group.group_name
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, name, return_A=False)[1][0]

    return {
        "native": lambda index: torch.matmul(gather(index), pick(index)[1].t()),
        "gemm": lambda index: torch.matmul(gathered, pick(index)[1].t()),
        "comm": gather,
        "peer": peer,
        "ditron": lambda index: ag_gemm(*pick(index), context=context),
    }


def _gemm_rs_contenders(
    case: Case, context: TPContext, inputs: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Callable[[int], torch.Tensor]]:
    partial = inputs[0][0].new_zeros(case.m, case.n)

    def pick(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs[index % len(inputs)]

    def multiply(index: int) -> torch.Tensor:
        x, weight = pick(index)
        return torch.matmul(x, weight.t())

    def scatter(source: torch.Tensor) -> torch.Tensor:
        out = source.new_empty(case.m // context.world_size, case.n)
        dist.reduce_scatter_tensor(out, source, group=context.group)
        return out

    def peer(index: int) -> torch.Tensor:
        import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

        x, weight = pick(index)
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, context.group.group_name)

    return {
        "native": lambda index: scatter(multiply(index)),
        "gemm": multiply,
        "comm": lambda index: scatter(partial),
        "peer": peer,
        "ditron": lambda index: gemm_rs(*pick(index), context=context),
    }


def _backward_row(
    session: BenchSession,
    case: Case,
    context: TPContext,
    dtype: torch.dtype,
    native: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Row:
    """dgrad with its communication, and wgrad: the whole backward of the layer whose forward is ``case.op``."""
    layer = column_linear if case.op == "ag_gemm" else row_linear
    inputs = [tuple(t.requires_grad_() for t in pair) for pair in _inputs(session, case, dtype)]
    contenders: dict[str, Contender] = {}
    results: dict[str, list[torch.Tensor]] = {}
    for name, forward in (("native", native), ("ditron", lambda x, weight: layer(x, weight, context=context))):
        outputs = [forward(*pair) for pair in inputs]
        grad = session.values(tuple(outputs[0].shape), dtype, 77)

        def backward(index: int, outputs: list[torch.Tensor] = outputs, grad: torch.Tensor = grad) -> list[torch.Tensor]:
            chosen = index % len(inputs)
            return list(torch.autograd.grad(outputs[chosen], inputs[chosen], grad, retain_graph=True))

        contenders[name] = backward
        results[name] = [outputs[0].detach(), *backward(0)]
    equal = session.equal(results["ditron"], results["native"])
    timings = session.measure(contenders)
    renamed = Case("column_linear" if case.op == "ag_gemm" else "row_linear", case.model, case.m, case.n, case.k)
    return _row(session, renamed, "backward", dtype, equal, timings, None, _comm_sms(case, context, dtype))


def _wire_bytes(case: Case, session: BenchSession, dtype: torch.dtype) -> float:
    """Bytes that each rank receives over the links."""
    columns = case.k if case.op == "ag_gemm" else case.n
    return case.m * columns * dtype.itemsize * (session.world_size - 1) / session.world_size


def _comm_sms(case: Case, context: TPContext, dtype: torch.dtype) -> int:
    """SMs that the GEMM leaves to the communication; the tiles of GEMM-RS are sent by the GEMM itself."""
    if case.op == "gemm_rs" or context.target == "interpreter":
        return 0
    plan = choose(case.problem(dtype, context.world_size), context.machine).gather
    return plan.push_programs if plan.mode == "push" else 1  # behind copy engines one program forwards their signals


def _row(
    session: BenchSession,
    case: Case,
    direction: str,
    dtype: torch.dtype,
    equal: bool,
    timings: dict[str, Timing],
    wire_bytes: float | None,
    comm_sms: int,
) -> Row:
    times = {name: timing.median_us for name, timing in timings.items()}
    on_gpu = session.device.type == "cuda"
    limit = max(times["gemm"], wire_bytes / WIRE_GBPS / 1e3) if wire_bytes is not None and on_gpu else None
    return Row(
        op=case.op,
        direction=direction,
        model=case.model,
        world_size=session.world_size,
        dtype=str(dtype).removeprefix("torch."),
        shape=case.shape,
        native_us=times["native"],
        ditron_us=times["ditron"],
        bitwise_equal=equal,
        comm_sms=comm_sms,
        gemm_us=times.get("gemm"),
        comm_us=times.get("comm"),
        limit_us=limit,
        peer=_PEER if "peer" in times else None,
        peer_us=times.get("peer"),
        wire_gbps=None if wire_bytes is None else wire_bytes / times["ditron"] / 1e3,
        spread=max(timing.spread for timing in timings.values()),
    )
