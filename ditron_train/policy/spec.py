"""``OpSpec``: all that is particular to one accelerated op, said once.

The gate asks a spec whether a call may run by the fused path; ``verify``, ``bench``, ``tune`` and the tests iterate
over the specs of the `catalog`. A new op is a new spec: no tool has to know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from ditron_train.policy.decide import Decision, decide
from ditron_train.policy.probe import Run, check_memory
from ditron_train.runtime.settings import get_settings

Call = TypeVar("Call")
Context = TypeVar("Context")
Pass = Literal["forward", "backward", "forward_backward"]
MegatronGroups = Literal["tensor", "expert"]
#: From the inputs of a call to its results.
Function = Callable[..., Sequence[torch.Tensor]]

_HELD = 8  # times a call's inputs: values that show the order of sums, and both paths' results and gradients


@dataclass(frozen=True)
class Place:
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
        logical_bytes: Bytes in the convention of the field's tables, where it differs.
    """

    wire_bytes: float
    flops: float
    logical_bytes: float | None = None


@dataclass(frozen=True)
class Trial:
    """What the policy compares and times for one call.

    Attributes:
        words: Op, shape and dtype in words, the room first: the key of a plan file.
        megatron: Megatron's path on some data: results, then gradients.
        fused: The fused path on the same data.
        summed: The type that NCCL adds up over the ranks on Megatron's path, if it does.
        also: More of both on other data: compared, not timed.
        host_counts: Whether ours has to be faster where the device waits for the host, too: where what runs around the
            call may keep the host from being ahead of it.
    """

    words: str
    megatron: Run
    fused: Run
    summed: torch.dtype | None = None
    also: Sequence[tuple[Run, Run]] = field(default_factory=tuple)
    host_counts: bool = False


