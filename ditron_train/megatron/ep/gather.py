"""Autograd functions of gathered experts: the gather of tokens and the reduce-scatter of sums around a rank's experts,
alone or with the grouped GEMM beside them.

    all  = gather(x)                        dx  = scatter(sum(drows)), drows = dy W1[e]
    y    = place(all) W1[e].T               dW1[e] = dy.T rows over the expert's rows
    z    = h W2[e].T                        dh  = dz W2[e], dz = place(gather(dout))
    out  = scatter(sum(z))                  dW2[e] = dz.T h

Source by source: while copy engines bring the tokens of one rank, those of the one before are placed and multiplied;
while they take the sums of one rank away, those of the next are multiplied and added up. One grouped GEMM takes the
rows of as many sources as the transfers allow. Experts with so few rows that cuBLAS may add up otherwise are
multiplied natively, behind the last arrival or before the first sums. The weight gradients, each one GEMM over all
rows in native's order, run under the last transfer, or behind the last arrival.
Stock Megatron gathers the gradient in the type of the probabilities, which is a wider copy of it; the fused path in
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

from ditron_train.data.device_profiles import known_rates
from ditron_train.ep.combine import SumOrder
from ditron_train.ep.dispatcher import Gemm, Wgrad
from ditron_train.ep.gather import RowLayout, SlicedLayout, place, sum_to_tokens
from ditron_train.ep.gemm_combine import FewProduct
from ditron_train.ep.grouped_gemm import GemmOperands, RowTiles, block_rows, gemm_operands, group_wgrad, multiply
from ditron_train.policy import log_native
from ditron_train.runtime.derivatives import refuse_second_derivatives, rows_to_save
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.schedule import arrival_order, chunk_order, groups_in_sequence
from ditron_train.tp.context import TPContext, get_tp_context
from ditron_train.tp.gather import PendingGather, start_all_gather
from ditron_train.tp.reduce_scatter import reduce_scatter_rows, reserve_reduce_scatter


@lru_cache(maxsize=256)
def _order(rank: int, world_size: int, is_gathered: bool) -> tuple[int, ...]:
    """Ranks as their rows come; as sums of theirs leave, the last one first."""
    if is_gathered:
        return tuple(arrival_order(rank, world_size).tolist())
    return (rank, *chunk_order(rank, world_size, "sum_push")[::-1].tolist())


class GatheredProduct:
    """A grouped GEMM of the rows of all sources in parts: those of one or several sources at a time.

    What the device does first, placing rows, needs nothing of it: so all is made at the first part.

    Args:
        rows: [num_rows, K], written as they come.
        weights: Of each expert.
        layout: Of the rows.
        context: Of the group of all ranks that hold experts.
        transpose: As of ``group_gemm``.
        payload: What a source's transfer moves: features of a token, and their type.
        is_gathered: Whether rows come, so that a part is multiplied behind the last source that has rows in it; else
            sums of them leave, and it is multiplied before the first.
        few: Who multiplies experts with few rows; None: all are fused.
        min_rows: Of experts that are not few.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        weights: Sequence[torch.Tensor],
        layout: RowLayout,
        context: TPContext,
        *,
        transpose: bool,
        payload: tuple[int, torch.dtype],
        is_gathered: bool,
        few: FewProduct | None = None,
        min_rows: int = 0,
    ) -> None:
        self._rows, self._weights, self._layout, self._context = rows, weights, layout, context
        self._transpose, self._payload, self._is_gathered = transpose, payload, is_gathered
        self._few, self._min_rows = few, 0 if few is None else min_rows
        order = _order(context.rank, context.world_size, is_gathered)
        self._turns = iter(order if is_gathered else order[::-1])

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Sources whose rows are multiplied together, in the order of their parts."""
        layout, (features, dtype) = self._layout, self._payload
        rates = known_rates(self._context.machine)
        transfer_us = layout.num_tokens * features * dtype.itemsize / (1e3 * rates.link_gbps)
        row_us = 2 * self._weights[0].numel() / (1e6 * rates.gemm_tflops)
        # Where a group's rows begin and end, half a tile of an expert is another group's on average.
        lost_us = row_us * layout.num_experts * block_rows(self._rows.device)
        order = _order(self._context.rank, self._context.world_size, self._is_gathered)
        groups = groups_in_sequence(order, row_us * layout.num_rows / layout.world_size, transfer_us, lost_us)
        # Sums are the same backward in time.
        return groups if self._is_gathered else [group[::-1] for group in reversed(groups)]

    @cached_property
    def _parts(self) -> dict[int, RowTiles]:
        """By the source behind whose rows, or before whose sums, a part is due."""
        tiles = self._layout.tiles_of_groups(self._groups, last=self._is_gathered, min_rows=self._min_rows)
        return {group[-1 if self._is_gathered else 0]: part for group, part in zip(self._groups, tiles, strict=True)}

    @cached_property
    def _operands(self) -> GemmOperands:
        any_part = next(iter(self._parts.values()))
        return gemm_operands("group_gemm", self._rows, self._weights, any_part, transpose=self._transpose)

    @property
    def result(self) -> torch.Tensor:
        """[num_rows, N], which parts are written to."""
        return self._operands.y

    def compute(self, source: int) -> None:
        """The part that is due behind the rows of this source, or before its sums, if one is."""
        assert next(self._turns) == source, "parts are due in the order in which rows travel"
        operands, part = self._operands, self._parts.get(source)
        if part is not None:
            multiply(operands, part)

    def compute_few(self) -> None:
        """The experts with few rows, of all sources."""
        experts = self._layout.experts_below(self._min_rows)
        if experts and self._few is not None:
            self._few(self._rows, self._weights, self._transpose, self.result, experts)


@dataclass
class GatheredCall:
    """One pass of a layer's gathered experts.

    Attributes:
        layout: Row layout of the routing.
        context: Context of the group of all ranks that hold experts.
        order: Order of the sums of the native permutation in use.
        sum_dtype: Type in which results are added up over ranks: that of the probabilities.
        started: The gather of the tokens that has been started.
        wgrad: The native GEMM of the weight gradients; None: ``group_wgrad``.
        gemm: As of ``ExpertCall``; products that overlap with a transfer are fused in any case.
        min_rows: Experts with fewer rows, from all sources, are multiplied by ``few``.
        few: The native product of those experts; None: the fused path multiplies them, too.
    """

    layout: RowLayout
    context: TPContext
    order: SumOrder
    sum_dtype: torch.dtype
    started: PendingGather | None = None
    wgrad: Wgrad | None = None
    gemm: Gemm | None = None
    min_rows: int = 0
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
    """If something fails inside before it has taken the started gather, that is given up: what comes later would
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
    return start_all_gather(x, context=context, flags_each_rank=True, copies_own=False)


