"""Autograd functions of gathered experts: the gather of tokens and the reduce-scatter of sums around a rank's experts,
alone or with the grouped GEMM beside them.

    all  = gather(x)                        dx  = scatter(sum(drows)), drows = dy W1[e]
    y    = place(all) W1[e].T               dW1[e] = dy.T rows over the expert's rows
    z    = h W2[e].T                        dh  = dz W2[e], dz = place(gather(dout))
    out  = scatter(sum(z))                  dW2[e] = dz.T h

Source by source: while copy engines bring the tokens of one rank, those of the one before are placed and multiplied;
while they take the sums of one rank away, those of the next are multiplied and added up. One grouped GEMM takes the
rows of as many sources as the transfers allow. Experts of so few rows that cuBLAS may add up otherwise are multiplied
natively, behind the last arrival or before the first sums. The weight gradients, each one GEMM over all rows in
native's order, run under the last transfer, or behind the last arrival.
Megatron's path gathers the gradient in the type of the probabilities, which is a wider copy of it; ours in its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ditron_train.ep.expert_functions import Gemm, Wgrad
from ditron_train.ep.fused import FewProduct
from ditron_train.ep.gathered import RowLayout, place, sum_to_tokens
from ditron_train.ep.group_gemm import group_wgrad
from ditron_train.ep.orders import SumOrder
from ditron_train.megatron.ep.gathered_product import GatheredProduct
from ditron_train.runtime.derivatives import refuse_second_derivatives, rows_to_save
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext
from ditron_train.tp.gather import PendingGather, start_all_gather
from ditron_train.tp.reduce_scatter import reduce_scatter_rows, reserve_reduce_scatter


@dataclass
class GatheredCall:
    """One pass of a layer's gathered experts.

    Attributes:
        layout: Of the routing.
        context: Of the group of all ranks that hold experts.
        order: Which native permutation is in force.
        sum_dtype: In which results are added up over ranks: that of the probabilities.
        started: The gather of the tokens, which is on its way.
        wgrad: Weight gradients; None: ours.
        gemm: As of ``ExpertCall``; products beside a movement are ours in any case.
        fewest_rows: Experts of fewer rows, of all sources, are multiplied by ``few``.
        few: Natively; None: ours multiplies all.
    """

    layout: RowLayout
    context: TPContext
    order: SumOrder
    sum_dtype: torch.dtype
    started: PendingGather | None = None
    wgrad: Wgrad | None = None
    gemm: Gemm | None = None
    fewest_rows: int = 0
    few: FewProduct | None = None

    def take_started(self) -> PendingGather | None:
        """The gather, which is the taker's from here on."""
        started, self.started = self.started, None
        return started

    def weight_grads(
        self, grad: torch.Tensor, rows: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """The gradient of each weight."""
        if self.wgrad is not None:
            return self.wgrad(grad, rows, weights)
        return group_wgrad(grad, rows, self.layout.tiles).unbind(0)


def _check(name: str, x: torch.Tensor, num_rows: int, weights: Sequence[torch.Tensor], call: GatheredCall) -> None:
    """Refuses what no rank can run, before anything is signalled."""
    if x.dim() != 2 or x.shape[0] != num_rows or x.device != call.context.device:
        raise NotSupportedError(f"{name}: needs [{num_rows}, columns] on {call.context.device}, got {tuple(x.shape)}")
    if call.layout.world_size != call.context.world_size:
        raise NotSupportedError(f"{name}: a routing of {call.layout.world_size} ranks")
    if weights and len(weights) != call.layout.num_experts:
        raise NotSupportedError(f"{name}: {len(weights)} weights for {call.layout.num_experts} experts")
    for shape, dtype in {(w.shape, w.dtype) for w in weights}:
        if len(shape) != 2 or shape[1] != x.shape[1] or dtype != x.dtype:
            raise NotSupportedError(f"{name}: weights {tuple(shape)} {dtype} for rows of {x.shape[1]} x {x.dtype}")


@contextmanager
def given_up_on_error(take: Callable[[], PendingGather | None]) -> Iterator[None]:
    """Where something fails inside before it has taken the started gather, that is given up: what comes later would
    take its rows for those of the next one."""
    try:
        yield
    except BaseException:
        started = take()
        if started is not None:
            started.abort()
        raise


def start(x: torch.Tensor, context: TPContext, sum_dtype: torch.dtype) -> PendingGather:
    """Starts the gather of ``x`` [tokens, hidden]; all memory of the pass and of its backward is there then.

    Raises:
        ArenaError, NotSupportedError: It cannot be had, or ``x`` is something else; on every rank alike.
    """
    if x.dim() != 2:
        raise NotSupportedError(f"gathered experts: needs [tokens, hidden], got {tuple(x.shape)}")
    shape = torch.Size((context.world_size * x.shape[0], x.shape[1]))
    for dtype in dict.fromkeys((sum_dtype, x.dtype)):
        reserve_reduce_scatter(shape, dtype, context=context)
    return start_all_gather(x, context=context, in_turn=True, copies_own=False)


def _product(
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    call: GatheredCall,
    *,
    transpose: bool,
    travels: tuple[int, torch.dtype],
    comes: bool,
) -> GatheredProduct:
    options: dict[str, Any] = dict(transpose=transpose, travels=travels, comes=comes)
    options.update(few=call.few, fewest_rows=call.fewest_rows)
    return GatheredProduct(rows, weights, call.layout, call.context, **options)


def _gather(
    x: torch.Tensor, call: GatheredCall, rows: torch.Tensor, each: Callable[[int], None] | None = None
) -> None:
    """Fills ``rows`` as the tokens arrive; ``each`` runs behind those of each source."""
    started = call.take_started()
    if started is None:
        started = start_all_gather(x, context=call.context, in_turn=True, copies_own=False)

    def place_share(share: slice, tokens: torch.Tensor) -> None:
        source = share.start // call.layout.num_tokens
        place(tokens, rows, call.layout, source)
        if each is not None:
            each(source)

    started.consume(place_share)


def _scatter(
    rows: torch.Tensor,
    call: GatheredCall,
    dtype: torch.dtype,
    each: Callable[[int], None] | None = None,
    behind: Callable[[], None] | None = None,
) -> torch.Tensor:
    """The sums of all tokens' rows over the ranks; ``each`` runs before those of each source are added up."""
    layout = call.layout
    partial = rows.new_empty(layout.num_tokens * layout.world_size, rows.shape[1], dtype=dtype)

    def produce(sums: torch.Tensor, owner: int) -> None:
        if each is not None:
            each(owner)
        sum_to_tokens(rows, sums, layout, owner, call.order)

    return reduce_scatter_rows(partial, produce, context=call.context, behind=behind).to(rows.dtype)


@outside_compile
class _GatherToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: GatheredCall) -> torch.Tensor:
        ctx.call = call
        rows = x.new_empty(call.layout.num_rows, x.shape[1])
        _gather(x, call, rows)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        refuse_second_derivatives("gather_to_rows")
        return _scatter(grad.contiguous(), ctx.call, grad.dtype), None


