"""Benchmark of pipeline messages: send and receive, a GEMM during a transfer, and steps of Megatron's schedules.

Native is ``batch_isend_irecv``, as megatron-core calls it; the peers are the same with NCCL limited to a few blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.pp import get_pipeline_context
from ditron_train.pp.messages import FORWARD
from ditron_train.pp.spec import MessageCall, start_fused, start_natively
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.stream.copies import copy_bytes
from ditron_train.tools.arguments import add_common_arguments, check_sizes
from ditron_train.tools.cases import BenchCase, Shape
from ditron_train.tools.cases.pp import MESSAGES, limited_groups, message_shapes
from ditron_train.tools.catalog import cases_of
from ditron_train.tools.op_rows import OpCalls, add_row, parts_of
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.timing import Timing

_MB = 1_000_000
Around = Callable[[], AbstractContextManager[None]]


def _parts() -> dict[str, list[BenchCase[Any, Any]]]:
    """Ops by ``--part``; a pipeline's step is no op."""
    return {**parts_of(cases_of("pp")), "gemm_beside_transfer": [], "pipeline_step": []}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench pp``."""
    add_common_arguments(parser, model_option=False, parts=_parts())
    parser.add_argument(
        "--mb",
        type=float,
        action="append",
        metavar="MB",
        help="message size in 10^6 bytes (may be repeated; default 8 KiB and 1 to 256)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: Fewer than two ranks, or an odd number of them.
    """
    with bench_session("pp", arguments) as session:
        if session.world_size < 2 or session.world_size % 2:
            raise SettingError(
                f"bench pp takes an even number of ranks, not {session.world_size}: torchrun --nproc-per-node 2"
            )
        check_sizes("--mb", [[mb] for mb in arguments.mb or ()])
        parts = arguments.part or [*_parts()]
        on_gpu = session.device.type == "cuda"
        world: Any = dist.group.WORLD
        ops = [case for name, cases in _parts().items() if name in parts for case in cases]
        planned = {case.op.name: _shapes(case, arguments, session) for case in ops}
        rings = [shape for shape in _shapes(MESSAGES, arguments, session) if shape.model == "ring"]
        if "gemm_beside_transfer" in parts or MESSAGES.op.name in planned:
            limited = limited_groups(world, session.device) if on_gpu else {}
            get_pipeline_context(world, session.device).reserve(max(shape.sizes["num_bytes"] for shape in rings))
        for case in ops:
            for shape in planned[case.op.name]:
                add_row(session, case, shape)
            session.save()
        if "gemm_beside_transfer" in parts:
            for shape in [ring for ring in rings if ring.sizes["num_bytes"] >= 8 * _MB] or rings[-1:]:
                for row in _beside_rows(session, shape, limited):
                    session.add(row)
                session.save()
        if "pipeline_step" in parts:
            _step_rows(session)
        return session.finish()


def _shapes(case: BenchCase[Any, Any], arguments: argparse.Namespace, session: BenchSession) -> list[Shape]:
    """The op's own, messages of the sizes that ``--mb`` names."""
    shapes = list(case.shapes(session.world_size, session.device.type == "cuda"))
    if case is MESSAGES and arguments.mb:
        by_size = [message_shapes(mb * _MB) for mb in arguments.mb]
        return [shapes[index] for index in range(2) for shapes in by_size]
    return shapes


def _step_rows(session: BenchSession) -> None:
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        get_logger("bench").warning("megatron-core is not installed: no rows for a pipeline step")
        return
    from ditron_train.tools.bench.megatron_pp import step_rows

    for row in step_rows(session):
        session.add(row)
        session.save()


def _best_peer(timings: dict[str, Timing], limited: dict[str, dist.ProcessGroup]) -> tuple[str | None, float | None]:
    if not limited:
        return None, None
    for name in limited:
        get_logger("bench").info("%s: %.0f us", name, timings[name].median_us)
    best = min(limited, key=lambda name: timings[name].median_us)
    return best, timings[best].median_us


