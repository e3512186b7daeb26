"""Benchmark of Ulysses sequence parallelism: both projections with their exchanges, and a whole attention layer.

Native is GEMM and all-to-alls as Transformer Engine's attention does them; the other column is the same with one
all-to-all for q, k and v. All of them, the GEMM alone and the exchange alone are measured in one run on the same
inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.data import load_workloads
from ditron_train.gemm.configs import choose_config
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.sp import (
    HeadsLayout,
    SPContext,
    a2a_gemm,
    gemm_a2a,
    get_sp_context,
    output_layout,
    output_projection,
    qkv_layout,
    qkv_projection,
)
from ditron_train.sp import transfer_sizes as tuning
from ditron_train.tools.arguments import add_common_arguments, check_sizes, choose_models
from ditron_train.tools.bench.sp_native import NativeUlysses
from ditron_train.tools.op_rows import WIRE_GBPS
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession, Sink, bench_session

__all__ = ["Case", "FACTS", "add_arguments", "op_contenders", "run"]

_PARTS = ("gemm_a2a", "a2a_gemm", "backward", "layer")
FACTS = ("attention layer", 32768, 64, 8, 128)  # the layer that the targets are stated for


@dataclass(frozen=True)
class Case:
    """One attention: global length, heads and groups of all ranks; the hidden size is heads times head size."""

    model: str
    seqlen: int
    heads: int
    groups: int
    head_size: int

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.heads * self.head_size

    def most_repetitions(self, world_size: int) -> int | None:
        """Few of what takes more than some 10 ms a GEMM: it varies less, and the longest shapes would take minutes."""
        num_columns = (self.heads + 2 * self.groups) * self.head_size
        return 5 if 2 * (self.seqlen // world_size) * self.hidden * num_columns > 8e12 else None

    @property
    def shape(self) -> dict[str, int]:
        """As it stands in a row."""
        return {"seqlen": self.seqlen, "heads": self.heads, "groups": self.groups, "head_size": self.head_size}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench sp``."""
    add_common_arguments(parser)
    parser.add_argument("--part", action="append", choices=_PARTS, help="only this part (may be repeated)")
    parser.add_argument(
        "--shape",
        nargs=4,
        type=int,
        metavar=("SEQLEN", "HEADS", "GROUPS", "HEAD_SIZE"),
        action="append",
        help="instead of workloads.json's (may be repeated; default without a GPU: 64 8 4 16)",
    )


def run(arguments: argparse.Namespace, sink: Sink | None = None) -> int:
    """Measures what the command line asks for, shows and writes it or gives it to ``sink``; returns 1 where bits
    differ.

    Raises:
        SettingError: A shape does not divide over the ranks.
    """
    with bench_session("sp", arguments, sink) as session:
        parts = arguments.part or _PARTS
        cases = _cases(arguments, session)
        if "layer" in parts and session.device.type == "cuda":
            _layer_rows(session)
        context = get_sp_context(dist.group.WORLD, session.device)
        native = NativeUlysses(context.group, session.device)
        for case in cases:
            if "gemm_a2a" in parts:
                session.add(_gemm_a2a_row(session, case, context, native))
            if "a2a_gemm" in parts:
                session.add(_a2a_gemm_row(session, case, context, native))
            if "backward" in parts:
                for row in _backward_rows(session, case, context, native):
                    session.add(row)
            session.save()
        return session.finish()


def _layer_rows(session: BenchSession) -> None:
    try:
        from megatron.core.extensions.transformer_engine import HAVE_TE
    except ImportError:
        HAVE_TE = False
    if not HAVE_TE:
        get_logger("bench").warning(
            "no rows for the attention layer: megatron-core or Transformer Engine is not installed"
        )
        return
    from ditron_train.tools.bench.megatron_sp import attention_rows

    for row in attention_rows(session):
        session.add(row)
        session.save()


