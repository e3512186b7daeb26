"""Attention of a context parallel group whose ranks gather all keys and values: Transformer Engine's ``all_gather``
attention, with the exchanges of ``sp.keys_values`` around the same attention kernels.

    for step, chunk in enumerate((rank, 2 * world_size - 1 - rank)):
        out[chunk] = attention(q[chunk], whole_k[range of chunk], whole_v[range of chunk])

Forward: the first step's attention starts when its keys and values have arrived, and is enqueued before the second
step's. Backward: gathers again, computes both steps, and adds up the gradients of k and v over steps and ranks. Only
this rank's q, k and v, and what the attention kernels want, are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.schedule.keys import Range, chunks_of
from ditron_train.sp.keys_values import KeyValueContext, scatter_key_value_grads, start_key_value_gather

_Saved = tuple[torch.Tensor | None, ...]


class StepKernels(Protocol):
    """The attention of one step, on contiguous tensors in the layout of the call."""

    def forward(self, step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, _Saved]:
        """The attended values, shaped as q or with leading dimensions merged, and what ``backward`` needs."""

    def backward(
        self,
        step: int,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        saved: _Saved,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v."""


class _Gathered(Protocol):
    keys: torch.Tensor
    values: torch.Tensor

    def wait(self, step: int) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class FusedMoves:
    """The exchanges of keys and values by copy engines."""

    def __init__(self, context: KeyValueContext, ranges: tuple[Range, ...]) -> None:
        self.rank, self.ranges, self._context = context.rank, ranges, context

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> _Gathered:
        """Starts the gather of this rank's rows."""
        return start_key_value_gather(k, v, context=self._context, ranges=self.ranges)

    def scatter(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of this rank's rows, from those of both steps."""
        return scatter_key_value_grads(keys, values, context=self._context, num_rows=num_rows, ranges=self.ranges)


class _GatheredNatively:
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def wait(self, step: int) -> None:
        """Everything is there in stream order."""

    finish = abort = lambda self: None


class NativeMoves:
    """The same exchanges by collectives of the process group, in Transformer Engine's order."""

    def __init__(self, group: dist.ProcessGroup, ranges: tuple[Range, ...]) -> None:
        self.rank, self.ranges, self._group = dist.get_rank(group), ranges, group
        self._world_size = dist.get_world_size(group)

    def _order(self, like: torch.Tensor) -> torch.Tensor:
        chunks = [chunk for rank in range(self._world_size) for chunk in chunks_of(rank, self._world_size)]
        return torch.tensor(chunks, dtype=torch.int32, device=like.device)

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> _Gathered:
        """Gathers this rank's rows."""
        whole, order = [], self._order(k).argsort()
        for tensor in (k, v):
            gathered = tensor.new_empty(self._world_size * len(tensor), *tensor.shape[1:])
            dist.all_gather_into_tensor(gathered, tensor, group=self._group)
            whole.append(gathered.unflatten(0, (2 * self._world_size, -1)).index_select(0, order).flatten(0, 1))
        return _GatheredNatively(*whole)

    def scatter(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of this rank's rows, from those of both steps."""
        results = []
        for steps in (keys, values):
            total = steps[0].new_zeros(self._world_size * num_rows, *steps[0].shape[1:])
            for chunk, grad in zip(chunks_of(self.rank, self._world_size), steps):
                total[slice(*self.ranges[chunk])].add_(grad)
            chunks = total.unflatten(0, (2 * self._world_size, -1)).index_select(0, self._order(total))
            out = total.new_empty(num_rows, *total.shape[1:])
            dist.reduce_scatter_tensor(out, chunks.flatten(0, 1), group=self._group)
            results.append(out)
        return results[0], results[1]


@dataclass(frozen=True)
class GatheredAttention:
    """What a call of ``all_gather_attention`` computes with.

    Attributes:
        moves: The exchanges.
        kernels: The attention.
        seq_dim: Dimension of q, k and v that is the sequence: 0 (sbhd) or 1 (bshd).
        second_stream: Where the second step runs on a GPU, or None.
    """

    moves: FusedMoves | NativeMoves
    kernels: StepKernels
    seq_dim: int
    second_stream: torch.cuda.Stream | None

    def run(self, k: torch.Tensor, v: torch.Tensor, each: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:
        """Gathers k and v [2 chunks, ...] and calls ``each`` with a step, its keys and its values."""
        world_size = len(self.moves.ranges) // 2
        gathered = self.moves.gather(k, v)

        def attend(step: int) -> None:
            rows = slice(*self.moves.ranges[chunks_of(self.moves.rank, world_size)[step]])
            k_, v_ = (
                whole[rows].view(-1, *k.shape[1:]).movedim(0, self.seq_dim).contiguous()
                for whole in (gathered.keys, gathered.values)
            )
            each(step, k_, v_)

        try:
            gathered.wait(0)
            second = self.second_stream
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
        outs: list[torch.Tensor] = []
        saved: list[_Saved] = []

        def attend(step: int, k_: torch.Tensor, v_: torch.Tensor) -> None:
            out, kept = call.kernels.forward(step, q.select(seq_dim, step).contiguous(), k_, v_)
            result.select(seq_dim, step).copy_(out.view(result.select(seq_dim, step).shape))
            outs.append(out)
            saved.append(kept)

        call.run(k, v, attend)
        ctx.call, ctx.num_saved = call, len(saved[0])
        ctx.save_for_backward(q, k, v, *outs, *saved[0], *saved[1])
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
            q_, out = q.select(seq_dim, step).contiguous(), outs[step]
            grad_ = grad.select(seq_dim, step).contiguous().view(out.shape)
            dq, dk, dv = call.kernels.backward(step, grad_, q_, k_, v_, out, tuple(saved[step]))
            grad_q.select(seq_dim, step).copy_(dq.view(q_.shape))
            grads.append((dk.movedim(seq_dim, 0).contiguous(), dv.movedim(seq_dim, 0).contiguous()))

        call.run(k, v, attend)
        if call.second_stream is not None:  # the current stream reads what the second one has allocated
            for tensor in grads[1]:
                tensor.record_stream(torch.cuda.current_stream())
        grad_k, grad_v = (
            x.movedim(0, seq_dim).contiguous()
            for x in call.moves.scatter([one[0] for one in grads], [one[1] for one in grads], len(k))
        )
        return grad_q.view(*q.shape[:seq_dim], -1, *q.shape[seq_dim + 2 :]), grad_k, grad_v, None


def all_gather_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: GatheredAttention) -> torch.Tensor:
    """The attention of this rank's queries over the whole sequence; differentiable.

    Args:
        q: [b, s / W, h, d] or [s / W, b, h, d], the rank's two chunks behind each other.
        k, v: Likewise, with as many heads as there are groups.
        call: Exchanges, kernels and layout.

    Returns:
        The attended values, shaped as q.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``start_key_value_gather``.
    """
    result: torch.Tensor = _AllGatherAttention.apply(q, k, v, call)
    return result
