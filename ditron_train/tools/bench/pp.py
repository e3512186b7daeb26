"""Benchmark of pipeline messages: send and receive, a GEMM beside a transfer, and steps of Megatron's schedules.

Native is ``batch_isend_irecv``, as megatron-core calls it; the peers are the same with NCCL limited to a few blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.pp import PipelineContext, exchange, get_pipeline_context
from ditron_train.pp.messages import FORWARD, Header
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.stream.copies import copy_bytes
from ditron_train.tools.arguments import add_common_arguments, check_folder, check_matplotlib, check_sizes
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession, Sink, bench_session
from ditron_train.tools.timing import Contender, Timing

__all__ = ["WIRE_GBPS", "add_arguments", "run", "transfer_contenders"]

WIRE_GBPS = 390.0  # one copy engine's pushes over NVLink on an H200
_PARTS = ("send_recv", "gemm_beside_transfer", "pipeline_step")
_PATTERNS = ("ring", "pairs")
_CTAS = (1, 2, 4, 8)
_MB = 1_000_000
Around = Callable[[], AbstractContextManager[None]]
_GPU_MB = (0.008192, 1, 8, 16, 32, 64, 128, 256)  # the first shows the latency


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench pp``."""
    add_common_arguments(parser, model_option=False)
    parser.add_argument("--part", action="append", choices=_PARTS, help="only this part (may be repeated)")
    parser.add_argument(
        "--mb",
        type=float,
        action="append",
        metavar="MB",
        help="message size in 10^6 bytes (may be repeated; default 8 KiB and 1 to 256)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw a 1F1B step, natively and with ours")
    parser.add_argument("--no-limited", action="store_true", help="leave NCCL limited to 1, 2, 4, 8 blocks out")


