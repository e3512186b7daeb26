"""What the workers of the expert-parallel tests run (2 or 4 processes, Triton interpreter)."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.ep import (
    begin_layout,
    combine,
    combine_rows,
    dispatch,
    dispatch_ahead,
    dispatch_tokens,
    get_ep_context,
    get_rail_context,
    min_rows_before,
)
from ditron_train.ep.combine import begin_combine
from ditron_train.ep.context import compiling
from ditron_train.ep.dispatcher import ExpertCall, dispatch_linear, group_linear, linear_combine
from ditron_train.ep.gemm_combine import gemm_combine, layout_tiles
from ditron_train.ep.grouped_gemm import group_gemm
from ditron_train.ep.handle import Room
from ditron_train.ep.plan import PAIRS
from tests.ep.layout_twin import plan_on_host


def routing(kind: str, rank: int, num_tokens: int, num_experts: int, topk: int, seed: int) -> torch.Tensor:
    """bool [num_tokens, num_experts] of rank ``rank``; any process can compute any rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "one_expert":  # everything to the last expert, the rest of top-k to its neighbours
        scores[:] = torch.arange(num_experts, dtype=torch.float32)
    if kind == "empty_experts":
        scores[:, : num_experts - topk] = -1
    routed = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    if num_tokens:
        routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
    if kind == "padded":  # every expert gets half of the tokens, some of them the same ones
        scores[: num_tokens // 3, : num_experts // 2] += 1
        routed = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
        return routed.scatter_(0, scores.topk(num_tokens // 2, dim=0).indices, True)
    if kind == "dropped":
        routed &= torch.rand(num_tokens, num_experts, generator=generator) < 0.6
    return routed


def case_of(kind, tokens_by_rank, num_experts, topk, hidden, dtype, seed):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    maps = [routing(kind, r, tokens_by_rank[r], num_experts, topk, seed) for r in range(world_size)]
    generator = torch.Generator().manual_seed(77 + rank)
    x = torch.randn(tokens_by_rank[rank], hidden, generator=generator).to(dtype)
    probs = torch.rand(tokens_by_rank[rank], num_experts, generator=generator) * maps[rank]
    if kind == "padded":
        probs[::3] = 0.0  # as of tokens that fill an expert up
    return world_size, rank, maps, x, probs


@contextlib.contextmanager
def poisoned_memory():
    """What is allocated and not initialised is full of NaN and of the largest integers."""
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is on
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _sum(rows: torch.Tensor, order: str) -> torch.Tensor:
    """[n, hidden] rows of one token in ascending expert order, added as native adds them."""
    total = torch.zeros_like(rows[0], dtype=torch.float32)
    for row in rows.flip(0) if order == "descending" else rows:
        total = total + row.float()
        if order == "ascending_rounded":
            total = total.to(rows.dtype).float()
    return total.to(rows.dtype)


def layout_and_movement(kind, tokens_by_rank, num_experts, topk, hidden, dtype, order, seed):
    """Layout tables against the twin; rows, probabilities and sums against plain indexing, forward and backward."""
    world_size, rank, maps, x, probs = case_of(kind, tokens_by_rank, num_experts, topk, hidden, dtype, seed)
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), num_experts, topk)
    padded = kind == "padded"
    plans = plan_on_host([m.numpy() for m in maps], context.shape, ragged=padded)
    plan = plans[rank]
    xs, ps = [None] * world_size, [None] * world_size
    dist.all_gather_object(xs, x)
    dist.all_gather_object(ps, probs)

    x = x.requires_grad_()
    probs = probs.requires_grad_()
    capacity = tokens_by_rank[rank] // 2 if padded else None
    layout = begin_layout(maps[rank], probs, hidden, dtype, context, expert_capacity=capacity).finish()
    rows_of_experts = sum(routed.sum(0) for routed in maps)
    assert layout.expert_rows.tolist() == rows_of_experts.tolist()
    assert layout.ragged == padded and (not padded or int(maps[rank].sum(1).max()) > topk)
    assert np.array_equal(
        layout.tables.recv_offsets.view(-1, context.shape.num_chunks + 1)[:world_size].numpy(), plan.recv_offsets
    )
    assert np.array_equal(layout.dest_slots[:, :world_size].numpy(), plan.dest_slots)
    assert np.array_equal(
        layout.expert_ids[..., :topk].numpy() if not padded else layout.expert_ids.numpy(), plan.expert_ids
    )
    rows, row_probs = dispatch_tokens(x, probs, layout, context, order)
    context.check()
    assert np.array_equal(layout.entries[:, :3].numpy(), plan.entries)
    expected = [(xs[s][t], ps[s][t, e]) for s, t, e in plan.row_token]
    assert rows.shape == (len(expected), hidden) and int(layout.tokens_per_expert.sum()) == len(expected)
    if expected:
        wanted = torch.stack([e[0] for e in expected])
        if order.endswith("descending"):
            wanted = torch.where(torch.stack([e[1] for e in expected])[:, None] == 0, 0.0, wanted.float()).to(dtype)
        assert torch.equal(rows, wanted)
        assert torch.equal(row_probs, torch.stack([e[1] for e in expected]))

    y = (rows.detach() * 2 - rank).requires_grad_()
    out = combine_rows(y, layout, context, order)
    ys = [None] * world_size
    dist.all_gather_object(ys, y.detach())
    row_of = [{tuple(key): row for row, key in enumerate(p.row_token.tolist())} for p in plans]
    local = num_experts // world_size

    def sums(by_rank, like):
        result = torch.zeros_like(like)
        for token in range(len(like)):
            experts = maps[rank][token].nonzero()[:, 0].tolist()
            if experts:
                picked = [by_rank[e // local][row_of[e // local][rank, token, e]] for e in experts]
                if order.startswith("by_rank_"):
                    owners = sorted({e // local for e in experts})
                    of_each = [[row for e, row in zip(experts, picked) if e // local == owner] for owner in owners]
                    within = order.removeprefix("by_rank_")
                    result[token] = _sum(
                        torch.stack([_sum(torch.stack(rows), within) for rows in of_each]), "ascending"
                    )
                else:
                    result[token] = _sum(torch.stack(picked), order)
        return result

    assert torch.equal(out, sums(ys, out.detach()))

    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(5 + rank)).to(dtype)
    out.backward(grad_out)
    gos = [None] * world_size
    dist.all_gather_object(gos, grad_out)
    for row, (s, t, _) in enumerate(plan.row_token):
        assert torch.equal(y.grad[row], gos[s][t])

    generator = torch.Generator().manual_seed(9 + rank)
    grad_rows = torch.randn(rows.shape, generator=generator).to(dtype)
    grad_row_probs = torch.randn(row_probs.shape, generator=generator)
    torch.autograd.backward([rows, row_probs], [grad_rows, grad_row_probs])
    grs, gps = [None] * world_size, [None] * world_size
    dist.all_gather_object(grs, grad_rows)
    dist.all_gather_object(gps, grad_row_probs)
    assert torch.equal(x.grad, sums(grs, x.detach()))
    wanted = torch.zeros_like(probs)
    for t, e in maps[rank].nonzero().tolist():
        wanted[t, e] = gps[e // local][row_of[e // local][rank, t, e]]
    assert torch.equal(probs.grad, wanted)
    context.check()


def changing_counts(steps, num_experts, topk, hidden):
    """Many steps in one context with tokens, routings and stragglers that change from step to step."""
    import random

    rank, world_size = dist.get_rank(), dist.get_world_size()
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), num_experts, topk)
    kinds = ["random", "one_expert", "empty_experts", "dropped"]
    ahead = {False: 0, True: 0}
    for step in range(steps):
        shared = random.Random(step)
        tokens = [shared.choice([0, 1, 3, 8, 17]) for _ in range(world_size)]
        kind = shared.choice(kinds)
        if random.Random(step * 31 + rank).random() < 0.1:
            time.sleep(0.01)
        routed = routing(kind, rank, tokens[rank], num_experts, topk, step)
        probs = torch.rand(routed.shape) * routed
        x = torch.randint(-4, 5, (tokens[rank], hidden)).float()
        pending = begin_layout(routed, probs, hidden, torch.float32, context)
        if shared.random() < 0.7:
            dispatch_ahead(x, pending)
        layout = pending.finish()
        ahead[layout.ahead is not None] += 1
        rows, row_probs = dispatch(x, layout, context)
        out, grads = combine(rows, layout, context, order="ascending", row_grads=row_probs)
        assert torch.equal(out, x * routed.sum(1, keepdim=True)), step
        assert torch.equal(grads, probs), step
        context.buffers.rows(1, 1, hidden, torch.float32).local.fill_(float("nan"))
    context.check()
    assert steps < 10 or min(ahead.values()) > 2, ahead


def _small_context(topk=2):
    return get_ep_context(dist.group.WORLD, torch.device("cpu"), 4, topk)


def _layout(context, tokens=3, hidden=16, experts=2, padding=0):
    routed = routing("random", dist.get_rank(), tokens, 4, experts, 1)
    return begin_layout(routed, torch.rand(tokens, 4), hidden, torch.float32, context, padding=padding).finish()


def error_of(case):
    """Class and words of the error that a bad call raises on this rank."""
    from ditron_train.runtime.errors import DitronError

    context = _small_context()
    try:
        if case == "wide_token":  # only rank 1 has one, every rank raises
            _layout(context, experts=3 if dist.get_rank() == 1 else 2)
        elif case == "wide_padding":  # 12 entries of rank 1 beyond top-k, the recipe allows 2
            _layout(context, tokens=6, experts=4 if dist.get_rank() == 1 else 2, padding=2)
        elif case == "hidden_differs":
            _layout(context, hidden=16 + 8 * dist.get_rank())
        elif case == "padding_differs":  # recipes of other multiples
            _layout(context, padding=(60, 124)[dist.get_rank()])
        elif case == "routing_type":
            begin_layout(torch.zeros(3, 4), torch.zeros(3, 4), 16, torch.float32, context)
        elif case == "routing_shape":
            begin_layout(torch.zeros(3, 5, dtype=torch.bool), torch.zeros(3, 5), 16, torch.float32, context)
        elif case == "probs_shape":
            begin_layout(torch.zeros(3, 4, dtype=torch.bool), torch.zeros(2, 4), 16, torch.float32, context)
        elif case == "probs_dtype":
            begin_layout(torch.zeros(3, 4, dtype=torch.bool), torch.zeros(3, 4).double(), 16, torch.float32, context)
        elif case == "tokens_dtype":
            begin_layout(torch.zeros(3, 4, dtype=torch.bool), torch.zeros(3, 4), 16, torch.int8, context)
        elif case == "fewer_tokens":
            dispatch(torch.zeros(2, 16), _layout(context), context)
        elif case == "fewer_rows":
            layout = _layout(context)
            combine(torch.zeros(layout.num_rows + 1, 16), layout, context, order="ascending")
        elif case == "missing_peer":
            if dist.get_rank() == 0:
                _layout(context)
        elif case == "experts":
            get_ep_context(dist.group.WORLD, torch.device("cpu"), 5, 2)
    except DitronError as error:
        return type(error).__name__, str(error)
    return None


@poisoned_memory()
def fixed_capacity(steps, factor):
    """No host sync: rows, sums and gradients as with exact sizes, in buffers of fixed size."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 6, 2)
    context.counts_on_their_way, min_rows = None, [None]
    for step in range(steps):
        routed = routing("random", rank, 10, 6, 2, step)
        probs = (torch.rand(routed.shape) * routed).requires_grad_()
        x = torch.randn(10, 24).requires_grad_()
        results = []
        for capacity in (None, factor):
            x.grad = probs.grad = None
            layout = begin_layout(routed, probs, 24, torch.float32, context, capacity_factor=capacity).finish()
            if capacity is None:
                min_rows.append(min(layout.expert_rows[layout.expert_rows > 0]))
            else:
                assert layout.expert_rows is None and min_rows_before(context) == min_rows[step]
            rows, row_probs = dispatch_tokens(x, probs, layout, context, "ascending")
            out = combine_rows(rows * row_probs[:, None], layout, context, "ascending")
            out.backward(torch.ones_like(out))
            used = int(layout.tokens_per_expert.sum())
            seen = [layout.tokens_per_expert.long(), rows[:used], row_probs[:used], out, x.grad, probs.grad]
            results.append([tensor.detach() for tensor in seen])
        assert layout.num_rows == context.shape.room_for(10, factor).rows >= used
        assert all(torch.equal(a, b) for a, b in zip(*results)), step
    context.check()
    return world_size


def late_rank(late_s):
    """Tokens and rows of one rank arrive late, after start signals that arrived in time."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 8, 2)

    def delayed(function):
        def call(*arguments):
            time.sleep(late_s)
            return function(*arguments)

        return call

    for late in range(world_size):
        routed = routing("random", rank, 12, 8, 2, late)
        probs, x = torch.rand(routed.shape) * routed, torch.randint(-4, 5, (12, 16)).float()
        with contextlib.ExitStack() as stack:
            for op, name in (("dispatch", "send_tokens"), ("combine", "_send_rows")) if rank == late else ():
                module = sys.modules[f"ditron_train.ep.{op}"]  # the package's attribute is the function
                stack.enter_context(mock.patch.object(module, name, delayed(getattr(module, name))))
            layout = begin_layout(routed, probs, 16, torch.float32, context).finish()
            rows, row_probs = dispatch(x, layout, context)
            out, grads = combine(rows, layout, context, order="ascending", row_grads=row_probs)
        assert torch.equal(out, x * routed.sum(1, keepdim=True)) and torch.equal(grads, probs), late
        context.buffers.rows(1, 1, 16, torch.float32).local.fill_(float("nan"))
    context.check()


def overflowing_capacity(topk):
    """An even step that fits, then everything to one rank, with room for less: that raises, or the next look does.
    With ``topk`` 2 it is the rows alone that are too many: both of a token arrive in one slot.

    Of a group of its own: the failure stays in its channels, and other tests have such experts, too."""
    group = dist.new_group(list(range(dist.get_world_size())))
    context = get_ep_context(group, torch.device("cpu"), 4, topk)
    even, full = torch.arange(8) % 4, torch.full((8,), 3)
    try:
        for experts in (even, full):
            routed = torch.nn.functional.one_hot(experts, 4).bool()
            if topk == 2:
                routed |= torch.nn.functional.one_hot((experts + 2) % 4 if experts is even else experts - 1, 4).bool()
            layout = begin_layout(routed, routed.float(), 16, torch.float32, context, capacity_factor=1.25).finish()
            rows, _ = dispatch(torch.randn(8, 16), layout, context)
            combine(rows, layout, context, order="ascending")
        context.check()
    except RuntimeError as error:
        return str(error)
    return None


@contextlib.contextmanager
def lists_in_used_memory():
    """Lists of entries, and what is behind them, are full of what an earlier list left: [0, 1, 5, 0] an entry."""
    before = torch.empty

    def used(*sizes, **options):
        if len(sizes) != 2 or sizes[1] != 4 or options.get("dtype") is not torch.int32:
            return before(*sizes, **options)
        return torch.tensor([0, 1, 5, 0], dtype=torch.int32).repeat(sizes[0] + 64, 1)[: sizes[0]]

    with mock.patch.object(torch, "empty", used):
        yield


def _routed_to_all(*, tokens=8, experts=8, topk=2):
    """The first token of rank 1 to all experts, everything else to ``topk``."""
    routed = routing("random", dist.get_rank(), tokens, experts, topk, 1)
    routed[0] |= dist.get_rank() == 1
    return routed


def wide_token_ahead():
    """Tokens sent ahead whose layout is refused: the error, which entries came, and whether the next step is right."""
    from ditron_train.runtime.errors import NotSupportedError

    context, x = get_ep_context(dist.group.WORLD, torch.device("cpu"), 8, 2), torch.ones(8, 16)
    context.buffers.reserve(Room(128, 128, 128), 128, 16, torch.float32)
    entries = context.buffers.token_buffers(1, 1, 16, torch.float32).entries.fill_(-1)
    routed = _routed_to_all()
    with lists_in_used_memory():
        pending = begin_layout(routed, routed.float(), 16, torch.float32, context)
    dispatch_ahead(x, pending)
    try:
        words = repr(pending.finish())
    except NotSupportedError as error:
        words = str(error)
    dist.barrier()
    came = int((entries != -1).sum())
    routed = routing("random", dist.get_rank(), 8, 8, 2, 1)
    layout = begin_layout(routed, routed.float(), 16, torch.float32, context).finish()
    rows, _ = dispatch(x, layout, context)
    out, _ = combine(rows, layout, context, order="ascending")
    context.check()
    return words, came, torch.equal(out, 2 * x)


def refused_without_a_host_sync(case):
    """A step of fixed sizes whose map no list holds, behind one that fits, as a host calls it that is ahead of the
    device: how many values came, and the error of the next look."""
    from ditron_train.runtime.errors import DitronError

    topk = {"wide": 3, "padded": 4}[case]
    context, rank = get_ep_context(dist.group.WORLD, torch.device("cpu"), 8, topk), dist.get_rank()
    fits = (torch.arange(8) < 4)[:, None].expand(8, 8)
    if case == "wide":
        routed, sizes = _routed_to_all(topk=topk), dict(capacity_factor=4.0)
        fits = fits & (torch.arange(8) < topk)
    else:  # rank 1 has 40 entries and places for 32; all experts together have room for what there is
        routed, sizes = (torch.arange(8) < 5 * rank)[:, None].expand(8, 8), dict(expert_capacity=4)
    begin_layout(fits, fits.float(), 16, torch.float32, context, **sizes).finish()
    with lists_in_used_memory(), mock.patch.object(context, "check"):
        layout = begin_layout(routed, routed.float(), 16, torch.float32, context, **sizes).finish()
        with poisoned_memory():
            rows, _ = dispatch(torch.ones(8, 16), layout, context)
        came = int((~rows.isnan()).sum())
        gemm_combine(rows, layout, context, [torch.ones(16, 16)] * 4, order="ascending")
        combine(rows, layout, context, order="ascending")
    try:
        context.check()
    except DitronError as error:
        return came, str(error)
    return came, None


@poisoned_memory()
def fused_forms(
    kind,
    tokens_by_rank,
    num_experts,
    topk,
    hidden,
    columns,
    dtype,
    order,
    seed,
    capacity=None,
    expert_capacity=None,
    min_rows=0,
):
    """The fused kernel against grouped GEMM and combine one after the other: the same tiles, so the same bits. With
    ``min_rows`` the rows of smaller experts come from another product, which is twice as much: both read it."""
    world_size, rank, maps, x, probs = case_of(kind, tokens_by_rank, num_experts, topk, hidden, dtype, seed)
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), num_experts, topk)
    generator = torch.Generator().manual_seed(rank)
    local = num_experts // world_size
    weights = [torch.randn(columns, hidden, generator=generator).to(dtype) for _ in range(local)]
    back = [torch.randn(hidden, columns, generator=generator).to(dtype) for _ in range(local)]
    layout = begin_layout(
        maps[rank], probs, hidden, dtype, context, capacity_factor=capacity, expert_capacity=expert_capacity
    ).finish()
    tiles, results = layout_tiles(layout), []
    rows, row_probs = dispatch(x, layout, context, zero_probs=order == "descending")
    y = group_gemm(rows, weights, tiles)
    ends = layout.tokens_per_expert.cumsum(0).tolist()
    few = [slice(ends[e] - n, ends[e]) for e, n in enumerate(layout.tokens_per_expert.tolist()) if 0 < n < min_rows]

    def doubled(x, weights, transpose, result=None, experts=None):
        """The product, twice as much for experts with few rows; with a ``result`` theirs alone is written."""
        product = group_gemm(x, weights, tiles, transpose=transpose)
        assert experts is None or len(experts) == len(few)
        for rows_of_expert in few:
            (product if result is None else result)[rows_of_expert] = 2 * product[rows_of_expert]
        return product

    given = dict(min_rows=min_rows, few=doubled) if min_rows else {}
    for is_fused in (False, True):
        if is_fused:
            out = gemm_combine(y, layout, context, back, order=order, **given)
        else:
            out, none = combine(doubled(y, back, True), layout, context, order=order)
            assert none is None
            returned, options = group_gemm(y, weights, tiles, transpose=False), dict(order=order, row_grads=row_probs)
            at_once = combine(returned, layout, context, **options)
            in_two_steps = begin_combine(returned, layout, context, **options).finish()
            assert all(torch.equal(a, b) for a, b in zip(in_two_steps, at_once))
        results.append(out)
        context.buffers.rows(1, 1, hidden, dtype).local.fill_(float("nan"))
    context.check()
    assert torch.equal(*results)
    return len(few), len(weights)


def fused_forms_by_one_program(*case):
    """Programs run one after another, the first to its end: the others find no multiprocessor. They are fewer than
    senders should be."""
    with mock.patch("ditron_train.ep.gemm_combine.num_programs", lambda context: 3):
        fused_forms(*case)


def compiling_alone():
    """Inside ``compiling`` one rank calls what the others do not: nothing is launched, waited for or recorded."""
    world_size, rank, maps, x, probs = case_of("random", (9, 14), 6, 2, 16, torch.float32, 8)
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 6, 2)
    generator = torch.Generator().manual_seed(rank)
    back = [torch.randn(16, 24, generator=generator) for _ in range(6 // world_size)]
    layout = begin_layout(maps[rank], probs, 16, torch.float32, context).finish()
    rows, row_probs = dispatch(x, layout, context)
    tickets = [channel.tickets.clone() for channel in (context.dispatch_channel, context.combine_channel)]
    if rank == 0:
        with compiling(context):
            gemm_combine(torch.zeros(layout.num_rows, 24), layout, context, back, order="ascending")
            begin_combine(rows, layout, context, order="ascending", row_grads=row_probs).finish()
            dispatch(x, layout, context)
    now = (context.dispatch_channel.tickets, context.combine_channel.tickets)
    assert all(torch.equal(a, b) for a, b in zip(tickets, now))
    out, grads = combine(rows, layout, context, order="ascending", row_grads=row_probs)
    assert torch.equal(out, x * maps[rank].sum(1, keepdim=True)) and torch.equal(grads, probs)
    context.check()


def expert_functions(tokens_by_rank, dtype, order):
    """Both linear layers of the experts as autograd functions, fused and not, against the movement and layers
    apart."""
    world_size, rank, maps, x, probs = case_of("random", tokens_by_rank, 6, 2, 16, dtype, 8)
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 6, 2)
    generator = torch.Generator().manual_seed(rank)
    weights = [torch.randn(24, 16, generator=generator).to(dtype).requires_grad_() for _ in range(6 // world_size)]
    back = [torch.randn(16, 24, generator=generator).to(dtype).requires_grad_() for _ in range(6 // world_size)]
    grad = torch.randn(x.shape, generator=generator).to(dtype)
    leaves = [x.requires_grad_(), probs.requires_grad_(), *weights, *back]
    results = []
    called = []
    for pairs, min_rows in (
        (None, 0),
        ((), 0),
        (("gemm_combine",), 7),
        (("overlap_wgrad",), 0),
        (PAIRS, 0),
        (PAIRS, 7),
    ):
        layout = begin_layout(maps[rank], probs, 16, dtype, context).finish()
        if pairs is None:
            rows, row_probs = dispatch_tokens(x, probs, layout, context, order)
            y = group_linear(rows, weights, layout_tiles(layout))
            z = group_linear((torch.tanh(y) * row_probs[:, None]).to(dtype), back, layout_tiles(layout))
            out = combine_rows(z, layout, context, order)
        else:
            ends = layout.tokens_per_expert.cumsum(0).tolist()

            def few(x, weights, transpose, out, experts, ends=ends, layout=layout):
                product = group_gemm(x, weights, layout_tiles(layout), transpose=transpose)
                for expert in experts:
                    rows = slice(ends[expert] - int(layout.tokens_per_expert[expert]), ends[expert])
                    out[rows] = product[rows]
                called.append((transpose, len(experts)))

            options = dict(min_rows=dict.fromkeys(pairs, min_rows), few=few) if min_rows else {}
            call = ExpertCall(layout, context, order, frozenset(pairs), **options)
            y, row_probs = dispatch_linear(x, probs, weights, call)
            out = linear_combine((torch.tanh(y) * row_probs[:, None]).to(dtype), back, call)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others))
    return called


def error_of_scattered_nodes():
    """What ranks of two simulated nodes get that take turns instead of forming blocks."""
    from ditron_train.runtime.errors import NotSupportedError
    from ditron_train.symm.nodes import forget_nodes

    forget_nodes()
    os.environ["NCCL_HOSTID"] = str(dist.get_rank() % 2)
    try:
        get_rail_context(dist.group.WORLD, torch.device("cpu"), 8, 2)
    except NotSupportedError as error:
        return str(error)
    finally:
        del os.environ["NCCL_HOSTID"]
        forget_nodes()
    return None


def uneven_columns(expert_capacity):
    """A routing map whose experts get fewer tokens than the capacity says: what was routed comes back all the same."""
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 4, 2)
    routed = routing("padded", dist.get_rank(), 2 * expert_capacity - 2, 4, 2, 3)
    x = torch.randint(-4, 5, (len(routed), 16)).float()
    probs = torch.rand(routed.shape) * routed
    layout = begin_layout(routed, probs, 16, torch.float32, context, expert_capacity=expert_capacity).finish()
    rows, row_probs = dispatch(x, layout, context)
    out, grads = combine(rows, layout, context, order="ascending", row_grads=row_probs)
    assert torch.equal(out, x * routed.sum(1, keepdim=True)) and torch.equal(grads, probs)
    assert rows.shape[0] == layout.num_rows == int(layout.tokens_per_expert.sum()) > int(layout.expert_tokens.sum())
    context.check()