def _product(
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    call: GatheredCall,
    *,
    transpose: bool,
    payload: tuple[int, torch.dtype],
    is_gathered: bool,
) -> GatheredProduct:
    options: dict[str, Any] = dict(transpose=transpose, payload=payload, is_gathered=is_gathered)
    options.update(few=call.few, min_rows=call.min_rows)
    return GatheredProduct(rows, weights, call.layout, call.context, **options)


def _gather(
    x: torch.Tensor, call: GatheredCall, rows: torch.Tensor, each: Callable[[int], None] | None = None
) -> None:
    """Fills ``rows`` as the tokens arrive; ``each`` runs behind those of each source."""
    started = call.take_started()
    if started is None:
        started = start_all_gather(x, context=call.context, flags_each_rank=True, copies_own=False)

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
        product = _product(rows, weights, call, transpose=True, payload=(x.shape[1], x.dtype), is_gathered=True)
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
        payload = weights[0].shape[1], grad_y.dtype
        product = _product(grad_y, weights, call, transpose=False, payload=payload, is_gathered=False)
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
        payload = weights[0].shape[0], call.sum_dtype
        product = _product(h, weights, call, transpose=True, payload=payload, is_gathered=False)
        product.compute_few()
        return _scatter(product.result, call, call.sum_dtype, product.compute)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("linear_scatter")
        (h, *weights), call = ctx.saved_tensors, ctx.call
        rows = grad_out.new_empty(call.layout.num_rows, grad_out.shape[1])
        payload = grad_out.shape[1], grad_out.dtype
        product = _product(rows, weights, call, transpose=False, payload=payload, is_gathered=True)
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


#: A sum of two is the same in either order. Of more ranks NCCL may add in an order that depends on where in the buffer
#: a row is.
_RANKS_IN_ANY_PLACE = 2
#: Why rows of that width and these types, of a group's slices, are left to megatron-core for good. All its ranks met
#: it alike; to ask again would cost each forward exchanges between hosts, and the buffer that was to grow.
_refused: GroupCache[tuple[dist.ProcessGroup, torch.device, int, torch.dtype, torch.dtype], str] = GroupCache()


