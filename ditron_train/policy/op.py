"""``Op``: what the gate has to know about an accelerated op at run time.

The layers' own modules call it. How an op is measured and tuned is in the tools (``ditron_train.tools.cases``,
``ditron_train.tools.tune``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ditron_train.policy.decide import Decision, decide
from ditron_train.policy.probe import HostCounts, Run, check_memory, same_bits
from ditron_train.runtime.settings import get_settings

Call = TypeVar("Call")
Context = TypeVar("Context")
#: A function from the inputs of a call to its results.
Function = Callable[..., Sequence[torch.Tensor]]

_PEAK = 8  # times a call's inputs: order-probe inputs, and both paths' results and gradients


@dataclass(frozen=True)
class Trial:
    """What the policy compares and times for one call.

    Attributes:
        description: Op, shape and dtype in words, the subpackage first: the key of a plan file.
        native: The native path on some data: results, then gradients.
        fused: The fused path on the same data.
        summed_dtype: The type that NCCL adds up over the ranks on the native path, if it does.
        extra_cases: Further runs of both paths on other data: compared, not timed.
        host_counts: Whether the fused path has to be faster also when the device waits for the host, since what runs
            around the call may keep the host from being ahead; ``alone``: only then, but no slower otherwise.
        log_decision: Whether to log that the fused path runs; False for a part of another decision.
    """

    description: str
    native: Run
    fused: Run
    summed_dtype: torch.dtype | None = None
    extra_cases: Sequence[tuple[Run, Run]] = field(default_factory=tuple)
    host_counts: HostCounts = False
    log_decision: bool = True


class ProofPart(NamedTuple):
    """A part of the proof that bits are identical at a number of rows.

    Attributes:
        run: From the number of rows to a boolean tensor on the device, enqueued on the current stream.
        work: How long it takes, relative to other parts, if one rank runs it for all; None: all ranks run it together.
    """

    run: Callable[[int], torch.Tensor]
    work: float | None = None


class _OfLengths(Generic[Call, Context]):
    """The part of an op for calls whose number of rows varies."""

    def family(self, call: Call) -> tuple[tuple[Hashable, ...], int] | None:
        """``key`` without the number of rows, and the number of rows; the op's context has to be an ``OpContext``.
        None: each shape is decided for itself."""
        return None

    def bits_proof(self, call: Call, context: Context) -> Sequence[ProofPart]:
        """Proves at a number of rows of the call's family that the fused path is bitwise identical; empty if it is at
        any number. By default both paths run on the trial's data (collective)."""
        op: Any = self
        sizes = self.at_rows(call, 0)  # without the job's tensors, which would stay in memory

        def compare(rows: int) -> torch.Tensor:
            resized = self.at_rows(sizes, rows)
            trial = op.trial(resized, context)
            cases = trial.extra_cases or ((trial.native, trial.fused),)
            equal = all([same_bits(native(), fused()) for native, fused in cases])  # all of them: they are collective
            return torch.tensor(equal, device=op.device(resized))

        return [ProofPart(compare)]

    def with_values(self, call: Call, x: torch.Tensor, grad: torch.Tensor | None) -> Call:
        """``call`` with the input ``x``, and the gradient of its result if there is one: what an audit computes by
        both paths. By default the call with its own data."""
        return call

    def at_rows(self, call: Call, rows: int) -> Call:
        """The call of the same family with another number of rows, on tensors without values."""
        raise NotImplementedError


