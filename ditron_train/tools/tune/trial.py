"""One op at one shape under trial: its inputs, native on them, and every candidate prepared beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ditron_train.runtime.device import is_interpreter
from ditron_train.tools.session import BenchSession
from ditron_train.tp.choices import Choice, Problem
from ditron_train.tp.chunked_gemm_rs import PreparedChunkedGemmRs
from ditron_train.tp.context import RowPartition, TPContext
from ditron_train.tp.ops import prepare_gemm_rs, start_all_gather
from ditron_train.tp.prepared import PreparedAgGemm, PreparedGemmRs

__all__ = ["Trial", "compile_all"]

_COMPILER_THREADS = 8


class Trial:
    """Inputs of a problem, and functions of an index (which set of inputs) that run it in one way or another."""

    def __init__(self, problem: Problem, session: BenchSession, context: TPContext) -> None:
        self.problem = problem
        self.context = context
        self._partition = RowPartition.of([problem.m // problem.world_size] * problem.world_size)
        own_rows = problem.m // problem.world_size
        x_shape = (own_rows if problem.op == "ag_gemm" else problem.m, problem.k)
        weight_shape = (problem.n, problem.k) if problem.layout == "nt" else (problem.k, problem.n)
        set_bytes = (x_shape[0] * x_shape[1] + weight_shape[0] * weight_shape[1]) * problem.dtype.itemsize
        self._inputs = [
            (session.values(x_shape, problem.dtype, 2 * i), session.values(weight_shape, problem.dtype, 2 * i + 1))
            for i in range(session.num_input_sets(set_bytes))
        ]
        self._gathered = self._inputs[0][0].new_zeros(problem.m, problem.k) if problem.op == "ag_gemm" else None
        self._partial = None if problem.op == "ag_gemm" else self._inputs[0][0].new_zeros(problem.m, problem.n)

    def _pick(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index % len(self._inputs)]

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, weight.t() if self.problem.layout == "nt" else weight)

    def gemm(self, index: int) -> torch.Tensor:
        """The GEMM alone, by the library."""
        x, weight = self._pick(index)
        return self._multiply(x if self._gathered is None else self._gathered, weight)

    def collective(self, index: int) -> torch.Tensor:
        """The collective alone, by the library."""
        if self._gathered is None:
            return self._scatter(self._partial)
        dist.all_gather_into_tensor(self._gathered, self._pick(index)[0], group=self.context.group)
        return self._gathered

    def _scatter(self, partial: torch.Tensor) -> torch.Tensor:
        out = partial.new_empty(partial.shape[0] // self.context.world_size, partial.shape[1])
        dist.reduce_scatter_tensor(out, partial, group=self.context.group)
        return out

    def native(self, index: int) -> torch.Tensor:
        """What Megatron runs."""
        if self._gathered is None:
            return self._scatter(self.gemm(index))
        self.collective(index)
        return self.gemm(index)

    def link(self, index: int) -> torch.Tensor:
        """A gather by copy engines alone, of an AG-GEMM's rows; with fewer commands than there, so it tells a rate,
        not what commands cost."""
        return start_all_gather(self._pick(index)[0], context=self.context).wait()

    def prepare(self, choice: Choice) -> PreparedAgGemm | PreparedChunkedGemmRs | PreparedGemmRs:
        """The op as ``choice`` says (collective where it is new here, or buffers have grown since)."""
        key = ("tune", self.problem, choice)
        prepared = self.context.prepared.get(key)
        if prepared is None:
            p = self.problem
            prepare = PreparedAgGemm if p.op == "ag_gemm" else prepare_gemm_rs
            prepared = prepare(self.context, self._partition, p.n, p.k, p.dtype, p.layout, choice)
            self.context.prepared[key] = prepared
        return prepared

    def candidate(self, choice: Choice) -> Callable[[int], torch.Tensor]:
        """Ours as ``choice`` says."""

        def run(index: int) -> torch.Tensor:
            x, weight = self._pick(index)
            self.context.enter("tune", self.problem.table_op, self.problem.m, self.problem.n, self.problem.k)
            prepared = self.prepare(choice)
            if self.problem.op == "ag_gemm":
                return prepared(x, weight)
            out = x.new_empty(self._partition.count(self.context.rank), self.problem.n)
            prepared(x, weight, out)
            return out

        return run

    def compile(self, choice: Choice) -> None:
        """Compiles the kernels of ``choice`` without running them."""
        self.prepare(choice).compile(*self._pick(0))


def compile_all(pairs: Sequence[tuple[Trial, Choice]], context: TPContext) -> None:
    """Compiles the kernels of all pairs, each by one of the ranks, several at a time, so that every rank finds them in
    Triton's cache (collective; ranks of one machine share that cache)."""
    by_kernel: dict[tuple, tuple[Trial, Choice]] = {}
    for trial, choice in pairs:
        p = trial.problem
        # Sizes are specialised on by their divisibility alone.
        identity = (trial.prepare(choice).identity, p.dtype, p.n % 16 == 0, choice.gather.mode, choice.scatter)
        by_kernel.setdefault(identity, (trial, choice))
    if is_interpreter():
        return
    from triton import AsyncCompileMode

    mine = list(by_kernel.values())[context.rank :: context.world_size]
    with ThreadPoolExecutor(_COMPILER_THREADS) as executor, AsyncCompileMode(executor):
        for trial, choice in mine:
            trial.compile(choice)
    context.synchronize()
    dist.barrier(group=context.group)
