"""``verify --ops N``: the same few ops of every room again and again, every result compared, memory watched.

Cheap ops come often (a message round the ring of ranks), ops that are kernels seldom, so that a million fit into an
hour without a GPU. Messages and the ops of ``tp`` are compared with ``torch.distributed`` and ``torch.matmul``, the
steps of the other rooms, forward and backward, with their own first results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.pp import exchange, get_pipeline_context
from ditron_train.pp.messages import Header
from ditron_train.symm.control import TICKET_UNIT_LOG2
from ditron_train.tools.faults.jobs import JOBS
from ditron_train.tools.session import BenchSession
from ditron_train.tools.verify.outcome import Stress
from ditron_train.tools.verify.soak import Soak, SoakMeter
from ditron_train.tp import TPContext, ag_gemm, all_gather, gemm_ar, gemm_rs
from ditron_train.tp.movement import start_reduce_scatter

_SETS = 8  # of inputs, in turn
_KERNEL_EVERY = 100  # one op in so many is a kernel
_READS = 20  # of the count of differences: gloo keeps some 500 bytes of every all-reduce

_OTHER_ROOMS = ("sp", "ep", "muon")

Op = Callable[[int], Any]  # a tensor


def endure(
    session: BenchSession, soak: Soak, context: TPContext, stress: Stress, *, seed: int, limit_s: float | None
) -> None:
    """Runs ``soak.planned`` ops (collective), a rank being late to those that are kernels, and fills ``soak``.

    Raises:
        PeerTimeoutError: A peer did not come.
    """
    ops = [_message_op(session, seed), *_kernel_ops(session, context, seed)]
    names: tuple[str, ...] = (
        "pp exchange", "tp all_gather", "tp ag_gemm", "tp reduce_scatter", "tp gemm_rs", "tp gemm_ar",
    )  # fmt: skip
    expected = [_expected(session, name, seed) for name in names]
    for name in _OTHER_ROOMS:
        op, first = _room_op(session, name)
        ops.append(op)
        names += (f"{name} step",)
        expected.append([first] * _SETS)
    late = np.random.default_rng(seed)
    num_different = torch.zeros(1, dtype=torch.int64, device=session.device)
    meter = SoakMeter(soak, session.device, limit_s)
    while soak.done < soak.planned and not meter.time_is_up():
        number = soak.done
        which = 1 + (number // _KERNEL_EVERY) % (len(ops) - 1) if number % _KERNEL_EVERY == 0 else 0
        index = number % _SETS
        if which:
            stress.delay(session, late)
        num_different += (ops[which](index) != expected[which][index]).any()
        soak.count(names[which], 1)
        if soak.done % max(soak.planned // _READS, 1) == 0:
            _read(num_different, soak)
        meter.sample()
    context.synchronize()
    _read(num_different, soak)
    meter.finish(
        max(int(channel.tickets[0]) for channel in (context.gather_channel, context.scatter_channel))
        >> TICKET_UNIT_LOG2
    )


def _room_op(session: BenchSession, name: str) -> tuple[Op, torch.Tensor]:
    """A step of a room's job, forward and backward, as one tensor; what it gave at first."""
    step = JOBS[name](session.device)

    def op(index: int) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1).float() for tensor in step()])

    return op, op(0)


def _read(num_different: torch.Tensor, soak: Soak) -> None:
    """Takes differences out of the device's counter; all ranks learn of all."""
    dist.all_reduce(num_different)
    for _ in range(int(num_different.item())):
        soak.differs(f"an op before number {soak.done}")
    num_different.zero_()


def _sizes(session: BenchSession) -> tuple[int, int, int]:
    """Rows of a rank, N, K: small."""
    return (128, 256, 256) if session.device.type == "cuda" else (4, 16, 16)


def _inputs(session: BenchSession, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Rows of this rank, rows of all ranks, weight: whole numbers, whose sums are exact in any order and in bf16."""
    rows, n, k = _sizes(session)
    sets = []
    for index in range(_SETS):
        generator = torch.Generator().manual_seed(1000 * seed + 10 * index + session.rank)
        draw = [
            torch.randint(-1, 2, shape, generator=generator)
            for shape in ((rows, k), (rows * session.world_size, k), (n, k))
        ]
        sets.append(tuple(tensor.to(session.dtype).to(session.device) for tensor in draw))
    return sets


def _message_op(session: BenchSession, seed: int) -> Op:
    """To the next rank, from the previous one."""
    context = get_pipeline_context(dist.group.WORLD, session.device)  # type: ignore[arg-type]
    inputs = _inputs(session, seed)
    header = Header(tuple(inputs[0][0].shape), inputs[0][0].dtype)
    context.reserve(inputs[0][0].numel() * inputs[0][0].element_size())

    def op(index: int) -> torch.Tensor:
        handles = exchange(context, send_next=inputs[index][0], recv_prev=header)
        for handle in handles.values():
            handle.wait()
        received = handles["recv_prev"].tensor
        assert received is not None, "a header was given"
        return received

    return op


def _kernel_ops(session: BenchSession, context: TPContext, seed: int) -> Sequence[Op]:
    inputs = _inputs(session, seed)
    return (
        lambda index: all_gather(inputs[index][0], context=context),
        lambda index: ag_gemm(inputs[index][0], inputs[index][2], context=context),
        lambda index: start_reduce_scatter(inputs[index][1], context=context).wait(),
        lambda index: gemm_rs(inputs[index][1], inputs[index][2], context=context),
        lambda index: gemm_ar(inputs[index][1], inputs[index][2], context=context),
    )


def _expected(session: BenchSession, name: str, seed: int) -> list[torch.Tensor]:
    """What ``torch.distributed`` and ``torch.matmul`` give for every set of inputs."""
    results = []
    for rows, all_rows, weight in _inputs(session, seed):
        if name in ("pp exchange", "tp all_gather", "tp ag_gemm"):
            parts = [torch.empty_like(rows) for _ in range(session.world_size)]
            dist.all_gather(parts, rows)
            gathered = torch.cat(parts)
            previous = parts[(session.rank - 1) % session.world_size]
            results.append(
                {"pp exchange": previous, "tp all_gather": gathered, "tp ag_gemm": gathered @ weight.T}[name]
            )
            continue
        total = all_rows.clone() if name == "tp reduce_scatter" else all_rows @ weight.T
        dist.all_reduce(total)
        if name == "tp gemm_ar":
            results.append(total)
            continue
        results.append(total.chunk(session.world_size)[session.rank].clone())
    return results
