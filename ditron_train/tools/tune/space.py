"""``SearchSpace``: the ways to run an op's fused path that ``tune`` tries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic

from ditron_train.policy import Function
from ditron_train.policy.op import Call, Context
from ditron_train.tools.cases import BenchCase, Shape


class SearchSpace(ABC, Generic[Call, Context]):
    """The choice that an op has.

    Attributes:
        case: How the op is called.
        table_op: What tuning tables call the op.
        is_local: Whether nothing is sent: tuning tables hold the choice under one rank.
        rounds: How often ``tune`` asks for candidates.
        most_shapes: Of the case's shapes, how many are tuned if the command line names none: all of them are held at a
            time, and of some ops more than these fill the memory. None: all.
    """

    is_local: bool = False
    rounds: int = 1
    most_shapes: int | None = None

    def __init__(self, case: BenchCase[Call, Context], table_op: str) -> None:
        self.case, self.table_op = case, table_op

    def shapes(self, world_size: int, on_gpu: bool) -> Sequence[Shape]:
        """The shapes that are tuned if the command line names none."""
        return self.case.shapes(world_size, on_gpu)[: self.most_shapes]

    def shape_class(self, call: Call) -> str:
        """The class of shapes that share a choice in a tuning table: by default the first input's shape."""
        return "x".join(map(str, self.case.op.inputs(call)[0].shape))

    @abstractmethod
    def candidates(self, call: Call, context: Context, ranked: Sequence[Hashable]) -> Sequence[Hashable]:
        """Ways to run the fused path that are worth a try, the first being the one that runs untuned.

        Args:
            ranked: What was tried before, the fastest first; at the first question nothing.
        """

    @abstractmethod
    def run_as(self, call: Call, context: Context, candidate: Any) -> Function:
        """The fused path as ``candidate`` says."""

    def compile(self, call: Call, context: Context, candidate: Any) -> tuple[Hashable, Callable[[], None]] | None:
        """What tells the kernels of ``candidate`` from others, and how to compile them without running them; None
        if they are compiled as they run."""
        return None

    def entry(self, call: Call, candidate: Any, *, is_native: bool) -> dict[str, Any]:
        """``candidate`` as a tuning table holds it; ``is_native``: the native path was faster than every one."""
        return {"choice": candidate, "native": is_native}