class _Beside:
    """GEMMs that last half as long again as a ring transfer which is started before them and ended after them."""

    def __init__(self, session: BenchSession, calls: list[MessageCall], comm_us: float) -> None:
        self.size = 4096 if session.device.type == "cuda" else 128
        dtype = session.dtype
        self._left, self._right = (session.values((self.size, self.size), dtype, 50 + index) for index in range(2))
        self._product = torch.empty_like(self._left)
        self._calls, self._context = calls, calls[0].context
        self._copies_on = torch.cuda.Stream(session.device) if session.device.type == "cuda" else None
        self.count = 1
        alone = session.measure({"gemm": lambda index: self.multiply()})
        self.count = int(1.5 * comm_us / alone["gemm"].median_us) + 1

    def multiply(self) -> None:
        """The GEMMs."""
        for _ in range(self.count):
            torch.matmul(self._left, self._right, out=self._product)

    def _pick(self, index: int) -> tuple[MessageCall, torch.Tensor, torch.Tensor]:
        call = self._calls[index % len(self._calls)]
        assert call.data is not None and call.received is not None, "of every sample"
        return call, call.data, call.received

    def nccl(self, index: int, group: dist.ProcessGroup, around: Around = nullcontext) -> torch.Tensor:
        """A transfer by NCCL and the GEMMs, which ``around`` is entered for."""
        call, data, received = self._pick(index)
        works = start_natively(call, data, received, group)
        with around():
            self.multiply()
        for work in works:
            work.wait()
        return received

    def fused(self, index: int, around: Around = nullcontext) -> torch.Tensor:
        """The same with our transfer."""
        call, data, _ = self._pick(index)
        handles = start_fused(call, data)
        with around():
            self.multiply()
        for handle in handles.values():
            handle.wait()
        return handles["recv_prev"].tensor

    def copy(self, index: int, around: Around = nullcontext) -> None:
        """The GEMMs beside as many bytes copied by the same engine into the next stage's slot, without flags: no
        message by copy engine can do better."""
        sender = self._context.local_senders[FORWARD]
        assert sender is not None
        if self._copies_on is not None:
            self._copies_on.wait_stream(torch.cuda.current_stream())
        _, data, _ = self._pick(index)
        copy_bytes(sender.slots.in_ring(sender.peer, FORWARD, 0), data.data_ptr(), data.nbytes, self._copies_on)
        with around():
            self.multiply()
        if self._copies_on is not None:
            torch.cuda.current_stream().wait_stream(self._copies_on)

    def alone(self, index: int, around: Around = nullcontext) -> None:
        """The GEMMs with nothing beside them."""
        with around():
            self.multiply()


def _beside_rows(session: BenchSession, shape: Shape, limited: dict[str, dist.ProcessGroup]) -> Iterator[Row]:
    """How long the GEMMs take while a transfer runs beside them (the limit: beside bare copies of the same bytes,
    which take bandwidth of the memory and power that the GEMMs want), and how long both take together; figures:
    ``docs/measurements/index.md``."""
    calls = OpCalls(session, MESSAGES, shape)
    num_bytes, fused = shape.sizes["num_bytes"], calls.both()["fused"]
    comm_us = session.measure({"comm": fused})["comm"].median_us
    beside = _Beside(session, calls.calls, comm_us)
    world: Any = dist.group.WORLD
    contenders: dict[str, Any] = {"gemm": beside.alone, "native": partial(beside.nccl, group=world)}
    contenders.update((name, partial(beside.nccl, group=group)) for name, group in limited.items())
    contenders.update(fused=beside.fused, copy=beside.copy)
    equal = session.equal([contenders["fused"](0)], [contenders["native"](0)])
    for op, timings in (
        ("gemm_beside_transfer", session.measure(contenders, inside=True)),
        ("gemm_and_transfer", session.measure(contenders)),
    ):
        peer, peer_us = _best_peer(timings, limited)
        gemm_us = timings["gemm"].median_us
        square = dict.fromkeys(("m", "n", "k"), beside.size)
        sizes = {"num_bytes": num_bytes, **square, "num_gemms": beside.count}
        yield session.row(
            op, "forward", "ring", sizes, timings, equal,
            dtype=torch.bfloat16,
            gemm_us=gemm_us,
            comm_us=comm_us,
            limit_us=timings["copy"].median_us if op == "gemm_beside_transfer" else max(gemm_us, comm_us),
            peer=peer,
            peer_us=peer_us,
        )  # fmt: skip
