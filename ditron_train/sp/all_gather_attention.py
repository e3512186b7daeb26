"""Attention of a context parallel group whose ranks gather all keys and values: Transformer Engine's ``all_gather``
attention, with the exchanges of ``sp.keys_values`` around the same attention kernels.

    for step, chunk in enumerate((rank, 2 * world_size - 1 - rank)):
        out[chunk] = attention(q[chunk], whole_k[range of chunk], whole_v[range of chunk])

Forward: the first step's attention starts when its keys and values have arrived, and is enqueued before the second
step's. Backward: gathers again, computes both steps, and adds up the gradients of k and v over steps and ranks. Only
this rank's q, k and v, and what the attention kernels want, are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ditron_train.policy import Function, Op, Trial
from ditron_train.policy.op import ProofPart, make_trial
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.values import make_values
from ditron_train.schedule.keys import Range, chunks_of
from ditron_train.sp.context import get_sp_context
from ditron_train.sp.keys_values import FusedMoves, get_key_value_context
from ditron_train.stream.op_context import OpContext
from ditron_train.symm.nodes import spans_nodes


class Attended(NamedTuple):
    """What the backward of one step's attention gets: its inputs and its result, in the layout of the call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    saved: tuple[torch.Tensor | None, ...]  #: What ``forward`` returned for it.