class OpSpec(ABC, Generic[Call, Context]):
    """One op. A `Call` holds everything of one call on this rank: tensors, group and options.

    Attributes:
        name: The room, then the op: ``tp column``. It stands in log lines and in front of a plan's keys.
        row: The op's name in rows of results.
        measured: Which pass a row measures.
        has_rows: Whether benchmarks measure it by itself.
        groups: Which of Megatron's groups has all ranks where tools run the op; None: it takes any group.
        num_sets: Sets of inputs that are used in turn; None: as many as are never found in the L2 cache.
        table_op: What tuning tables call it; None for an op without a choice.
        is_local: Whether nothing is sent: tuning tables hold its choice under one rank.
        search_rounds: How often ``tune`` asks for candidates.
        log_name: What log lines call it where that is not its name.
        logs_native: Whether the gate says why a call runs by Megatron's path.
        looks_at_host: Whether a job's host is looked at; only of an op that all ranks of its group call equally often,
            since they agree at a call.
    """

    name: str
    log_name: str | None = None
    logs_native: bool = True
    looks_at_host: bool = False
    row: str
    measured: Pass = "forward"
    has_rows: bool = True
    groups: MegatronGroups | None = None
    num_sets: int | None = None
    table_op: str | None = None
    is_local: bool = False
    search_rounds: int = 1

    # -- deciding ---------------------------------------------------------------------------------------------------

    def group(self, call: Call) -> dist.ProcessGroup | None:
        """Who decides together: the call's ``group``; None for an op of one process."""
        return call.group  # type: ignore[attr-defined,no-any-return]

    def device(self, call: Call) -> torch.device:
        """Where the call's tensors are."""
        return self.inputs(call)[0].device

    def key(self, call: Call) -> tuple[Hashable, ...]:
        """All that the decision depends on beside the group, which the ranks of the group see alike: by default
        shapes, types and device of the inputs."""
        inputs = self.inputs(call)
        return (*((tuple(tensor.shape), tensor.dtype) for tensor in inputs), self.device(call))

    def why_not(self, call: Call) -> str | None:
        """Why the call is not covered, or None. It asks no peer, and every rank of the group finds the same."""
        return None

    @abstractmethod
    def context(self, call: Call) -> Context:
        """Who owns the op's memory (collective at its first use).

        Raises:
            ArenaError, NotSupportedError: It cannot be had; on every rank alike.
        """

    def decide(self, call: Call, context: Context) -> Decision:
        """The policy's decision (collective)."""
        group, device = self.group(call), self.device(call)
        assert group is not None, f"{self.name} decides by itself"
        if device.type == "cuda" and get_settings().policy != "force":  # in front of what a trial makes
            check_memory(self.held_bytes(call), device, group)
        trial = self.trial(call, context)
        return decide(
            trial.words,
            trial.megatron,
            trial.fused,
            group=group,
            device=device,
            sums=trial.summed,
            also=trial.also,
            host_counts=trial.host_counts,
            is_told=not self.is_part(call),
        )

    def held_bytes(self, call: Call) -> int:
        """What a comparison holds of a GPU's memory at most, beside the job's own tensors; to be had on every rank."""
        return _HELD * sum(tensor.nbytes for tensor in self.inputs(call))

    def is_part(self, call: Call) -> bool:
        """Whether ``call`` is a part of what will run, which another decision is about."""
        return False

    def trial(self, call: Call, context: Context) -> Trial:
        """What is compared: the call's own tensors, which are timed, and on GPUs values that reveal the order of
        sums."""
        calls = [self.given(call, context)]
        if self.device(call).type == "cuda":
            calls += self.revealing(call, context)
        first, *more = (
            (lambda one=one: results(self, one), lambda one=one: results(self, one, context)) for one in calls
        )
        also = [*more, *self.more_pairs(call, context)]
        return Trial(self.words(call, context), *first, self.summed_dtype(call), also)

    def words(self, call: Call, context: Context) -> str:
        """Key of a plan: op, shape and dtype."""
        inputs = self.inputs(call)
        sizes = " ".join("x".join(map(str, tensor.shape)) for tensor in inputs)
        return f"{self.name} {sizes} {str(inputs[0].dtype).removeprefix('torch.')}"

    def where(self, call: Call) -> str:
        """The call's shape as a log line says it, in front of the reason."""
        return ""

    def summed_dtype(self, call: Call) -> torch.dtype | None:
        """The type that NCCL adds up over the ranks on Megatron's path, if it does."""
        return None

    def more_pairs(self, call: Call, context: Context) -> Sequence[tuple[Run, Run]]:
        """More of Megatron's path and of what the fused path relies on: compared, not timed."""
        return ()

    # -- running ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def inputs(self, call: Call) -> Sequence[torch.Tensor]:
        """The tensors that ``megatron`` and ``fused`` take."""

    def needs_grad(self, call: Call) -> Sequence[bool]:
        """Which inputs get gradients where the results do."""
        return [True] * len(self.inputs(call))

    def grads(self, call: Call) -> Sequence[torch.Tensor]:
        """Gradients of the results; empty for an op without a backward."""
        return ()

    @abstractmethod
    def megatron(self, call: Call) -> Function:
        """Megatron's path: a function of ``inputs``."""

    @abstractmethod
    def fused(self, call: Call, context: Context) -> Function:
        """The fused path: the same function of ``inputs``, bit for bit."""

    # -- values -----------------------------------------------------------------------------------------------------

    def given(self, call: Call, context: Context) -> Call:
        """The call's own tensors, with gradients for its results."""
        return call

    def revealing(self, call: Call, context: Context) -> Sequence[Call]:
        """Calls of this shape whose values show in which order sums were taken."""
        return ()

    # -- tools ------------------------------------------------------------------------------------------------------

    def shapes(self, world_size: int, on_gpu: bool) -> Sequence[Shape]:
        """The published shapes, or small ones where kernels are interpreted."""
        return ()

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        """The shape that ``trace`` records where the command line names none."""
        return self.shapes(world_size, on_gpu)[0]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> Sequence[Shape]:
        """The shapes that the op has in a transformer layer."""
        return ()

    def why_not_shape(self, shape: Shape, world_size: int) -> str | None:
        """Why ranks cannot share out these sizes, or None."""
        return None

    def sample(self, shape: Shape, place: Place, seed: int) -> Call:
        """A call of random values, with gradients for its results; ranks differ, runs do not.

        Raises:
            SettingError: The sizes do not divide over the ranks.
        """
        raise NotImplementedError(f"{self.name} makes up no calls")

    def most_repetitions(self, shape: Shape, world_size: int) -> int | None:
        """How often a long call is timed at the most; None: as often as the command line asks for."""
        return None

    def megatron_backward(self, call: Call) -> Function | None:
        """Gradients of ``inputs`` by Megatron's path where that is not autograd's: a function of ``inputs``. Rows of
        such an op compare gradients alone, and no result of a forward pass is kept for them."""
        return None

    def fused_backward(self, call: Call, context: Context) -> Function | None:
        """The same of the fused path."""
        return None

    def why_no_row(self, call: Call) -> str | None:
        """Why a sample is not measured: a layer would not run it by the fused path either; or None."""
        return None

    def surroundings(self, shape: Shape) -> AbstractContextManager[object]:
        """What holds while calls of a shape are made up and run."""
        return nullcontext()

    def cost(self, call: Call, context: Context) -> Cost | None:
        """Bytes and operations of the measured pass, for its limit."""
        return None

    def columns(self, call: Call, context: Context, times_us: Mapping[str, float]) -> Mapping[str, Any]:
        """Fields of a row that take the place of those from ``cost``; ``times_us``: medians by name."""
        return {}

    def parts(self, call: Call, context: Context) -> Mapping[str, Callable[[], object]]:
        """What stands beside both paths in a row: ``gemm`` and ``comm`` alone."""
        return {}

    def peers(self, call: Call, context: Context) -> Mapping[str, Callable[[], object]]:
        """Other implementations by name; a row shows the quickest."""
        return {}

    def comm_sms(self, call: Call, context: Context) -> int:
        """Multiprocessors that the fused path keeps for communication."""
        return 0

    def tuned_shapes(self, world_size: int, on_gpu: bool) -> Sequence[Shape]:
        """The shapes that ``tune`` takes where the command line names none; all of them are held at a time."""
        return self.shapes(world_size, on_gpu)

    def shape_class(self, call: Call) -> str:
        """The class of shapes that share a choice in a tuning table: by default the first input's shape."""
        return "x".join(map(str, self.inputs(call)[0].shape))

    def candidates(self, call: Call, context: Context, ranked: Sequence[Hashable]) -> Sequence[Hashable]:
        """Ways to run the fused path that are worth a try, the first being the one that runs untuned.

        Args:
            ranked: What was tried before, the quickest first; at the first question nothing.
        """
        return ()

    def fused_as(self, call: Call, context: Context, candidate: Any) -> Function:
        """The fused path as ``candidate`` says."""
        raise NotImplementedError(f"{self.name} is not tuned")

    def compile(self, call: Call, context: Context, candidate: Any) -> tuple[Hashable, Callable[[], None]] | None:
        """What tells the kernels of ``candidate`` from others, and how to compile them without running them; None
        where they are compiled as they run."""
        return None

    def entry(self, call: Call, candidate: Any, *, is_native: bool) -> dict[str, Any]:
        """``candidate`` as it stands in a tuning table; ``is_native``: Megatron's path was quicker than every one."""
        return {"choice": candidate, "native": is_native}


def results(spec: OpSpec[Call, Context], call: Call, context: Any = None) -> list[torch.Tensor]:
    """Results of Megatron's path, or with a context of the fused path, then the gradients of the inputs."""
    function = spec.megatron(call) if context is None else spec.fused(call, context)
    grads = spec.grads(call)
    if not grads:
        return list(function(*spec.inputs(call)))
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(spec.inputs(call), spec.needs_grad(call), strict=True)
        ]
        found = list(function(*leaves))
        torch.autograd.backward(found, list(grads))
    gradients = [leaf.grad for leaf in leaves if leaf.requires_grad]
    return [*(one.detach() for one in found), *(grad for grad in gradients if grad is not None)]