def all_true(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``flag`` is true on every rank of ``group`` (collective)."""
    least = torch.tensor([int(flag)], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return bool(least.item())


def exchange_counts(
    sources: torch.Tensor | None, shape: tuple[int, int], group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor | None:
    """The rows of every tensor parallel rank by source rank and local expert (collective, with a host sync).

    Args:
        sources: ``[source ranks, num_local_experts]`` rows of this rank, or None if it has no room for them.
        shape: Of ``sources``.
        group: Over which the experts are split.
        device: Of the group's messages.

    Returns:
        int64 ``[ranks, *shape]`` on the CPU, or None on every rank if any had none to tell.
    """
    mine = torch.full(shape, -1, device=device) if sources is None else sources
    announced = [torch.empty(shape, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(announced, mine.to(device, torch.int64).contiguous(), group=group)
    counts = torch.stack(announced).cpu()
    return None if bool((counts < 0).any()) else counts


def _padded(rows: torch.Tensor, room: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, room - len(rows)))


class ExpertSlices:
    """Gathers the rows of one step over the tensor parallel group, and returns the experts' results.

    Of two ranks rows travel by copy engines, each placed once it is there, and results leave rank by rank.

    Args:
        counts: int64 ``[ranks, source ranks, num_local_experts]`` on the CPU, of ``exchange_counts``.
        group: Over which the experts are split.
        fused: Whether ``moe_permute_fusion`` is on; rows then change places on the device.
        device: Of the rows.
    """

    def __init__(self, counts: torch.Tensor, group: dist.ProcessGroup, *, fused: bool, device: torch.device) -> None:
        self._group, self._fused, self._device = group, fused, device
        self._rows_of_ranks = counts.sum((1, 2)).tolist()
        self.tokens_per_expert = counts.sum((0, 1))
        mine = counts[dist.get_rank(group)].T  # [expert, source rank]
        self._mine = mine if len(counts) > _RANKS_IN_ANY_PLACE and 1 not in mine.shape else None
        self._chunks = counts if self._mine is not None else counts.sum(1, keepdim=True)
        self._call: GatheredCall | None = None

    def _begin(self, rows: torch.Tensor, sum_dtype: torch.dtype) -> GatheredCall | None:
        """The rows on their way, or None if megatron-core moves them; the same on every rank of the group."""
        of_experts = self._chunks.sum(1)
        kind = (self._group, self._device, rows.shape[1], rows.dtype, sum_dtype)
        if len(of_experts) > _RANKS_IN_ANY_PLACE or int(of_experts.sum()) == 0 or kind in _refused:
            return None
        try:
            context = get_tp_context(self._group, self._device)
            layout = SlicedLayout(of_experts, self._device)
            started = start(_padded(rows.detach(), layout.num_tokens), context, sum_dtype)
        except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
            _refused[kind] = str(error)
            log_native("ep slices", _refused[kind])
            return None
        return GatheredCall(layout, context, "ascending", sum_dtype, started)

    def _move(
        self, rows: torch.Tensor, sizes: torch.Tensor, order: tuple[int, ...], probs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Chunks of ``sizes``, an array of them, in the order of that array with its axes permuted."""
        numbers = torch.arange(sizes.numel(), device=sizes.device).view(sizes.shape).permute(order).ravel()
        if self._fused:
            sizes, numbers = sizes.to(self._device), numbers.to(self._device)
        return sort_chunks_by_idxs(rows, sizes.ravel(), numbers, probs=probs, fused=self._fused)

    def gather(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[this rank's, hidden]`` in [expert, source rank, token] order and their ``probs`` become those of the
        whole group in [expert, tensor parallel rank, source rank, token] order."""
        call = self._call = self._begin(rows, probs.dtype)
        if call is not None:
            with given_up_on_error(call.take_started):
                probs = gather_from_sequence_parallel_region(
                    probs, group=self._group, output_split_sizes=self._rows_of_ranks
                )
                if len(self.tokens_per_expert) > 1:
                    probs = self._move(probs[:, None], self._chunks, (2, 0, 1))[0][:, 0]
                return gather_to_rows(_padded(rows, call.layout.num_tokens), call), probs
        if self._mine is not None:
            rows, probs = self._move(rows, self._mine, (1, 0), probs)
        rows, probs = (
            gather_from_sequence_parallel_region(part, group=self._group, output_split_sizes=self._rows_of_ranks)
            for part in (rows, probs)
        )
        if len(self.tokens_per_expert) == 1:
            return rows, probs
        return self._move(rows, self._chunks, (2, 0, 1), probs)

    def scatter(self, rows: torch.Tensor, sum_dtype: torch.dtype) -> torch.Tensor:
        """The experts' partial results in the order of ``gather`` become this rank's rows, added up in
        ``sum_dtype``."""
        call, self._call = self._call, None
        if call is not None:
            return scatter_rows(rows, call)[: self._rows_of_ranks[dist.get_rank(self._group)]]
        if len(self.tokens_per_expert) > 1:
            rows, _ = self._move(rows, self._chunks.permute(2, 0, 1), (1, 2, 0))
        summed = reduce_scatter_to_sequence_parallel_region(
            rows.to(sum_dtype), group=self._group, input_split_sizes=self._rows_of_ranks
        ).to(rows.dtype)
        return summed if self._mine is None else self._move(summed, self._mine.T, (1, 0))[0]