@outside_compile
class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, call: GatheredCall) -> torch.Tensor:
        ctx.call = call
        return _scatter(rows.contiguous(), call, call.sum_dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        refuse_second_derivatives("scatter_rows")
        rows = grad.new_empty(ctx.call.layout.num_rows, grad.shape[1])
        _gather(grad, ctx.call, rows)
        return rows, None


@outside_compile
class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: GatheredCall, *weights: torch.Tensor) -> torch.Tensor:
        rows = x.new_empty(call.layout.num_rows, x.shape[1])
        product = _product(rows, weights, call, transpose=True, travels=(x.shape[1], x.dtype), comes=True)
        _gather(x, call, rows, product.compute)
        product.compute_few()
        ctx.call = call
        ctx.save_for_backward(rows_to_save(rows, weights), *weights)
        return product.result

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("gather_linear")
        (rows, *weights), call, grad_y = ctx.saved_tensors, ctx.call, grad_y.contiguous()
        grads: list[Sequence[torch.Tensor | None]] = [[None] * len(weights)]
        with_wgrad = any(ctx.needs_input_grad[2:])

        def weight_grads() -> None:
            if with_wgrad:
                grads[0] = call.weight_grads(grad_y, rows, weights)

        if not ctx.needs_input_grad[0]:  # a rank whose GEMMs are apart scatters nothing then
            weight_grads()
            return (None, None, *grads[0])
        travels = weights[0].shape[1], grad_y.dtype
        product = _product(grad_y, weights, call, transpose=False, travels=travels, comes=False)
        product.compute_few()
        grad_x = _scatter(product.result, call, grad_y.dtype, product.compute, weight_grads)
        return (grad_x, None, *grads[0])


@outside_compile
class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, call: GatheredCall, *weights: torch.Tensor) -> torch.Tensor:
        h = h.contiguous()
        ctx.call = call
        ctx.save_for_backward(rows_to_save(h, weights), *weights)
        travels = weights[0].shape[0], call.sum_dtype
        product = _product(h, weights, call, transpose=True, travels=travels, comes=False)
        product.compute_few()
        return _scatter(product.result, call, call.sum_dtype, product.compute)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("linear_scatter")
        (h, *weights), call = ctx.saved_tensors, ctx.call
        rows = grad_out.new_empty(call.layout.num_rows, grad_out.shape[1])
        travels = grad_out.shape[1], grad_out.dtype
        product = _product(rows, weights, call, transpose=False, travels=travels, comes=True)
        _gather(grad_out, call, rows, product.compute)
        product.compute_few()
        grads: Sequence[torch.Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            grads = call.weight_grads(rows, h, weights)
        return (product.result, None, *grads)


@outside_compile
def gather_to_rows(x: torch.Tensor, call: GatheredCall) -> torch.Tensor:
    """``x`` [tokens, hidden] of all ranks at this rank's experts: [num_rows, hidden], by expert, source and token."""
    with given_up_on_error(call.take_started):
        _check("gather_to_rows", x, call.layout.num_tokens, (), call)
        return _GatherToRows.apply(x, call)


@outside_compile
def scatter_rows(rows: torch.Tensor, call: GatheredCall) -> torch.Tensor:
    """The experts' results [num_rows, hidden], added up over a token's experts on this rank and then over ranks:
    [tokens, hidden]."""
    _check("scatter_rows", rows, call.layout.num_rows, (), call)
    return _ScatterRows.apply(rows, call)


@outside_compile
def gather_linear(x: torch.Tensor, weights: Sequence[torch.Tensor], call: GatheredCall) -> torch.Tensor:
    """``gather_to_rows`` with the experts' first linear layer ([N, hidden] each): [num_rows, N]."""
    with given_up_on_error(call.take_started):
        _check("gather_linear", x, call.layout.num_tokens, weights, call)
        return _GatherLinear.apply(x, call, *weights)


@outside_compile
def linear_scatter(h: torch.Tensor, weights: Sequence[torch.Tensor], call: GatheredCall) -> torch.Tensor:
    """The experts' second linear layer ([hidden, K] each) of ``h`` [num_rows, K] with ``scatter_rows``."""
    _check("linear_scatter", h, call.layout.num_rows, weights, call)
    return _LinearScatter.apply(h, call, *weights)
