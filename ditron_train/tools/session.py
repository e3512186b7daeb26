"""What every benchmark does around its measurements: join the job, check bits on all ranks, show, write."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ditron_train.policy.self_check import self_check
from ditron_train.runtime.errors import DitronError
from ditron_train.runtime.groups import world_group
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.values import have_same_bits, make_values
from ditron_train.runtime.versions import check_versions
from ditron_train.tools.arguments import check_counts, check_folder
from ditron_train.tools.gpu_of_rank import share_gpus
from ditron_train.tools.nothing_compared import require_compared
from ditron_train.tools.results import Pass, Row, write_beside
from ditron_train.tools.stamp import collect_stamp
from ditron_train.tools.tables import show_rows
from ditron_train.tools.timing import Contender, Timing, measure, num_input_sets

_TIMEOUT_S = 300
_Results = Callable[[int], Sequence[torch.Tensor]]


class Sink(Protocol):
    """Takes a benchmark's rows, on every rank, in the place of the table and the file that it would make of them."""

    def meet(self, session: BenchSession, contenders: Mapping[str, Contender]) -> None:
        """What is about to be measured for the next row, or a part of it (collective)."""

    def add_row(self, row: Row) -> None:
        """One more row."""


class BenchSession:
    """One benchmark's process: its device and ranks, how it measures, the rows so far.

    Attributes:
        name: Name of the benchmark, which is also its file's.
        device: This rank's device.
        rank: Rank in WORLD.
        world_size: Number of ranks.
        dtype: Of activations if nobody names one: bfloat16; on the CPU float32, which Triton's interpreter has.
        rows: What ``add`` was given; the same on every rank.
        notes: What the stamp says beside the counts.
        num_compared: How many rows each op has; 0 if a shape of it was left out and none was compared.
    """

    def __init__(self, name: str, arguments: argparse.Namespace, sink: Sink | None = None) -> None:
        self.name = name
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = _device()
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.rows: list[Row] = []
        self.notes: dict[str, str] = {}
        self.num_compared: Counter[str] = Counter()
        self._arguments = arguments
        self._sink = sink

    def measure(
        self,
        contenders: Mapping[str, Contender],
        *,
        most: int | None = None,
        inside: bool = False,
        interleaved: bool = True,
    ) -> dict[str, Timing]:
        """``timing.measure`` with the repetitions that the command line asks for, at most ``most`` for what is
        long."""
        if self._sink is not None:
            self._sink.meet(self, contenders)
        repetitions, warmup = (
            number if most is None else min(number, most)
            for number in (self._arguments.repetitions, self._arguments.warmup)
        )
        return measure(
            contenders,
            device=self.device,
            repetitions=repetitions,
            warmup=warmup,
            inside=inside,
            interleaved=interleaved,
        )

    def num_input_sets(self, set_bytes: int) -> int:
        """``timing.num_input_sets`` on this rank's device."""
        return num_input_sets(set_bytes, self.device)

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
        """``values.make_values`` on this rank; ranks differ, runs do not."""
        return make_values(shape, dtype, self.device, seed=seed, rank=self.rank)

    def agree(self, mine: bool) -> bool:
        """Whether ``mine`` holds on every rank."""
        flag = torch.tensor([int(mine)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def equal(self, fused: Sequence[torch.Tensor], native: Sequence[torch.Tensor]) -> bool:
        """Whether all tensors have equal bits on every rank; some rank has to have one (in a pipeline not all do)."""
        assert not self.agree(not native), "there is nothing to compare"
        return self.agree(len(fused) == len(native) and all(map(same_result, fused, native)))

    def equal_layer(self, feature: str, fused: _Results, native: _Results) -> bool | None:
        """``equal`` of a layer with ``feature`` and the native one (collective); None if no rank ran the fused path,
        so that nothing can be compared."""
        from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS

        FUSED_CALLS.install((feature,))
        FUSED_CALLS.take()
        found = fused(0)
        return None if self.agree(not FUSED_CALLS.take().get(feature)) else self.equal(found, native(0))

    def attempt(self, what: str, contender: Contender) -> bool:
        """Runs ``contender`` once; False, with a log line, if it fails on any rank: to leave a peer out."""
        try:
            contender(0)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            works = True
        except (RuntimeError, AttributeError, ImportError, ValueError, AssertionError) as error:
            reason = str(error).splitlines() or [type(error).__name__]
            get_logger("bench").warning("%s does not run here: %s", what, reason[0])
            works = False
        return self.agree(works)

    def row(
        self,
        op: str,
        direction: Pass,
        model: str,
        shape: dict[str, int],
        timings: Mapping[str, Timing],
        equal: bool | None,
        *,
        dtype: torch.dtype | str | None = None,
        **others: Any,
    ) -> Row:
        """A row of ``native`` and ``fused`` among ``timings``; ``dtype``: the session's if it is not named."""
        named = dict(
            op=op,
            direction=direction,
            model=model,
            world_size=self.world_size,
            dtype=str(dtype or self.dtype).removeprefix("torch."),
            shape=shape,
            native_us=timings["native"].median_us,
            ditron_us=timings["fused"].median_us,
            bitwise_equal=equal,
            comm_sms=0,
            spread=max(timing.spread for timing in timings.values()),
        )
        return Row(**{**named, **others})

    def add(self, row: Row) -> None:
        """Adds a row and logs it; one whose bits were not compared is logged alone."""
        self.num_compared[row.op] += row.bitwise_equal is not None
        if row.bitwise_equal is None:
            get_logger("bench").warning(
                "%s %s %s is left out: it runs natively here", row.op, row.direction, row.model
            )
            return
        self.rows.append(row)
        if self.rank == 0:
            sizes = "x".join(str(size) for size in row.shape.values())
            line = (
                f"{row.op} {row.direction} {row.model} {sizes}: native {row.native_us:.0f} us, "
                f"fused {row.ditron_us:.0f} us"
            )
            get_logger("bench").info(
                "%s, %.2fx, bits %s", line, row.speedup, "equal" if row.bitwise_equal else "DIFFER"
            )
        if self._sink is not None:
            self._sink.add_row(row)

    def save(self) -> None:
        """Rank 0 writes the rows so far: a benchmark of many shapes that is cut short keeps them."""
        self._write(is_shown=False)

    def finish(self) -> int:
        """Rank 0 writes and shows the rows. Returns the exit status: 1 if bits of any row differ.

        Raises:
            NothingComparedError: There is no row, or a part that ``--part`` names has none.
        """
        self._write(is_shown=True)
        if not all(row.bitwise_equal for row in self.rows):
            return 1
        counts = self.num_compared if getattr(self._arguments, "part", None) else {}
        require_compared(counts or {f"bench {self.name}": len(self.rows)}, "the log says why it is not measured here")
        return 0

    def _write(self, is_shown: bool) -> None:
        if self.rank != 0 or not self.rows or self._sink is not None:
            return
        counts = {"repetitions": self._arguments.repetitions, "warmup": self._arguments.warmup}
        stamp = collect_stamp(self.device, self.world_size, **counts, **self.notes)
        if is_shown:
            show_rows(self.rows, stamp)
        if self._arguments.output is not None:
            path = write_beside(self._arguments.output, self.name, stamp, self.rows)
            if is_shown:
                get_logger("bench").info("written: %s", path)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _join(*, may_share_gpus: bool) -> None:
    """Joins torchrun's job, or makes one of a single rank."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    timeout = timedelta(seconds=_TIMEOUT_S)
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if local_rank >= torch.cuda.device_count() and not may_share_gpus:
            raise DitronError(
                f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} here; start fewer processes"
            )
        # no device_id: groups connect at their first use, as Megatron's do
        dist.init_process_group(share_gpus(local_rank, num_local), timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def _check_untried() -> None:
    """Tools run ops without asking a gate."""
    reason = self_check(world_group(), _device())
    if reason is not None:
        raise DitronError(reason)


def same_result(fused: torch.Tensor, native: torch.Tensor) -> bool:
    """Whether two results are numbers and have equal bits. On CPUs zeros of either sign are equal: a product in the
    interpreter begins with 0.0, one of torch with its first term."""
    return torch.equal(fused, native) and (fused.device.type == "cpu" or have_same_bits(fused, native))


@contextmanager
def bench_session(name: str, arguments: argparse.Namespace, *, may_share_gpus: bool = False) -> Iterator[BenchSession]:
    """Joins the process group for the time of a benchmark.

    ``may_share_gpus``: whether more processes than GPUs may take turns on them, if no time is measured.

    Raises:
        VersionError: A library is outside its supported range.
        SettingError: A count or the folder of results cannot be.
        DitronError: More processes than GPUs; CPU without the interpreter; a self-check that failed.
    """
    check_versions()
    check_counts(arguments)
    folder: Path | None = getattr(arguments, "output", None)
    if folder is not None:
        check_folder(folder)
    if not torch.cuda.is_available():
        from ditron_train.runtime.device import is_interpreter

        if not is_interpreter():
            raise DitronError(
                "no GPU here: TRITON_INTERPRET=1 runs it on CPU processes, in Triton's interpreter "
                "(several of them under torchrun)"
            )
        from ditron_train.cpu import interpreter

        interpreter.install()
    joined = not dist.is_initialized()
    if joined:
        _join(may_share_gpus=may_share_gpus)
    try:
        _check_untried()
        yield BenchSession(name, arguments)
    finally:
        if joined:
            dist.destroy_process_group()