class StepKernels(Protocol):
    """The attention of one step, on contiguous tensors."""

    def forward(self, step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The attended values, shaped as q, and a tuple of tensors or None that ``backward`` needs."""

    def backward(self, step: int, grad: torch.Tensor, attended: Attended) -> Sequence[torch.Tensor]:
        """Gradients of q, k and v."""


class NativeMoves:
    """The same exchanges by collectives of the process group, in Transformer Engine's order."""

    def __init__(self, group: dist.ProcessGroup, ranges: tuple[Range, ...], device: torch.device) -> None:
        self.rank, self.ranges, self._group = dist.get_rank(group), ranges, group
        self._world_size = dist.get_world_size(group)
        chunks = [chunk for rank in range(self._world_size) for chunk in chunks_of(rank, self._world_size)]
        self._order = torch.tensor(chunks, device=device)

    def _reordered(self, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (2 * self._world_size, -1)).index_select(0, order).flatten(0, 1)

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Gathers this rank's rows."""
        whole = [one.new_empty(self._world_size * len(one), *one.shape[1:]) for one in (k, v)]
        for gathered, tensor in zip(whole, (k, v)):
            dist.all_gather_into_tensor(gathered, tensor, group=self._group)
        keys, values = (self._reordered(gathered, self._order.argsort()) for gathered in whole)
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731  everything is there in stream order
        return SimpleNamespace(keys=keys, values=values, wait=nothing, finish=nothing, abort=nothing)

    def scatter(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of this rank's rows, from those of both steps."""
        results = []
        for steps in (keys, values):
            total = steps[0].new_zeros(self._world_size * num_rows, *steps[0].shape[1:])
            for chunk, grad in zip(chunks_of(self.rank, self._world_size), steps):
                total[slice(*self.ranges[chunk])].add_(grad)
            results.append(total.new_empty(num_rows, *total.shape[1:]))
            dist.reduce_scatter_tensor(results[-1], self._reordered(total, self._order), group=self._group)
        return tuple(results)


@dataclass(frozen=True)
class GatheredAttention:
    """What a call of ``all_gather_attention`` computes with.

    Attributes:
        moves: The exchanges.
        kernels: The attention.
        seq_dim: Dimension of q, k and v that is the sequence: 0 (sbhd) or 1 (bshd).
        second_stream: Where the second step runs on a GPU; not looked at on the CPU.
    """

    moves: FusedMoves | NativeMoves
    kernels: StepKernels
    seq_dim: int
    second_stream: torch.cuda.Stream | None

    def run(self, k: torch.Tensor, v: torch.Tensor, each: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:
        """Gathers k and v [2 chunks, ...] and calls ``each`` with a step, its keys and its values."""
        chunks = chunks_of(self.moves.rank, len(self.moves.ranges) // 2)
        gathered = self.moves.gather(k, v)

        def attend(step: int) -> None:
            rows = slice(*self.moves.ranges[chunks[step]])
            k_, v_ = (
                whole[rows].view(-1, *k.shape[1:]).movedim(0, self.seq_dim).contiguous()
                for whole in (gathered.keys, gathered.values)
            )
            each(step, k_, v_)

        try:
            gathered.wait(0)
            second = self.second_stream if k.is_cuda else None
            if second is not None:
                second.wait_stream(torch.cuda.current_stream())
            attend(0)
            with torch.cuda.stream(second):
                gathered.wait(1)
                attend(1)
            if second is not None:
                torch.cuda.current_stream().wait_stream(second)
        except BaseException:
            gathered.abort()
            raise
        gathered.finish()


@outside_compile
class _AllGatherAttention(torch.autograd.Function):
    """[b, 2 chunks, h, d] or [2 chunks, b, h, d] of q, k and v -> the attended values, as q."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: GatheredAttention) -> torch.Tensor:
        seq_dim, shape = call.seq_dim, q.shape
        q = q.view(*shape[:seq_dim], 2, shape[seq_dim] // 2, *shape[seq_dim + 1 :])
        k, v = (x.movedim(seq_dim, 0).contiguous() for x in (k, v))
        result = torch.empty_like(q)
        steps: list[tuple[torch.Tensor, Any]] = []

        def attend(step: int, k_: torch.Tensor, v_: torch.Tensor) -> None:
            steps.append(call.kernels.forward(step, q.select(seq_dim, step).contiguous(), k_, v_))
            result.select(seq_dim, step).copy_(steps[step][0])

        call.run(k, v, attend)
        (first, kept), (second, others) = steps
        ctx.call, ctx.num_saved = call, len(kept)
        ctx.save_for_backward(q, k, v, first, second, *kept, *others)
        return result.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("the attention that gathers keys and values")
        call, (q, k, v, *rest) = ctx.call, ctx.saved_tensors
        outs, saved = rest[:2], (rest[2 : 2 + ctx.num_saved], rest[2 + ctx.num_saved :])
        seq_dim, grad = call.seq_dim, grad.view(q.shape)
        grad_q = torch.empty_like(q)
        grads: list[tuple[torch.Tensor, torch.Tensor]] = []

        def attend(step: int, k_: torch.Tensor, v_: torch.Tensor) -> None:
            attended = Attended(q.select(seq_dim, step).contiguous(), k_, v_, outs[step], tuple(saved[step]))
            grad_ = grad.select(seq_dim, step).contiguous().view(attended.out.shape)
            dq, dk, dv = call.kernels.backward(step, grad_, attended)
            grad_q.select(seq_dim, step).copy_(dq)
            grads.append((dk.movedim(seq_dim, 0).contiguous(), dv.movedim(seq_dim, 0).contiguous()))

        call.run(k, v, attend)
        grad_k, grad_v = (
            x.movedim(0, seq_dim).contiguous()
            for x in call.moves.scatter([one[0] for one in grads], [one[1] for one in grads], len(k))
        )
        if k.is_cuda and call.second_stream is not None and not torch.cuda.is_current_stream_capturing():
            # Memory of the second step's gradients goes back to that stream as soon as it is free. ``record_stream``
            # would keep it until the host has seen the sum end, and a kernel's workspace, of which it was a part,
            # would be reserved twice: 16 GiB of LLaMA-8B's deterministic attention at 32768 tokens. In a capture the
            # wait of the next ``run`` has to do: a stream that joins a capture again would have to leave it again.
            call.second_stream.wait_stream(torch.cuda.current_stream())
        return grad_q.view(*q.shape[:seq_dim], -1, *q.shape[seq_dim + 2 :]), grad_k, grad_v, None


def all_gather_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: GatheredAttention) -> torch.Tensor:
    """The attention of this rank's queries over the whole sequence; differentiable.

    Args:
        q: [b, s / W, h, d] or [s / W, b, h, d], the rank's two chunks one after the other.
        k, v: Likewise, with as many heads as there are groups.
        call: Exchanges, kernels and layout.

    Returns:
        The attended values, shaped as q.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``start_key_value_gather``.
    """
    result: torch.Tensor = _AllGatherAttention.apply(q, k, v, call)
    return result


class GatheredCall(NamedTuple):
    """One attention that gathers keys and values.

    Attributes:
        group: Context parallel group.
        values: q, k and v of this rank, of packed sequences without a batch; the context of these is an ``SPContext``.
        options: What a decision depends on besides their shapes: mask, window, kernels.
        native: From q, k and v to the attended values, shaped as q.
        attention: From a context to the fused path, which takes and gives the same.
        grads: Gradients of the result.
    """

    group: dist.ProcessGroup
    values: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: tuple[Hashable, ...]
    native: Callable[..., torch.Tensor]
    attention: Callable[[Any], Callable[..., torch.Tensor]]
    grads: tuple[torch.Tensor, ...] = ()


class AllGatherAttentionOp(Op[GatheredCall, OpContext]):
    """An attention with the gathers of its keys and values, and the sums of their gradients.

    Gradients of q are not compared: attention kernels may add them up in any order, and the exchanges do not touch
    them.
    """

    name, decides_forward, synchronizes = "sp all_gather_attention", True, True

    def key(self, call: GatheredCall) -> tuple[Hashable, ...]:
        return (*super().key(call), *call.options)

    def family(self, call: GatheredCall) -> tuple[tuple[Hashable, ...], int] | None:
        """Of packed sequences, whose number of tokens differs from microbatch to microbatch."""
        if call.values[0].dim() != 3 or spans_nodes(call.group):
            return None
        sizes = [(one.shape[1:], one.dtype) for one in call.values]
        return (*sizes, self.device(call), *call.options), len(call.values[0]) * dist.get_world_size(call.group)

    def bits_proof(self, call: GatheredCall, context: OpContext) -> Sequence[ProofPart]:
        """None: both paths run the same kernels, and NCCL's order of sums does not depend on the number of rows."""
        return ()

    def unsupported_reason(self, call: GatheredCall) -> str | None:
        return "the group spans nodes" if spans_nodes(call.group) else None

    def make_context(self, call: GatheredCall) -> OpContext:
        is_packed = call.values[0].dim() == 3
        return (get_sp_context if is_packed else get_key_value_context)(call.group, self.device(call))

    def describe(self, call: GatheredCall, context: OpContext) -> str:
        return f"{super().describe(call, context)} {' '.join(map(str, call.options))}"

    def peak_bytes(self, call: GatheredCall) -> int:
        """Both paths hold keys and values of all ranks and their gradients; of packed sequences each step's, too, and
        the fused path's symmetric buffers."""
        of_all_ranks = 14 if call.values[0].dim() == 3 else 8
        return super().peak_bytes(call) + of_all_ranks * dist.get_world_size(call.group) * call.values[1].nbytes

    def trial(self, call: GatheredCall, context: OpContext) -> Trial:
        """Normal values, whose sums show their order in every rounding."""
        q, k, v, grad = (
            make_values(tuple(one.shape), one.dtype, one.device, seed=seed, rank=context.rank)
            for seed, one in enumerate((*call.values, call.values[0]))
        )
        return make_trial(self, call._replace(values=(q, k, v), grads=(grad,)), context, summed_dtype=q.dtype)

    def inputs(self, call: GatheredCall) -> Sequence[torch.Tensor]:
        return call.values

    def needs_grad(self, call: GatheredCall) -> Sequence[bool]:
        return False, True, True

    def grads(self, call: GatheredCall) -> Sequence[torch.Tensor]:
        return call.grads

    def native(self, call: GatheredCall) -> Function:
        return lambda *values: [call.native(*values)]

    def fused(self, call: GatheredCall, context: OpContext) -> Function:
        return lambda *values: [call.attention(context)(*values)]


ALL_GATHER_ATTENTION = AllGatherAttentionOp()
