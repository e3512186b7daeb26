"""``BenchCase``: how ``verify``, ``bench``, ``trace`` and ``tune`` call and measure an op."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

import torch
import torch.distributed as dist

from ditron_train.policy import Function, Op
from ditron_train.policy.op import Call, Context
from ditron_train.runtime.values import make_values
from ditron_train.tools.timing import Timing

Pass = Literal["forward", "backward", "forward_backward"]
MegatronGroups = Literal["tensor", "expert"]


@dataclass(frozen=True)
class RunEnvironment:
    """Where a call is made up: a process group, this rank's device and the type of activations."""

    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    def values(
        self, sizes: Iterable[Sequence[int]], first_seed: int, dtype: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """A random tensor of each size, by one seed after the other (``make_values``); ranks differ, runs do not."""
        return [
            make_values(tuple(size), dtype or self.dtype, self.device, seed=seed, rank=self.rank)
            for seed, size in enumerate(sizes, first_seed)
        ]


@dataclass(frozen=True)
class Shape:
    """Global sizes of one op, before they are divided over the ranks, and the model that they come from; ``options``
    are what a size cannot say, such as how tokens are routed."""

    model: str
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSizes:
    """A transformer layer in Megatron's words.

    Attributes:
        hidden, ffn: Widths.
        heads, groups, channels: Heads of q, of k and v, and the width of each.
        seq_length, micro_batch_size: Tokens.
        swiglu: Whether fc1 has a gate.
        vocabulary: Padded; None leaves the output layer out.
        experts, topk, expert_ffn: Of a MoE layer; ``experts`` is None without one.
    """

    hidden: int
    ffn: int
    heads: int
    groups: int
    channels: int
    seq_length: int
    micro_batch_size: int
    swiglu: bool
    vocabulary: int | None
    experts: int | None
    topk: int
    expert_ffn: int

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.seq_length * self.micro_batch_size

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Output and input features of the layer's four weights."""
        return {
            "qkv": ((self.heads + 2 * self.groups) * self.channels, self.hidden),
            "proj": (self.hidden, self.heads * self.channels),
            "fc1": (self.ffn * (2 if self.swiglu else 1), self.hidden),
            "fc2": (self.hidden, self.ffn),
        }


@dataclass(frozen=True)
class Cost:
    """What no implementation can do without, on the busiest rank.

    Attributes:
        wire_bytes: Bytes that leave the rank.
        flops: Operations.
        logical_bytes: Bytes in the convention of the field's tables, if it differs.
    """

    wire_bytes: float
    flops: float
    logical_bytes: float | None = None


class BenchCase(ABC, Generic[Call, Context]):
    """An op with what measuring it takes.

    Attributes:
        op: The op.
        row: The op's name in rows of results.
        measured: Which pass a row measures.
        has_rows: Whether benchmarks measure it by itself.
        groups: Which of Megatron's groups has all ranks if tools run the op; None: it takes any group.
        asks_gate: Whether the fused path asks the gate itself, as a layer: a call with a ``no_row_reason`` runs
            natively.
        num_sets: Sets of inputs that are used in turn; None: as many as are never found in the L2 cache.
    """

    row: str
    measured: Pass = "forward"
    has_rows: bool = True
    groups: MegatronGroups | None = None
    asks_gate: bool = False
    num_sets: int | None = None

    def __init__(self, op: Op[Call, Context]) -> None:
        self.op = op

    @abstractmethod
    def shapes(self, world_size: int, on_gpu: bool) -> Sequence[Shape]:
        """The published shapes, or small ones if kernels are interpreted."""

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        """The shape that ``trace`` records if the command line names none."""
        return self.shapes(world_size, on_gpu)[0]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> Sequence[Shape]:
        """The shapes that the op has in a transformer layer."""
        return ()

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        """Why these sizes do not divide over the ranks, or None."""
        return None

    @abstractmethod
    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> Call:
        """A call of random values, with gradients for its results; ranks differ, runs do not.

        Raises:
            SettingError: The sizes do not divide over the ranks.
        """

    def most_repetitions(self, shape: Shape, world_size: int) -> int | None:
        """How often a long call is timed at the most; None: as often as the command line asks for."""
        return None

    def backward(self, call: Call, context: Context, *, is_fused: bool) -> Function | None:
        """Gradients of the inputs by one path if they are not autograd's: a function of the inputs. Rows of an op that
        has it natively compare gradients alone."""
        return None

    def no_row_reason(self, call: Call) -> str | None:
        """Why a sample is not measured: a layer would run it natively; or None."""
        return None

    def surroundings(self, shape: Shape) -> AbstractContextManager[object]:
        """The modes in which calls of a shape are made and run."""
        return nullcontext()

    def cost(self, call: Call, context: Context) -> Cost | None:
        """Bytes and operations of the measured pass, for its limit."""
        return None

    def columns(self, call: Call, context: Context, timings: Mapping[str, Timing]) -> Mapping[str, Any]:
        """Fields of a row that replace those from ``cost``; ``timings``: by name."""
        return {}

    def parts(self, call: Call, context: Context) -> Mapping[str, Callable[[], object]]:
        """What a row shows beside both paths: ``gemm`` and ``comm`` alone."""
        return {}

    def peers(self, call: Call, context: Context) -> Mapping[str, Callable[[], object]]:
        """Other implementations by name; a row shows the fastest."""
        return {}

    def comm_sms(self, call: Call, context: Context) -> int:
        """Multiprocessors that the fused path keeps for communication."""
        return 0