class Op(_OfLengths[Call, Context], ABC):
    """One op. A `Call` holds everything of one call on this rank: tensors, group and options. The context owns the
    op's memory; it is None for an op that has none.

    Attributes:
        name: The subpackage, then the op: ``tp column``. It is in log lines and begins the keys of a plan.
        log_name: What log lines call the op, if that is not its name.
        logs_native: Whether the gate logs why a call runs natively.
        decides_forward: Whether calls without gradients (log-probabilities, evaluation) have decisions of their own,
        by
            times of the forward pass only.
        looks_at_host: Whether the gate checks during a job whether it is CPU-bound; only for an op that all ranks of
            its group call equally often, since they agree at a call.
        synchronizes: Whether ``decide`` waits for the device at its end: memory is allocated and kernels are compiled
            then, so neither fails between a forward and its backward.
        runs_concurrently: Whether a schedule runs it concurrently with another microbatch, so that only the schedule's
            runs can be timed (``job_times.run_of_schedule``), in the job's own steps.
        is_observed: Whether its layers wrap their calls in ``observed``: timed in the job if lengths vary, and
        audited.
    """

    name: str
    log_name: str | None = None
    logs_native: bool = True
    decides_forward: bool = False
    looks_at_host: bool = False
    runs_concurrently: bool = False
    is_observed: bool = False
    synchronizes: bool = False

    def group(self, call: Call) -> dist.ProcessGroup | None:
        """The ranks that decide together: the call's ``group``; None for an op of one process."""
        return call.group  # type: ignore[attr-defined,no-any-return]

    def device(self, call: Call) -> torch.device:
        """The device of the call's tensors."""
        return self.inputs(call)[0].device

    def key(self, call: Call) -> tuple[Hashable, ...]:
        """What the decision depends on besides the group, the same on all of its ranks: by default shapes, types and
        device of the inputs."""
        inputs = self.inputs(call)
        return (*((tuple(tensor.shape), tensor.dtype) for tensor in inputs), self.device(call))

    def unsupported_reason(self, call: Call) -> str | None:
        """Why the fused path does not take the call, or None. Without communication, every rank of the group gives the
        same answer."""
        return None

    def make_context(self, call: Call) -> Context:
        """The context of the fused path (collective at its first use); by default None.

        Raises:
            ArenaError, NotSupportedError: It cannot be made; on every rank alike.
        """
        return None  # type: ignore[return-value]

    @abstractmethod
    def inputs(self, call: Call) -> Sequence[torch.Tensor]:
        """The tensors that ``native`` and ``fused`` take."""

    def needs_grad(self, call: Call) -> Sequence[bool]:
        """Which inputs get gradients if the results do."""
        return [True] * len(self.inputs(call))

    def grads(self, call: Call) -> Sequence[torch.Tensor]:
        """Gradients of the results; empty for an op without a backward."""
        return ()

    @abstractmethod
    def native(self, call: Call) -> Function:
        """The native path: a function of ``inputs``."""

    @abstractmethod
    def fused(self, call: Call, context: Context) -> Function:
        """The fused path: the same function of ``inputs``, bitwise identical."""

    def decide(self, call: Call, context: Context) -> Decision:
        """The policy's decision (collective)."""
        group, device = self.group(call), self.device(call)
        assert group is not None, f"{self.name} decides by itself"
        if device.type == "cuda" and get_settings().policy != "force":  # before a trial makes data
            check_memory(self.peak_bytes(call), device, group)
        trial = self.trial(call, context)
        decision = decide(
            trial.description + ", no backward" * is_forward_only(self),
            trial.native,
            trial.fused,
            group=group,
            device=device,
            sums=trial.summed_dtype,
            extra_cases=trial.extra_cases,
            host_counts=trial.host_counts,
            log_decision=trial.log_decision,
        )
        if self.synchronizes:
            context.synchronize()  # type: ignore[attr-defined]
        return decision

    def trial(self, call: Call, context: Context) -> Trial:
        """What is compared and timed: by default the call itself."""
        return make_trial(self, call, context)

    def peak_bytes(self, call: Call) -> int:
        """The most GPU memory that a trial takes in addition to the job's tensors; every rank must have it."""
        return _PEAK * sum(tensor.nbytes for tensor in self.inputs(call))

    def describe(self, call: Call, context: Context) -> str:
        """Op, shape and dtype: the key of a plan."""
        inputs = self.inputs(call)
        sizes = " ".join("x".join(map(str, tensor.shape)) for tensor in inputs)
        return f"{self.name} {sizes} {dtype_name(inputs[0].dtype)}"

    def describe_shape(self, call: Call) -> str:
        """The call's shape for log lines, before the reason, with a trailing space."""
        return ""


def is_forward_only(op: Op[Any, Any]) -> bool:
    """Whether a call of ``op`` now would be decided as one without a backward."""
    return op.decides_forward and not torch.is_grad_enabled()


def dtype_name(dtype: torch.dtype) -> str:
    """The name in keys of a plan: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def make_trial(
    op: Op[Call, Context],
    call: Call,
    context: Context,
    *,
    order_probe: Callable[[], Sequence[Call]] = tuple,
    extra_cases: Sequence[tuple[Run, Run]] = (),
    summed_dtype: torch.dtype | None = None,
    log_decision: bool = True,
) -> Trial:
    """A trial of both paths of an op.

    Args:
        op, context: The call's op and context.
        call: The call that is timed; it has gradients for its results.
        order_probe: Makes calls of the same shape with order-probe inputs, whose results show the order of sums; they
            are compared on GPUs.
        extra_cases, summed_dtype, log_decision: As of `Trial`.
    """
    calls = [call, *(order_probe() if op.device(call).type == "cuda" else ())]
    first, *more = (
        (lambda one=one: native_results(op, one), lambda one=one: fused_results(op, one, context)) for one in calls
    )
    cases = [*more, *extra_cases]
    return Trial(op.describe(call, context), *first, summed_dtype, cases, log_decision=log_decision)


def native_results(op: Op[Call, Any], call: Call) -> list[torch.Tensor]:
    """Results of the native path, then the gradients of the inputs."""
    return _results(op, call, op.native(call))


def fused_results(op: Op[Call, Context], call: Call, context: Context) -> list[torch.Tensor]:
    """Results of the fused path, then the gradients of the inputs."""
    return _results(op, call, op.fused(call, context))


def _results(op: Op[Call, Any], call: Call, function: Function) -> list[torch.Tensor]:
    grads = op.grads(call)
    if is_forward_only(op):
        with torch.inference_mode(False), torch.no_grad():
            return list(function(*op.inputs(call)))
    if not grads:
        return list(function(*op.inputs(call)))
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(op.inputs(call), op.needs_grad(call), strict=True)
        ]
        found = list(function(*leaves))
        torch.autograd.backward(found, list(grads))
    gradients = [leaf.grad for leaf in leaves if leaf.requires_grad]
    return [*(result.detach() for result in found), *(grad for grad in gradients if grad is not None)]