def run(arguments: argparse.Namespace, sink: Sink | None = None) -> int:
    """Measures what the command line asks for, shows and writes it or gives it to ``sink``; returns 1 where bits
    differ.

    Raises:
        SettingError: Fewer than two ranks, or an odd number of them.
    """
    with bench_session("pp", arguments, sink) as session:
        if session.world_size < 2 or session.world_size % 2:
            raise SettingError(
                f"bench pp takes an even number of ranks, not {session.world_size}: torchrun --nproc-per-node 2"
            )
        if arguments.picture is not None:
            check_matplotlib()
            check_folder(arguments.picture.parent)
        check_sizes("--mb", [[mb] for mb in arguments.mb or ()])
        parts = arguments.part or _PARTS
        on_gpu = session.device.type == "cuda"
        sizes = [max(int(mb * _MB) // 512, 1) * 512 for mb in arguments.mb or (_GPU_MB if on_gpu else (0.1, 1))]
        limited = {} if arguments.no_limited or not on_gpu else _limited_groups(session)
        if "send_recv" in parts or "gemm_beside_transfer" in parts:
            context = get_pipeline_context(dist.group.WORLD, session.device)  # type: ignore[arg-type]
            context.reserve(max(sizes))
        if "send_recv" in parts:
            for pattern in _PATTERNS:
                for num_bytes in sizes:
                    session.add(_send_recv_row(session, context, pattern, num_bytes, limited))
            session.save()
        if "gemm_beside_transfer" in parts:
            for num_bytes in [size for size in sizes if size >= 8 * _MB] or sizes[-1:]:
                for row in _beside_rows(session, context, num_bytes, limited):
                    session.add(row)
                session.save()
        if "pipeline_step" in parts:
            _step_rows(session, arguments.picture)
        return session.finish()


def _step_rows(session: BenchSession, picture: Path | None) -> None:
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        get_logger("bench").warning("megatron-core is not installed: no rows for a pipeline step")
        return
    from ditron_train.tools.bench.megatron_pp import step_rows

    for row in step_rows(session, picture):
        session.add(row)
        session.save()


def _limited_groups(session: BenchSession) -> dict[str, dist.ProcessGroup]:
    groups = {}
    for ctas in _CTAS:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = ctas
        options.config.min_ctas = 1
        group = dist.new_group(list(range(session.world_size)), pg_options=options)
        dist.all_reduce(torch.zeros(1, device=session.device), group=group)
        groups[f"NCCL, {ctas} blocks" if ctas > 1 else "NCCL, 1 block"] = group
    return groups


def _partners(session: BenchSession, pattern: str) -> tuple[int | None, int | None]:
    """Ranks that this one sends to and receives from."""
    rank, world = session.rank, session.world_size
    if pattern == "ring":
        return (rank + 1) % world, (rank - 1) % world
    return (rank + 1, None) if rank % 2 == 0 else (None, rank - 1)


class _Transfers:
    """The same transfer by NCCL and by ours, started and ended apart."""

    def __init__(self, session: BenchSession, context: PipelineContext, pattern: str, num_bytes: int) -> None:
        self.target, self.source = _partners(session, pattern)
        self.context = context
        elements = num_bytes // 2
        self.header = Header((elements,), torch.bfloat16)
        count = session.num_input_sets(num_bytes)
        self.sent = [session.values((elements,), torch.bfloat16, index) for index in range(count)]
        self.received = torch.empty(elements, dtype=torch.bfloat16, device=session.device)
        self._copies_on = torch.cuda.Stream(session.device) if session.device.type == "cuda" else None

    def _pick(self, index: int) -> torch.Tensor:
        return self.sent[index % len(self.sent)]

    def start_nccl(self, index: int, group: dist.ProcessGroup) -> list[Any]:
        """``batch_isend_irecv`` of message ``index``."""
        operations = []
        if self.target is not None:
            operations.append(dist.P2POp(dist.isend, self._pick(index), self.target, group))
        if self.source is not None:
            operations.append(dist.P2POp(dist.irecv, self.received, self.source, group))
        return dist.batch_isend_irecv(operations)

    def nccl(self, index: int, group: dist.ProcessGroup) -> torch.Tensor:
        """Message ``index`` from start to end."""
        for work in self.start_nccl(index, group):
            work.wait()
        return self.received if self.source is not None else self._pick(index)

    def start_copy(self, index: int) -> None:
        """Only the bytes of message ``index``: a copy into the next stage's slot, without flags."""
        sender = self.context.local_senders[FORWARD]
        assert sender is not None
        if self._copies_on is not None:
            self._copies_on.wait_stream(torch.cuda.current_stream())
        data = self._pick(index)
        copy_bytes(sender.slots.in_ring(sender.peer, FORWARD, 0), data.data_ptr(), data.nbytes, self._copies_on)

    def end_copy(self) -> None:
        """Orders the current stream behind ``start_copy``."""
        if self._copies_on is not None:
            torch.cuda.current_stream().wait_stream(self._copies_on)

    def start_ours(self, index: int) -> dict[str, Any]:
        """Our send and our posted receive of message ``index``."""
        return exchange(
            self.context,
            send_next=self._pick(index) if self.target is not None else None,
            recv_prev=self.header if self.source is not None else None,
        )

    def ours(self, index: int) -> torch.Tensor:
        """Message ``index`` from start to end: the sender's copy is complete, too."""
        handles = self.start_ours(index)
        for handle in handles.values():
            handle.wait()
        return handles["recv_prev"].tensor if self.source is not None else self._pick(index)


def transfer_contenders(
    session: BenchSession,
    context: PipelineContext,
    pattern: str,
    num_bytes: int,
    limited: dict[str, dist.ProcessGroup],
) -> dict[str, Contender]:
    """Returns ``native``, ``ditron`` and one contender for each limited group."""
    transfers = _Transfers(session, context, pattern, num_bytes)
    world: Any = dist.group.WORLD
    contenders: dict[str, Contender] = {"native": lambda index: transfers.nccl(index, world)}
    for name, group in limited.items():
        contenders[name] = lambda index, group=group: transfers.nccl(index, group)
    contenders["ditron"] = transfers.ours
    return contenders


def _best_peer(timings: dict[str, Timing], limited: dict[str, dist.ProcessGroup]) -> tuple[str | None, float | None]:
    if not limited:
        return None, None
    for name in limited:
        get_logger("bench").info("%s: %.0f us", name, timings[name].median_us)
    best = min(limited, key=lambda name: timings[name].median_us)
    return best, timings[best].median_us


def _send_recv_row(
    session: BenchSession,
    context: PipelineContext,
    pattern: str,
    num_bytes: int,
    limited: dict[str, dist.ProcessGroup],
) -> Row:
    contenders: dict[str, Any] = transfer_contenders(session, context, pattern, num_bytes, limited)
    equal = all(session.equal([contenders["ditron"](i)], [contenders["native"](i)]) for i in range(3))
    timings = session.measure(contenders)
    peer, peer_us = _best_peer(timings, limited)
    return session.row(
        "send_recv", "forward", pattern, {"num_bytes": num_bytes}, timings, equal,
        dtype=torch.bfloat16,
        limit_us=num_bytes / WIRE_GBPS / 1e3 if session.device.type == "cuda" else None,
        peer=peer,
        peer_us=peer_us,
        wire_gbps=num_bytes / timings["ditron"].median_us / 1e3,
    )  # fmt: skip


class _Beside:
    """GEMMs that last half as long again as a ring transfer which is started before them and ended after them."""

    def __init__(self, session: BenchSession, transfers: _Transfers, comm_us: float) -> None:
        self.size = 4096 if session.device.type == "cuda" else 128
        dtype = session.dtype
        self._left, self._right = (session.values((self.size, self.size), dtype, 50 + index) for index in range(2))
        self._product = torch.empty_like(self._left)
        self._transfers = transfers
        self.count = 1
        alone = session.measure({"gemm": lambda index: self.multiply()})
        self.count = int(1.5 * comm_us / alone["gemm"].median_us) + 1

    def multiply(self) -> None:
        """The GEMMs."""
        for _ in range(self.count):
            torch.matmul(self._left, self._right, out=self._product)

    def nccl(self, index: int, group: dist.ProcessGroup, around: Around = nullcontext) -> torch.Tensor:
        """A transfer by NCCL and the GEMMs, which ``around`` is entered for."""
        works = self._transfers.start_nccl(index, group)
        with around():
            self.multiply()
        for work in works:
            work.wait()
        return self._transfers.received

    def ours(self, index: int, around: Around = nullcontext) -> torch.Tensor:
        """The same with our transfer."""
        handles = self._transfers.start_ours(index)
        with around():
            self.multiply()
        for handle in handles.values():
            handle.wait()
        return handles["recv_prev"].tensor

    def copy(self, index: int, around: Around = nullcontext) -> None:
        """The GEMMs beside as many bytes copied by the same engine, without flags: no message by copy engine can do
        better."""
        self._transfers.start_copy(index)
        with around():
            self.multiply()
        self._transfers.end_copy()

    def alone(self, index: int, around: Around = nullcontext) -> None:
        """The GEMMs with nothing beside them."""
        with around():
            self.multiply()


def _beside_rows(
    session: BenchSession, context: PipelineContext, num_bytes: int, limited: dict[str, dist.ProcessGroup]
) -> Iterator[Row]:
    """How long the GEMMs take while a transfer runs beside them (the limit: beside bare copies of the same bytes,
    which take bandwidth of the memory and power that the GEMMs want), and how long both take together.

    Two products of 4096 beside 64 MB on 4 H200s: bare copies slow them down by 3.0 and 3.5 % (two runs), messages by
    2.5 and 2.5 %, NCCL by 47 %; beside 8 MB 2.5 and 2.1 %, 2.1 and 0.8 %, 1.0 and 1.9 %. So what is left is the copies
    themselves.
    """
    transfers = _Transfers(session, context, "ring", num_bytes)
    comm_us = session.measure({"comm": transfers.ours})["comm"].median_us
    beside = _Beside(session, transfers, comm_us)
    world: Any = dist.group.WORLD
    contenders: dict[str, Any] = {"gemm": beside.alone, "native": partial(beside.nccl, group=world)}
    contenders.update((name, partial(beside.nccl, group=group)) for name, group in limited.items())
    contenders.update(ditron=beside.ours, copy=beside.copy)
    equal = session.equal([contenders["ditron"](0)], [contenders["native"](0)])
    for op, timings in (
        ("gemm_beside_transfer", session.measure(contenders, inside=True)),
        ("gemm_and_transfer", session.measure(contenders)),
    ):
        peer, peer_us = _best_peer(timings, limited)
        gemm_us = timings["gemm"].median_us
        shape = {
            "num_bytes": num_bytes,
            "m": beside.size,
            "n": beside.size,
            "k": beside.size,
            "num_gemms": beside.count,
        }
        yield session.row(
            op, "forward", "ring", shape, timings, equal,
            dtype=torch.bfloat16,
            gemm_us=gemm_us,
            comm_us=comm_us,
            limit_us=timings["copy"].median_us if op == "gemm_beside_transfer" else max(gemm_us, comm_us),
            peer=peer,
            peer_us=peer_us,
        )  # fmt: skip