def _known_cases(world_size: int) -> list[Case]:
    workload = load_workloads()["gemm_a2a"]
    lengths = workload["weak_scaling_seqlen_by_gpus"]
    cases = [Case(*FACTS)]
    for length in lengths.get(str(world_size)) or [one * world_size // 8 for one in lengths["8"]]:
        cases.append(Case("weak scaling", length, 64, 64, 128))
    for shape in workload["strong_scaling"]:
        cases.append(Case("strong scaling", shape["seqlen"], shape["heads"], shape["heads"], shape["head_size"]))
    return cases


def _cases(arguments: argparse.Namespace, session: BenchSession) -> list[Case]:
    check_sizes("--shape", arguments.shape)
    shapes = arguments.shape or ([(64, 16, 8, 8)] if session.device.type == "cpu" else None)
    cases = _known_cases(session.world_size)
    wanted = choose_models(arguments.model, [case.model for case in cases])
    if shapes is not None:
        names = {tuple(case.shape.values()): case.model for case in cases}
        cases = [Case(names.get(tuple(shape), "custom"), *shape) for shape in shapes]
    else:
        cases = [case for case in cases if case.model in wanted]
    for case in cases:
        if case.seqlen % (2 * session.world_size) or case.groups % session.world_size or case.heads % case.groups:
            sizes = ", ".join(f"{name} {size}" for name, size in case.shape.items())
            raise SettingError(f"an attention of {sizes} does not divide over {session.world_size} ranks")
    return cases


def _values(session: BenchSession, *shape: int, seed: int) -> torch.Tensor:
    return session.values(shape, session.dtype, seed)


def _layouts(case: Case, world_size: int) -> tuple[HeadsLayout, HeadsLayout]:
    return (
        qkv_layout(case.heads, case.groups, case.head_size, world_size),
        output_layout(case.heads, case.head_size, world_size),
    )


def op_contenders(
    session: BenchSession, op: str, case: Case, context: SPContext, native: NativeUlysses
) -> dict[str, Callable[[int], object]]:
    """``native``, ``gemm`` alone, ``comm`` alone, the peer where there is one, and ``ditron``, on the same values."""
    build = _gemm_a2a_contenders if op == "gemm_a2a" else _a2a_gemm_contenders
    return build(session, case, context, native)[0]


def _gemm_a2a_contenders(
    session: BenchSession, case: Case, context: SPContext, native: NativeUlysses
) -> tuple[dict[str, Callable[[int], object]], torch.Tensor, torch.Tensor]:
    layout, _ = _layouts(case, session.world_size)
    x = _values(session, case.seqlen // session.world_size, 1, case.hidden, seed=1)
    weight = _values(session, session.world_size * layout.num_columns, case.hidden, seed=2)
    parts = native.split(torch.matmul(x, weight.t()), layout)
    contenders = {
        "native": lambda index: native.gemm_a2a(x, weight, layout),
        "gemm": lambda index: torch.matmul(x, weight.t()),
        "comm": lambda index: native.to_heads(parts),
        "peer": lambda index: native.gemm_one_a2a(x, weight, layout),
        "ditron": lambda index: list(gemm_a2a(x, weight, context=context, layout=layout)),
    }
    return contenders, x, weight


def _gemm_a2a_row(session: BenchSession, case: Case, context: SPContext, native: NativeUlysses) -> Row:
    contenders, x, weight = _gemm_a2a_contenders(session, case, context, native)
    sms = tuning.receive_programs(x.shape[0], weight.shape[0], weight.shape[1], x.element_size())
    return _forward_row(session, "gemm_a2a", case, contenders, x.shape[0] * weight.shape[0], sms, "one all-to-all")


def _a2a_gemm_contenders(
    session: BenchSession, case: Case, context: SPContext, native: NativeUlysses
) -> tuple[dict[str, Callable[[int], object]], torch.Tensor, torch.Tensor]:
    _, layout = _layouts(case, session.world_size)
    attended = _values(session, case.seqlen, 1, case.heads // session.world_size, case.head_size, seed=3)
    weight = _values(session, case.hidden, case.hidden, seed=4)
    gathered = native.to_sequence([attended])[0].flatten(2)
    contenders = {
        "native": lambda index: [native.a2a_gemm(attended, weight)],
        "gemm": lambda index: torch.matmul(gathered, weight.t()),
        "comm": lambda index: native.to_sequence([attended]),
        "ditron": lambda index: [a2a_gemm((attended,), weight, context=context, layout=layout)],
    }
    return contenders, gathered, weight


def _a2a_gemm_row(session: BenchSession, case: Case, context: SPContext, native: NativeUlysses) -> Row:
    contenders, gathered, weight = _a2a_gemm_contenders(session, case, context, native)
    sms = _push_sms(context, gathered.shape[0], *weight.shape)
    return _forward_row(session, "a2a_gemm", case, contenders, gathered.numel(), sms, None)


def _push_sms(context: SPContext, m: int, n: int, k: int) -> int:
    """SMs that push before they multiply, in an A2A-GEMM of 16-bit values."""
    config = choose_config(m, n, k, torch.bfloat16, context.target, context.num_sms)
    return tuning.deal_of(m, n, k, context.world_size, config, context.num_sms, 2)[0]


def _forward_row(
    session: BenchSession,
    op: str,
    case: Case,
    contenders: dict[str, Callable[[int], Any]],
    num_elements: int,
    sms: int,
    peer: str | None,
) -> Row:
    """``num_elements``: what a rank sends to all, itself included; ``sms``: those that ours keeps for moving data."""
    equal = session.equal(contenders["ditron"](0), contenders["native"](0))
    timings = session.measure(contenders, most=case.most_repetitions(session.world_size))
    times = {name: timing.median_us for name, timing in timings.items()}
    wire_bytes = num_elements * session.dtype.itemsize * (session.world_size - 1) / session.world_size
    on_gpu = session.device.type == "cuda"
    return session.row(
        op, "forward", case.model, case.shape, timings, equal,
        comm_sms=sms if on_gpu else 0,
        gemm_us=times["gemm"],
        comm_us=times["comm"],
        limit_us=max(times["gemm"], wire_bytes / WIRE_GBPS / 1e3) if on_gpu else None,
        peer=peer if "peer" in times else None,
        peer_us=times.get("peer"),
        wire_gbps=wire_bytes / times["ditron"] / 1e3,
    )  # fmt: skip


def _backward_rows(session: BenchSession, case: Case, context: SPContext, native: NativeUlysses) -> list[Row]:
    """dgrad with its exchange, and wgrad, of both projections."""
    world = session.world_size
    layout, out_layout = _layouts(case, world)
    x = _values(session, case.seqlen // world, 1, case.hidden, seed=5)
    weight = _values(session, world * layout.num_columns, case.hidden, seed=6)
    grads = [
        _values(session, case.seqlen, 1, layout.num_heads(part), case.head_size, seed=7 + part) for part in range(3)
    ]

    def native_qkv(index: int) -> list[torch.Tensor]:
        mixed = native.join(native.to_sequence(grads), layout)
        return [torch.matmul(mixed, weight), mixed.flatten(0, 1).t().matmul(x.flatten(0, 1))]

    rows = [
        _backward_row(
            session, "qkv_projection", case, (x, weight), grads, native_qkv,
            lambda a, b: qkv_projection(a, b, context=context, layout=layout),
            _push_sms(context, x.shape[0], case.hidden, weight.shape[0]),
        )
    ]  # fmt: skip
    attended = _values(session, case.seqlen, 1, case.heads // world, case.head_size, seed=11)
    weight_out = _values(session, case.hidden, case.hidden, seed=12)
    grad = _values(session, case.seqlen // world, 1, case.hidden, seed=13)
    gathered = native.to_sequence([attended])[0].flatten(2)

    def native_output(index: int) -> list[torch.Tensor]:
        grad_gathered = torch.matmul(grad, weight_out).view(*grad.shape[:2], case.heads, case.head_size)
        return [*native.to_heads([grad_gathered]), grad.flatten(0, 1).t().matmul(gathered.flatten(0, 1))]

    rows.append(
        _backward_row(
            session, "output_projection", case, (attended, weight_out), [grad], native_output,
            lambda a, b: (output_projection(a, b, context=context, layout=out_layout),),
            tuning.receive_programs(grad.shape[0], case.hidden, case.hidden, grad.element_size()),
        )
    )  # fmt: skip
    return rows


def _backward_row(
    session: BenchSession,
    op: str,
    case: Case,
    inputs: tuple[torch.Tensor, torch.Tensor],
    grads: list[torch.Tensor],
    native: Callable[[int], list[torch.Tensor]],
    ours: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    sms: int,
) -> Row:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = ours(*leaves)

    def ditron(index: int) -> list[torch.Tensor]:
        return list(torch.autograd.grad(outputs, leaves, grads, retain_graph=True))

    equal = session.equal(ditron(0), native(0))
    timings = session.measure({"native": native, "ditron": ditron}, most=case.most_repetitions(session.world_size))
    comm_sms = sms if session.device.type == "cuda" else 0
    return session.row(op, "backward", case.model, case.shape, timings, equal, comm_sms=comm_sms)
