"""The same few ops of every package again and again, every result compared, memory watched.

Messages round the ring of ranks and the ops of ``tp`` are compared with ``torch.distributed`` and ``torch.matmul``,
the steps of the other subpackages, forward and backward, with their own first results. Some messages come, then one of
the others. Nothing here waits for the device or for ``torch.distributed`` between them: the device compares and
counts, and ranks come together once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.pp import exchange, get_pipeline_context
from ditron_train.pp.messages import Header
from ditron_train.tools.session import BenchSession
from ditron_train.tools.verify.outcome import Stress
from ditron_train.tp import TPContext, ag_gemm, all_gather, gemm_ar, gemm_rs
from ditron_train.tp.reduce_scatter import start_reduce_scatter
from tests.faults.jobs import JOBS, muon_job
from tests.soak.soak import Soak, SoakMeter, last_epoch

_SETS = 8  # of inputs, in turn
_MESSAGES = {"cuda": 4, "cpu": 99}  # in front of each other op: kernels are slow without a GPU
_READS = 20  # of the count of differences

_TP_OPS = ("tp all_gather", "tp ag_gemm", "tp reduce_scatter", "tp gemm_rs", "tp gemm_ar")
#: Calls of ops in a step of each other subpackage, forward and backward.
OPS_OF_STEP = {"sp": 4, "ep": 5, "muon": 1}

Op = Callable[[int], Sequence[torch.Tensor]]


class _Kind(NamedTuple):
    """Attributes: what it runs, what that gives for each set of inputs, how many ops it is."""

    name: str
    op: Op
    expected: Sequence[Sequence[torch.Tensor]]
    num_ops: int = 1


class _Comparison:
    """Counts calls of which any bit differs, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_different = torch.zeros(1, dtype=torch.int64, device=device)
        self._flag = torch.zeros((), dtype=torch.bool, device=device)
        self._unequal: dict[int, torch.Tensor] = {}  # where bytes are compared, by their number

    def add(self, found: Sequence[torch.Tensor], expected: torch.Tensor) -> None:
        """``found`` against what ``bits`` gave of the expected ones."""
        bits = self.bits(found)
        unequal = self._unequal.get(bits.numel())
        if unequal is None:
            unequal = self._unequal[bits.numel()] = torch.empty_like(bits, dtype=torch.bool)
        torch.ne(bits, expected, out=unequal)
        torch.any(unequal, out=self._flag)
        self.num_different += self._flag

    @staticmethod
    def bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """All bytes of the tensors, in one."""
        parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_into(self, soak: Soak) -> None:
        """Takes the count off the device; all ranks learn of all (collective)."""
        dist.all_reduce(self.num_different)
        for _ in range(int(self.num_different.item())):
            soak.differs(f"an op before number {soak.done}")
        self.num_different.zero_()


def endure(
    session: BenchSession, soak: Soak, context: TPContext, stress: Stress, *, seed: int, limit_s: float | None
) -> None:
    """Runs ``soak.planned`` ops (collective), a rank being late to those that are no messages, and fills ``soak``.

    Raises:
        PeerTimeoutError: A peer did not come.
    """
    kinds = _kinds(session, context, seed)
    comparison = _Comparison(session.device)
    expected = {kind.name: [comparison.bits(one) for one in kind.expected] for kind in kinds}
    late = np.random.default_rng(seed)
    meter = SoakMeter(soak, session.device, limit_s)
    next_read = 0
    for kind in _in_sequence(kinds, _MESSAGES[session.device.type]):
        if soak.done >= soak.planned or meter.time_is_up():
            break
        if kind is not kinds[0]:
            stress.delay(session, late)
        index = soak.by_kind.get(kind.name, 0) // kind.num_ops % _SETS
        comparison.add(kind.op(index), expected[kind.name][index % len(kind.expected)])
        soak.count(kind.name, kind.num_ops, ops=kind.num_ops)
        if soak.done >= next_read:
            next_read = soak.done + max(soak.planned // _READS, 1)
            comparison.read_into(soak)
        if len(soak.by_kind) == len(kinds):  # the first call of each takes memory that it keeps
            meter.sample()
    context.synchronize()
    comparison.read_into(soak)
    meter.finish(last_epoch(context))


def _in_sequence(kinds: Sequence[_Kind], num_messages: int) -> Iterator[_Kind]:
    """For ever: one of the others, then so many messages."""
    message, *others = kinds
    while True:
        for other in others:
            yield other
            for _ in range(num_messages):
                yield message


def _kinds(session: BenchSession, context: TPContext, seed: int) -> list[_Kind]:
    """The messages, then all others."""
    ops = [_message_op(session, seed), *_kernel_ops(session, context, seed)]
    kinds = [
        _Kind(name, op, [[one] for one in _expected(session, name, seed)])
        for name, op in zip(("pp exchange", *_TP_OPS), ops, strict=True)
    ]
    for room, num_ops in OPS_OF_STEP.items():
        # whole matrices on every rank: what sends shards of Muon is torch's, and gloo is no part of what is watched
        step = muon_job(session.device, None) if room == "muon" else JOBS[room](session.device)
        first = [tensor.clone() for tensor in step()]
        kinds.append(_Kind(f"{room} step", _as_op(step), [first], num_ops))
    return kinds


def _as_op(step: Callable[[], Sequence[torch.Tensor]]) -> Op:
    return lambda index: step()


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
            torch.randint(-1, 2, shape, device="cpu", generator=generator)
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

    def op(index: int) -> Sequence[torch.Tensor]:
        handles: Any = exchange(context, send_next=inputs[index][0], recv_prev=header)
        for handle in handles.values():
            handle.wait()
        return [handles["recv_prev"].tensor]

    return op


def _kernel_ops(session: BenchSession, context: TPContext, seed: int) -> Sequence[Op]:
    """As ``_TP_OPS`` names them."""
    inputs = _inputs(session, seed)
    return (
        lambda index: [all_gather(inputs[index][0], context=context)],
        lambda index: [_only(ag_gemm(inputs[index][0], inputs[index][2], context=context))],
        lambda index: [start_reduce_scatter(inputs[index][1], context=context).wait()],
        lambda index: [gemm_rs(inputs[index][1], inputs[index][2], context=context)],
        lambda index: [gemm_ar(inputs[index][1], inputs[index][2], context=context)],
    )


def _only(result: Any) -> torch.Tensor:
    """Of an AG-GEMM that was not asked for the gathered rows."""
    assert isinstance(result, torch.Tensor)
    return result


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
