"""What the workers of the TP tests run: every function is called on each rank, with gloo initialised."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib
import random
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from ditron_train.gemm.configs import GemmConfig
from ditron_train.gemm.operands import TensorScales
from ditron_train.gemm.ops import library_product
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.symm.control import TICKET_UNIT_LOG2
from ditron_train.symm.shm_transport import ShmTransport
from ditron_train.tp import (
    GatherPlan,
    TPContext,
    ag_gemm,
    all_gather,
    choices,
    column_linear,
    gemm_ar,
    gemm_rs,
    get_tp_context,
    row_linear,
    split_products,
    start_all_gather,
    start_reduce_scatter,
)
from ditron_train.tp import context as tp_context
from ditron_train.tp import gather as tp_gather
from ditron_train.tp.choices import Choice
from ditron_train.tp.context import FLAGS_PER_RANK
from ditron_train.tp.gather import start_gather_of_parts
from ditron_train.tp.linear import PlainWgrad, _column_gradients
from tests.support.patience import HANG_S, Lateness
from tests.support.refused_launches import check_refused_launches

CPU = torch.device("cpu")
ag_gemm_module = importlib.import_module("ditron_train.tp.ag_gemm")
gemm_rs_module = importlib.import_module("ditron_train.tp.gemm_rs")


def integers(shape, seed: int, dtype=torch.float32) -> torch.Tensor:
    """Small integers: products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def check_without_copy_engines() -> None:
    """Copies to peers would take multiprocessors: rows are pushed and tiles stored instead, with the same bits."""
    results, rows, choose = [], 64, choices.choose

    def copying(problem, machine):
        return dataclasses.replace(choose(problem, machine), gather=GatherPlan("copy", 1), scatter="copy")

    for by_engine in (True, False):
        with (
            mock.patch.object(ShmTransport, "copies_by_engine", by_engine),
            mock.patch.object(choices, "choose", copying),
            mock.patch.object(tp_context, "choose", copying),
        ):
            context = get_tp_context(dist.new_group(), CPU)
            torch.manual_seed(5)
            x = torch.randn(rows, 48).bfloat16().requires_grad_()
            weight, other = (torch.randn(64, width).bfloat16().requires_grad_() for width in (48, 64))
            y = row_linear(column_linear(x, weight, context=context), other, context=context)
            y.backward(torch.randn(y.shape).bfloat16())
            scattered = gemm_rs(torch.cat([y.detach()] * dist.get_world_size()), other.detach(), context=context)
            results.append([y.detach(), scattered, x.grad, weight.grad, other.grad])
            plans = {type(plan).__name__: plan for plan in context.prepared.values()}
            assert plans["AgGemmPlan"].gather.by_push is not by_engine
            kinds = {name for name in plans if name.startswith("GemmRs")}
            assert kinds == {"GemmRsCopyPlan" if by_engine else "GemmRsStorePlan"}, plans
    for one, another in zip(*results, strict=True):
        assert torch.equal(one, another)


def gather_rows(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """All ranks' rows by an even all-gather, uneven counts too."""
    padded = x.new_zeros(max(counts), x.shape[-1])
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


def ring_reduce(partials: list[torch.Tensor], rank: int) -> torch.Tensor:
    """NCCL's ring order: rank + 1 first, the own partial last, rounded at every hop."""
    world = len(partials)
    total = partials[(rank + 1) % world]
    for step in range(2, world + 1):
        total = (total.float() + partials[(rank + step) % world].float()).to(total.dtype)
    return total


def check_ag_gemm(counts: list[int], n: int, k: int, layout: str, mode: str, dtype_name: str, repeats: int) -> None:
    """ag_gemm against gloo's gather and a matmul, on integers; buffers poisoned, a random straggler."""
    rank = dist.get_rank()
    dtype = getattr(torch, dtype_name)
    context = get_tp_context(None, CPU)
    rng = random.Random(rank)
    for repeat in range(repeats):
        x = integers((counts[rank], k), 100 * repeat + rank, dtype)
        weight = integers((n, k) if layout == "nt" else (k, n), 7 + repeat + 50 * rank, dtype)
        if repeat:
            context.gathered(sum(counts), k + -k % (16 // dtype.itemsize), dtype).local.fill_(float("nan"))
        dist.barrier()
        time.sleep(rng.random() * 0.02)
        y, gathered = ag_gemm(
            x,
            weight,
            context=context,
            layout=layout,
            row_counts=None if len(set(counts)) == 1 else counts,
            return_gathered=True,
            plan=GatherPlan(mode, push_programs=1, num_chunks=2),
        )
        total = gather_rows(x, counts)
        expected = total.float() @ (weight.float().t() if layout == "nt" else weight.float())
        assert torch.equal(gathered, total)
        assert torch.equal(y.float(), expected.to(dtype).float())


def check_gemm_rs(counts: list[int], n: int, k: int, layout: str, scatter: str, dtype_name: str, repeats: int) -> None:
    """gemm_rs against partial products reduced in ring order (real numbers in bf16: the order of roundings shows).

    ``scatter``: also ``copy in parts``, which sends the first rows in halves and adds up what has come before the last
        rows do."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if scatter == "copy in parts":
        links_last = {"sums_in_parts": lambda *problem: True, "links_are_last": lambda *problem: True}
        with mock.patch.multiple(gemm_rs_module, **links_last, first_rows=lambda num_rows, *shape: num_rows // 2):
            check_gemm_rs(counts, n, k, layout, "copy", dtype_name, repeats)
        get_tp_context(None, CPU).forget_shapes()
        return
    dtype = getattr(torch, dtype_name)
    context = get_tp_context(None, CPU)
    rng = random.Random(rank)
    m = sum(counts)
    for repeat in range(repeats):
        x = integers((m, k), 100 * repeat + rank, dtype)
        weight = integers((n, k) if layout == "nt" else (k, n), 7 + repeat + 50 * rank, dtype)
        scale = torch.tensor(1.0 + rank / 8, dtype=dtype)  # partials of several magnitudes, exact in themselves
        time.sleep(rng.random() * 0.02)
        row_counts = None if len(set(counts)) == 1 else counts
        y = gemm_rs(x * scale, weight, context=context, layout=layout, row_counts=row_counts, scatter=scatter)
        partial = ((x * scale).float() @ (weight.float().t() if layout == "nt" else weight.float())).to(dtype)
        parts = [torch.empty_like(partial) for _ in range(world)]
        dist.all_gather(parts, partial)
        start = sum(counts[:rank])
        expected = ring_reduce([part[start : start + counts[rank]] for part in parts], rank)
        assert torch.equal(y, expected), (rank, repeat)


def fp8_integers(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return integers(shape, seed).to(torch.float8_e4m3fn)


def check_fp8_products(rows: int, n: int, k: int) -> None:
    """AG-GEMM and GEMM-RS of FP8 operands, and a gather whose rows are used as they come: on integers, which FP8
    holds, with scales that are no powers of two."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context, rng = get_tp_context(None, CPU), random.Random(rank)
    scales = TensorScales(torch.tensor([0.3 + rank]), torch.tensor(0.07))
    factor = scales.a.float() * scales.b.float()
    for repeat, mode in enumerate(("copy", "push", "copy")):
        x, weight = fp8_integers((rows, k), 10 * repeat + rank), fp8_integers((n, k), 7 + repeat + 50 * rank)
        total = torch.cat([fp8_integers((rows, k), 10 * repeat + peer) for peer in range(world)])
        time.sleep(rng.random() * 0.02)
        plan = GatherPlan(mode, push_programs=1)
        y, gathered = ag_gemm(x, weight, context=context, scales=scales, plan=plan, return_gathered=True)
        assert torch.equal(gathered.view(torch.uint8), total.view(torch.uint8))
        product = (total.float() @ weight.float().t()) * factor
        assert torch.equal(y, product.bfloat16())
        bias = torch.randn(n, generator=torch.Generator().manual_seed(repeat)).bfloat16()
        y = ag_gemm(x, weight, context=context, scales=scales, plan=plan, bias=bias)
        assert torch.equal(y, (product + bias.float()).bfloat16())

        started, places = start_all_gather(x.view(torch.uint8), context=context, flags_each_rank=True), []

        def see(place: slice, part: torch.Tensor, total=total, places=places) -> None:
            assert torch.equal(part, total.view(torch.uint8)[place])
            places.append(place.start // rows)

        started.consume(see)
        assert places == [(rank + step) % world for step in range(world)]

        own = ((total.float() @ weight.float().t()) * factor).bfloat16()
        partials = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(partials, own)
        expected = ring_reduce([partial.chunk(world)[rank] for partial in partials], rank)
        for scatter in ("store", "copy"):
            found = gemm_rs(total, weight, context=context, scales=scales, scatter=scatter)
            assert torch.equal(found, expected), (repeat, scatter)

        other = get_tp_context(dist.new_group(), CPU)
        powers = TensorScales(torch.tensor([0.5]), torch.tensor(2.0**rank))  # multiplied in any order
        factors = powers.a * powers.b
        with _by_library():
            y = ag_gemm(x, weight, context=other, scales=powers, bias=bias)
            found = gemm_rs(total, weight, context=other, scales=powers)
        exact = total.float() @ weight.float().t()
        assert torch.equal(y, (exact * factors + bias.float()).bfloat16())
        dist.all_gather(partials, (exact * factors).bfloat16())
        assert torch.equal(found, ring_reduce([partial.chunk(world)[rank] for partial in partials], rank))
        assert "LibraryAgGemmPlan" in {type(plan).__name__ for plan in other.prepared.values()}


def refused_fp8_calls() -> list[str]:
    """What is raised, alike on every rank, for FP8 operands that do not fit."""
    context, logged = get_tp_context(None, CPU), []
    x, weight = fp8_integers((16, 32), 1), fp8_integers((16, 32), 2)
    scales = TensorScales(torch.ones(1), torch.ones(1))
    pairs = TensorScales(torch.ones(2), torch.ones(1))
    e5m2 = weight.to(torch.float8_e5m2)
    for op in (ag_gemm, gemm_rs):
        calls = [(x, weight, {}), (x.float(), weight.float(), {"scales": scales}), (x, weight, {"scales": pairs})]
        calls += [(x, weight.t(), {"scales": scales, "layout": "nn"}), (x, e5m2, {"scales": scales})]
        if op is ag_gemm:
            bias = torch.ones(16, dtype=torch.bfloat16)
            calls += [
                (x, weight, {"scales": scales, "bias": bias[:8]}),
                (x, weight, {"scales": scales, "bias": bias.float()}),
            ]
        for one, other, options in calls:
            try:
                op(one, other, context=context, **options)
            except NotSupportedError as error:
                logged.append(str(error))
    return logged


def check_reduce_scatter(shape: tuple[int, ...], dtype_name: str, repeats: int) -> None:
    """start_reduce_scatter against the ring-order reduction, on real numbers: the order of roundings shows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    for repeat in range(repeats):
        generator = torch.Generator().manual_seed(10 * repeat + rank)
        partial = torch.randn(shape, generator=generator).to(getattr(torch, dtype_name))
        started = start_reduce_scatter(partial, context=context)
        parts = [torch.empty_like(partial) for _ in range(world)]
        dist.all_gather(parts, partial)
        assert torch.equal(started.wait(), ring_reduce([part.chunk(world)[rank] for part in parts], rank))


def check_linear_layers(shape: tuple[int, int], n: int, k: int) -> None:
    """Column and row linear, forward and all gradients, against gloo and torch.matmul on integers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    sequence, batch = shape
    x = integers((sequence // world, batch, k), rank).requires_grad_()
    weight = integers((n // world, k), 10 + rank).requires_grad_()
    bias = integers((n // world,), 20 + rank).requires_grad_()
    y = column_linear(x, weight, context=context, bias=bias)
    grad = integers(tuple(y.shape), 30 + rank)
    y.backward(grad)
    total = gather_rows(x.detach().reshape(-1, k), [sequence * batch // world] * world).view(sequence, batch, k)
    assert torch.equal(y.detach(), total @ weight.detach().t() + bias.detach())
    dgrad = grad @ weight.detach()
    dist.all_reduce(dgrad)
    assert torch.equal(x.grad, dgrad.chunk(world)[rank])
    assert torch.equal(weight.grad, grad.view(-1, n // world).t() @ total.view(-1, k))
    assert torch.equal(bias.grad, grad.view(-1, n // world).sum(0))

    x = integers((sequence, batch, k // world), 40 + rank).requires_grad_()
    weight = integers((n, k // world), 50 + rank).requires_grad_()
    y = row_linear(x, weight, context=context)
    partial = x.detach() @ weight.detach().t()
    dist.all_reduce(partial)
    assert torch.equal(y.detach(), partial.chunk(world)[rank])
    grad = integers(tuple(y.shape), 60 + rank)
    y.backward(grad)
    total = gather_rows(grad.reshape(-1, n), [sequence * batch // world] * world)
    assert torch.equal(x.grad.view(-1, k // world), total @ weight.detach())
    assert torch.equal(weight.grad, total.t() @ x.detach().view(-1, k // world))


@contextlib.contextmanager
def _by_library():
    """Shapes are chosen to be multiplied by the library, rank by rank."""

    def chosen(problem, machine):
        return choices.with_library(choices.choose(problem, machine))

    with mock.patch.object(tp_context, "choose", chosen):
        yield


def check_library_products(layout: str, n: int, k: int, repeats: int) -> None:
    """``ag_gemm`` and ``gemm_rs`` by one product of the library for each rank's rows; buffers poisoned, a random
    straggler. Rows that peers send are multiplied only when they are there."""
    rank, world, rows = dist.get_rank(), dist.get_world_size(), 24
    context, rng = get_tp_context(dist.new_group(), CPU), random.Random(rank)
    for repeat in range(repeats):
        x = integers((rows, k), 100 * repeat + rank)
        weight = integers((n, k) if layout == "nt" else (k, n), 7 + repeat + 50 * rank)
        bias = integers((n,), repeat) if repeat % 2 else None
        if repeat:
            context.gathered(world * rows, k + -k % 4, torch.float32).local.fill_(float("nan"))
        dist.barrier()
        time.sleep(rng.random() * 0.02)
        transposed = weight.t() if layout == "nt" else weight
        with _by_library():
            y, gathered = ag_gemm(x, weight, context=context, layout=layout, return_gathered=True, bias=bias)
            partials = integers((world * rows, k), 3 + repeat + 10 * rank)
            scattered = gemm_rs(partials, weight, context=context, layout=layout)
        total = gather_rows(x, [rows] * world)
        assert torch.equal(gathered, total)
        assert torch.equal(y, gather_rows(x, [rows] * world) @ transposed + (0.0 if bias is None else bias))
        product = partials @ transposed
        dist.all_reduce(product)
        assert torch.equal(scattered, product[rank * rows : (rank + 1) * rows])
    plans = {type(plan).__name__: plan for plan in context.prepared.values()}
    assert set(plans) == {"LibraryAgGemmPlan", "GemmRsCopyPlan"} and plans["GemmRsCopyPlan"].identity == ()


def check_library_layers(shape: tuple[int, int], n: int, k: int) -> None:
    prepared, runs, run = get_tp_context(None, CPU).prepared, [], ag_gemm_module.LibraryAgGemmPlan.run

    def counted(self, *given: object, **options: object) -> torch.Tensor:
        runs.append(self)
        return run(self, *given, **options)

    prepared.clear()
    with _by_library(), mock.patch.object(ag_gemm_module.LibraryAgGemmPlan, "run", counted):
        check_linear_layers(shape, n, k)
    assert len(runs) == 2  # a column layer's forward, and a row layer's data gradient
    assert "AgGemmPlan" not in {type(plan).__name__ for plan in prepared.values()}
    prepared.clear()


def check_tiles_instead_of_the_library() -> list[str]:
    """Uneven rows, lengths that vary, FP8, and products whose bits depend on the number of rows (on one rank only)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []

    def kinds(context: TPContext) -> str:
        return " ".join(sorted({type(plan).__name__ for plan in context.prepared.values()}))

    def run(context: TPContext, rows: int, **options: object) -> None:
        x, weight = integers((rows, 32), rank), integers((16, 32), 7)
        y = ag_gemm(x, weight, context=context, **options)
        assert torch.equal(y, gather_rows(x, options.get("row_counts", [rows] * world)) @ weight.t())

    with _by_library():
        context = get_tp_context(dist.new_group(), CPU)
        run(context, 8 * (rank + 1), row_counts=[8 * (peer + 1) for peer in range(world)])
        found.append(kinds(context))
        context = get_tp_context(dist.new_group(), CPU)
        with mock.patch.object(context, "varies", True):
            run(context, 8)
        found.append(kinds(context))

        def rounded(x, weight, out, **options):
            torch.mm(x, weight.t(), out=out)
            out += (rank == 1) * len(x)

        with (
            mock.patch.object(split_products, "compares", lambda device: True),
            mock.patch.object(split_products, "check_memory", lambda *given: None),
        ):
            context = get_tp_context(dist.new_group(), CPU)
            run(context, 8)
            found.append(kinds(context))
            with mock.patch.object(split_products, "library_product", rounded):
                context = get_tp_context(dist.new_group(), CPU)
                run(context, 8)
            found.append(kinds(context))
        refuses = mock.Mock(side_effect=NotSupportedError("no memory"))
        with (
            mock.patch.object(split_products, "compares", lambda device: True),
            mock.patch.object(split_products, "check_memory", refuses),
        ):
            context = get_tp_context(dist.new_group(), CPU)
            run(context, 8)
        found.append(kinds(context))
    return found


def check_bias_inside(shape: tuple[int, int], n: int, k: int) -> None:
    """A bias inside the product is added in front of the only rounding; its gradient is the weight gradient's word."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context, given = get_tp_context(None, CPU), []

    class WgradWithBias(PlainWgrad):
        def bias_gradient(self, grad_output: torch.Tensor) -> torch.Tensor:
            given.append(grad_output)
            return 2 * grad_output.sum(dim=0)

    sequence, batch = shape
    x = integers((sequence // world, batch, k), rank, torch.bfloat16)
    weight = 13 * integers((n, k), 10 + rank, torch.bfloat16)
    bias = (integers((n,), 20 + rank, torch.bfloat16) * 13.5).requires_grad_()
    plain = column_linear(x, weight, context=context, bias=bias)  # the same shape, without a bias inside: other code
    y = column_linear(x, weight, context=context, bias=bias, rounds_once=True, wgrad=WgradWithBias())
    total = gather_rows(x.reshape(-1, k), [sequence * batch // world] * world).view(sequence, batch, k).float()
    once = (total @ weight.float().t() + bias.detach().float()).bfloat16()
    assert torch.equal(y.detach(), once) and not torch.equal(plain.detach(), once)
    grad = integers(tuple(y.shape), 30 + rank, torch.bfloat16)
    y.backward(grad)
    assert len(given) == 1 and torch.equal(bias.grad, 2 * grad.view(-1, n).sum(0))


def check_empty_layers(shape: tuple[int, int]) -> None:
    """Layers on no token, of no sequence or of no batch: shapes as on tokens, gradients of zeros."""
    world, (sequence, batch) = dist.get_world_size(), shape
    context = get_tp_context(None, CPU)
    layers = {column_linear: (sequence, sequence * world), row_linear: (sequence * world, sequence)}
    for layer, (given, returned) in layers.items():
        x, weight = torch.zeros(given, batch, 16, requires_grad=True), integers((8, 16), 1).requires_grad_()
        y = layer(x, weight, context=context)
        assert y.shape == (returned, batch, 8)
        y.backward(torch.ones_like(y))
        assert x.grad.shape == x.shape and torch.equal(weight.grad, torch.zeros(8, 16))
        layer(x.detach(), weight, context=context).sum().backward()  # where x needs no gradient
    x, weight = torch.zeros(sequence * world, batch, 16), integers((8, 16), 1)
    y, gathered = ag_gemm(x, weight, context=context, return_gathered=True)
    assert y.shape == (sequence * world**2, batch, 8) and gathered.shape == (0, 16)
    assert gemm_rs(x, weight, context=context).shape == (sequence, batch, 8)


def check_gradients_stay_outside() -> None:
    """Ops of tensors that need gradients: results that need none, and buffers that keep no call's history."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    rows, weight = integers((3, 16), rank).requires_grad_(), integers((16, 16), 9).requires_grad_()
    whole = torch.cat([integers((3, 16), peer) for peer in range(world)])
    counts = [2 * peer + 1 for peer in range(world)]
    for _ in range(3):
        x = rows * 2
        y, gathered = ag_gemm(x, weight, context=context, return_gathered=True, row_counts=[3] * world)
        uneven = all_gather(integers((counts[rank], 16), 1).requires_grad_(), context=context, row_counts=counts)
        results = [
            y,
            gathered,
            uneven,
            all_gather(x, context=context),
            gemm_rs(torch.cat([x] * world), weight, context=context),
        ]
        assert not any(result.requires_grad for result in results)
        assert torch.equal(results[3], 2 * whole)
        alive = weakref.ref(x)
        del x, results, gathered
        assert alive() is None


def check_pushed_truth_values(num_columns: int) -> None:
    """By SMs, as where no copy engine can be driven; a truth value has one bit in the compiler's eyes, and takes a
    byte."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    x = [integers((5, num_columns), peer) > 0 for peer in range(world)]
    with mock.patch.object(tp_gather, "GatherPlan", lambda mode: GatherPlan("push", 1)):
        assert torch.equal(all_gather(x[rank], context=context), torch.cat(x))


def check_launch_keys() -> None:
    """Every launch of every op is named by where its operands are; one whose operand had to be copied first has no
    name."""
    from ditron_train.runtime.launch import KernelLaunch

    context = get_tp_context(None, CPU)
    world, launched = context.world_size, []
    call = KernelLaunch.__call__

    def recording(self, *arguments, key=None, **options):
        launched.append(key)
        call(self, *arguments, **options)

    x, other = integers((32, 64), 1), integers((32, 64), 2)
    weight, unaligned = integers((64, 64), 3), integers((64, 65), 4)[:, 1:]
    whole = integers((32 * world, 64), 5)
    ops = {
        "ag_gemm": lambda x, weight, mode: ag_gemm(
            x, weight, context=context, plan=GatherPlan(mode, 1), return_gathered=True
        ),
        "gemm_rs": lambda x, weight, mode: gemm_rs(
            whole, weight, context=context, scatter={"push": "store"}.get(mode, mode)
        ),
        "reduce_scatter": lambda x, weight, mode: start_reduce_scatter(whole, context=context).wait(),
        "all_gather": lambda x, weight, mode: all_gather(x, context=context),
    }
    KernelLaunch.__call__ = recording
    try:
        for name, op in ops.items():
            for mode in ("push", "copy"):
                launched.clear()
                op(x, weight, mode)
                assert launched and None not in launched and len(set(launched)) == len(launched), (
                    name,
                    mode,
                    launched,
                )
                before = set(launched)
                launched.clear()
                op(other, integers((64, 64), 6), mode)
                if name.endswith(("gemm", "rs")):
                    assert set(launched) - before, (name, mode)
                    launched.clear()
                    op(x, unaligned, mode)
                    assert None in launched, (name, mode)
    finally:
        KernelLaunch.__call__ = call


def check_recorded_ops() -> list[list[int]]:
    """Ops that are recorded as wholes, with memory that comes by turns as an allocator gives it: another key for other
    memory or strides, the same one for the same, none where an operand was copied first. A recording is repeated as
    ``enqueue``.

    Returns:
        For each op how often it was repeated, and remembered.
    """
    context, recorded, counts, calls, memory = get_tp_context(None, CPU), {}, [], {}, {}
    world, rank, new_empty = context.world_size, context.rank, torch.Tensor.new_empty

    def repeat_op(key: Hashable, copied: Sequence[int], *, forks: bool) -> bool:
        assert copied and set(copied) <= set(key), "copies of memory that the key does not name"
        if key not in recorded:
            return False
        recorded[key]()
        counts[-1][0] += 1
        return True

    def remember_op(key: Hashable, enqueue: Callable[[], object], copied: Sequence[int]) -> None:
        recorded[key] = enqueue
        counts[-1][1] += 1

    def from_memory(self: torch.Tensor, *shape: int, **options: object) -> torch.Tensor:
        if options not in ({}, {"dtype": self.dtype}):
            return new_empty(self, *shape, **options)
        calls[shape] = calls.get(shape, -1) + 1
        piece = memory.setdefault((*shape, calls[shape] // 3 % 2), new_empty(self, *shape))
        return piece.fill_(float("nan"))

    tall, wide = integers((32 * world, 2 * 16), 1), integers((2 * 16, 16), 2)
    shares = [tall[:, :16], tall[:, 16:], tall[:, 16:].contiguous(), tall[:, 1:17]]  # the last is not aligned
    weights = [wide[:16], wide[16:], wide.t()[:, :16].t(), integers((16, 17), 3)[:, 1:]]
    ops = {
        "gemm_rs": functools.partial(gemm_rs, scatter="copy"),
        "ag_gemm": functools.partial(ag_gemm, plan=GatherPlan("copy")),
    }
    recorder = context.recorder
    recorder.repeat, recorder.remember, torch.Tensor.new_empty = repeat_op, remember_op, from_memory
    try:
        for name, op in ops.items():
            counts.append([0, 0])
            for repeat in range(9):
                for turn, (x, weight) in enumerate(zip(shares, weights)):
                    x.copy_(integers(x.shape, 100 * repeat + 10 * turn + rank))
                    weight.copy_(integers(weight.shape, 7 * repeat + turn))
                    partials = [
                        integers(x.shape, 100 * repeat + 10 * turn + peer) @ weight.t() for peer in range(world)
                    ]
                    result = op(x, weight, context=context)
                    rows = slice(32 * rank, 32 * (rank + 1))
                    expected = torch.cat(partials) if name == "ag_gemm" else ring_reduce(partials, rank)[rows]
                    assert torch.equal(result, expected), (name, repeat, turn)
                    for prepared in context.prepared.values():
                        prepared._is_recorded = True
    finally:
        torch.Tensor.new_empty = new_empty
        del recorder.repeat, recorder.remember
    return counts


def check_wrap() -> int:
    """Epochs across 2**31: a context that starts just below it, on a group of its own."""
    group = dist.new_group(list(range(dist.get_world_size())))
    context = TPContext(group, CPU, first_epoch=2**31 - 4)
    for repeat in range(8):
        x = integers((32, 32), repeat + dist.get_rank())
        y = all_gather(x, context=context)
        assert torch.equal(y, gather_rows(x, [32] * dist.get_world_size()))
        gemm_rs(x, x, context=context, scatter="copy" if repeat % 2 else "store")
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    epoch = int(context.gather_channel.signals.local[peer * FLAGS_PER_RANK])
    context.arena.close()
    return epoch


def check_overlapping_groups() -> int:
    """Ranks that are in several groups call the ops of all of them in turn; returns how many contexts this rank
    has."""
    rank, lists = dist.get_rank(), [[0, 1, 2, 3], [0, 1], [1, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in lists]
    contexts = {number: get_tp_context(groups[number], CPU) for number, ranks in enumerate(lists) if rank in ranks}
    for repeat in range(3):
        for number, context in contexts.items():
            rows = 16 * (1 + number)
            whole, weight = integers((rows * context.world_size, 32), 10 * repeat + number), integers((48, 32), repeat)
            mine = slice(rows * context.rank, rows * (context.rank + 1))
            assert torch.equal(ag_gemm(whole[mine], weight, context=context), whole @ weight.t())
            for scatter in ("store", "copy"):
                y = gemm_rs(whole, weight, context=context, scatter=scatter)
                assert torch.equal(y, context.world_size * (whole @ weight.t())[mine])
    for context in contexts.values():
        context.synchronize()
        context.arena.close()
    return len(contexts)


def mismatched(field: str) -> str:
    """Ranks that call the op with different shapes; returns the error's words."""
    rank = dist.get_rank()
    group = dist.new_group(list(range(dist.get_world_size())))
    context = TPContext(group, CPU)
    rows, k = 32, 32
    try:
        ag_gemm(integers((rows, k), 1), integers((16, k), 2), context=context)
        rows += 16 * rank if field == "rows" else 0
        k += 16 * rank if field == "columns" else 0
        if field == "known":  # every rank has seen both shapes: only the kernels can find out
            for count in (32, 48):
                ag_gemm(integers((count, k), 1), integers((16, k), 2), context=context)
            rows = 48 if rank else 32
        dtype = (torch.bfloat16, torch.float16)[rank] if field == "dtype" else torch.float32
        ag_gemm(integers((rows, k), 1, dtype), integers((16, k), 2, dtype), context=context)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def peer_fails(op: str, fault: str, deadline_s: float) -> tuple[str, float, str]:
    """Rank 2 dies, or comes too late, at its third call; returns what the others saw, and when, less what the machine
    was late by."""
    import os
    import signal

    from ditron_train.runtime.errors import PeerTimeoutError
    from ditron_train.symm.control import CONTROL_TIMEOUT_NS

    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    x, weight = integers((32 if op == "ag_gemm" else 32 * world, 32), rank), integers((16, 32), 2)
    options = {} if op == "ag_gemm" else {"scatter": op.split()[1]}
    run = functools.partial(ag_gemm if op == "ag_gemm" else gemm_rs, context=context, **options)
    for _ in range(2):  # here a busy machine may be as late as it likes
        run(x, weight)
    for channel in context._channels:
        channel.timeout_s = deadline_s
        channel.control[CONTROL_TIMEOUT_NS] = int(deadline_s * 1e9)
    if rank == 2:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        late_by = datetime.timedelta(seconds=HANG_S)
        dist.distributed_c10d._get_default_store().wait(["rank 0 has raised", "rank 1 has raised"], late_by)
        return "stalled", 0.0, ""
    begin_s = time.monotonic()
    late = Lateness()
    try:
        with late:
            run(x, weight)
    except PeerTimeoutError as error:
        waited_s = time.monotonic() - begin_s - late.seconds
        dist.distributed_c10d._get_default_store().set(f"rank {rank} has raised", "")
        return type(error).__name__, waited_s, str(error)
    return "no error", time.monotonic() - begin_s, ""


def bad_calls() -> list[str]:
    """Calls that every rank refuses by itself; a good one works behind each, so nothing was signalled."""
    context = get_tp_context(None, CPU)
    x, weight = integers((4, 16), 1), integers((8, 16), 2)
    meta = torch.empty(4, 16, device="meta")
    calls = {
        "ag_gemm": [
            ((x, integers((8, 17), 2)), {}),
            ((x, weight), {"layout": "tn"}),
            ((x[0], weight), {}),
            ((x, weight[0]), {}),
            ((meta, weight), {}),
            ((x, meta), {}),
            ((x.int(), weight.int()), {}),
            ((x, weight.bfloat16()), {}),
            ((x, weight[:0]), {}),
            ((x, weight), {"row_counts": (4,) * 3}),
            ((x, weight), {"row_counts": (5,) * 2}),
            ((x, weight), {"row_counts": (-4, 12)}),
            ((x, weight), {"row_counts": []}),
            ((x, weight), {"bias": integers((9,), 3)}),
            ((x, weight), {"bias": integers((8,), 3).bfloat16()}),
        ],
        "gemm_rs": [((x[:3], weight), {}), ((x, integers((8, 17), 2)), {}), ((meta, weight), {})],
        "all_gather": [((meta,), {}), ((x[:0],), {}), ((x[0],), {}), ((x.to(torch.complex64),), {})],
        "start_reduce_scatter": [((x[:3],), {}), ((meta,), {}), ((x[:, :0],), {}), ((x.double(),), {})],
    }
    ops = {
        "ag_gemm": ag_gemm,
        "gemm_rs": gemm_rs,
        "all_gather": all_gather,
        "start_reduce_scatter": start_reduce_scatter,
    }
    words = []
    for name, bad in calls.items():
        for arguments, options in bad:
            try:
                ops[name](*arguments, context=context, **options)
                words.append("accepted")
            except NotSupportedError as error:
                words.append(str(error))
            everything = torch.cat([integers((4, 16), 1)] * dist.get_world_size())
            assert torch.equal(ag_gemm(x, weight, context=context), everything @ weight.t())
    return words


class _OutOfMemory(RuntimeError):
    pass


def interrupted_in_a_kernel(op: str) -> tuple[str, bool]:
    """Every rank's kernel ends in the middle of its waits: it has drawn its epoch. What that raises; whether the next
    call is right."""
    context = TPContext(dist.new_group([0, 1]), CPU)
    x, weight, mode = integers((32, 64), 1), integers((48, 64), 7), op.split()[1]
    aligned = ag_gemm_module.aligned_operand

    def interrupted(tensor: torch.Tensor) -> torch.Tensor:
        context.gather_channel.tickets[1] += 1 << TICKET_UNIT_LOG2
        raise KeyboardInterrupt

    expected = ag_gemm(x, weight, context=context, plan=GatherPlan(mode, 1))
    ag_gemm_module.aligned_operand = interrupted
    try:
        ag_gemm(x, weight, context=context, plan=GatherPlan(mode, 1))
        words = "nothing"
    except BaseException as error:
        words = type(error).__name__
    finally:
        ag_gemm_module.aligned_operand = aligned
    if words != "KeyboardInterrupt":
        return words, False
    return words, torch.equal(ag_gemm(x, weight, context=context, plan=GatherPlan(mode, 1)), expected)


def check_interrupted(op: str) -> None:
    """An op that every rank gives up in the middle, as where memory runs out, caught by the caller: the next ones wait
    for the rows of their own call, not for those of the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = TPContext(dist.new_group(list(range(world))), CPU)
    shares = [integers((32, 64), peer) for peer in range(world)]
    weight, grad = integers((48, 64), 7), integers((32 * world, 48), 20 + rank)
    fails = [False]

    def refuse(*_: object, **__: object) -> None:
        if fails[0]:
            raise _OutOfMemory

    class Refusing(PlainWgrad):
        def __call__(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor:
            refuse()
            return super().__call__(grad_output, total_input)

    class Grad(torch.Tensor):  # its product with the weight does not fit into memory
        def matmul(self, other: torch.Tensor) -> torch.Tensor:
            refuse()
            return self.as_subclass(torch.Tensor).matmul(other)

    def call(repeat: int) -> torch.Tensor:
        x = shares[rank] + repeat
        if op == "wgrad":
            x.requires_grad_()
            column_linear(x, weight.clone().requires_grad_(), context=context, wgrad=Refusing()).backward(grad)
            return x.grad
        if op == "dgrad":
            given = SimpleNamespace(context=context, wgrad=PlainWgrad())
            return _column_gradients(given, x, weight, grad.as_subclass(Grad))[1]
        if op.endswith("by the library"):
            with _by_library():
                if op.startswith("gemm_rs"):
                    return gemm_rs(torch.cat(shares) + repeat, weight, context=context)
                return ag_gemm(x, weight, context=context)
        if op == "gemm_rs":
            return gemm_rs(torch.cat(shares) + repeat, weight, context=context, scatter="copy")
        return ag_gemm(x, weight, context=context, plan=GatherPlan(op.split()[1], 1))

    def expected(repeat: int) -> torch.Tensor:
        total = torch.cat(shares) + repeat
        mine = slice(32 * rank, 32 * (rank + 1))
        if op == "wgrad":
            return sum(integers((32 * world, 48), 20 + peer) for peer in range(world))[mine] @ weight
        if op == "dgrad":
            return grad.t() @ total
        return world * (total @ weight.t())[mine] if op.startswith("gemm_rs") else total @ weight.t()

    def operand(tensor: torch.Tensor) -> torch.Tensor:
        refuse()
        return tensor

    def product(*given: torch.Tensor, **options: object) -> None:
        refuse()
        library_product(*given, **options)

    modules = (ag_gemm_module, gemm_rs_module)
    aligned = [module.aligned_operand for module in modules]
    try:
        for module in modules:
            module.aligned_operand, module.library_product = operand, product
        for repeat in range(6):
            fails[0] = repeat in (1, 3)
            time.sleep(0.05 * ((rank + repeat) % world))
            try:
                result = call(repeat)
            except _OutOfMemory:
                assert fails[0]
                continue
            assert not fails[0] and torch.equal(result, expected(repeat)), (op, repeat)
        epochs = [
            [int(ticket) for ticket in channel.tickets[:2]]
            for channel in context._channels
            if channel.op_name != "tp.gemm_rs"
        ]
        assert all(started == consumed for started, consumed in epochs), epochs
    finally:
        for module, function in zip(modules, aligned):
            module.aligned_operand, module.library_product = function, library_product
        context.arena.close()


def refused(op: str) -> int:
    """Any launch of an op is refused on all ranks; returns how many it has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = TPContext(dist.new_group(list(range(world))), CPU)
    x, weight = integers((32, 64), rank), integers((48, 64), 7)
    in_chunks = Choice(GemmConfig(16, 32, 16, 4, 2, 2), GatherPlan("copy", num_chunks=2))
    in_rounds = dataclasses.replace(in_chunks, rounds=2)
    calls = {
        "all_gather": lambda: all_gather(x, context=context),
        "ag_gemm push": lambda: ag_gemm(x, weight, context=context, plan=GatherPlan("push", 1)),
        "ag_gemm copy": lambda: ag_gemm(x, weight, context=context, plan=GatherPlan("copy", 1)),
        "gemm_rs": lambda: gemm_rs(x, weight, context=context, scatter="copy"),
        "reduce_scatter": lambda: start_reduce_scatter(x, context=context).wait(),
        "gemm_ar": lambda: gemm_ar(x, weight, context=context, choice=in_chunks),
        "gemm_ar in rounds": lambda: gemm_ar(x, weight, context=context, choice=in_rounds),
    }
    try:
        return check_refused_launches(context, lambda repeat: [calls[op]()])
    finally:
        context.arena.close()


def check_own_rows_that_fail(op: str) -> None:
    """This rank's own rows cannot be copied once a gather has started, on all ranks: the next call is right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = TPContext(dist.new_group(list(range(world))), CPU)
    x = integers((8, 64), rank)
    gathers = {
        "rows": lambda: start_all_gather(x, context=context).wait(),
        "parts": lambda: start_gather_of_parts([x], context=context).wait()[0],
    }
    expected = torch.cat([integers((8, 64), peer) for peer in range(world)])
    try:
        assert torch.equal(gathers[op](), expected)
        (gather,) = context.prepared.values()
        own = mock.Mock(copy_=mock.Mock(side_effect=_OutOfMemory)) if op == "rows" else [None]
        with mock.patch.object(gather, "local_shard" if op == "rows" else "_own", own):
            try:
                gathers[op]()
            except (_OutOfMemory, TypeError):
                pass
            else:
                raise AssertionError("the copy did not fail")
        started, consumed = context.gather_channel.tickets[:2].tolist()
        assert started == consumed
        dist.barrier()
        assert torch.equal(gathers[op](), expected)
    finally:
        context.arena.close()


def nothing_on_one_rank(op: str, is_known: bool) -> str:
    """The last rank's call has no rows; the others' shape is known, or new. Returns the error's words."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = TPContext(dist.new_group(list(range(world))), CPU)
    calls = {
        "ag_gemm": lambda x: ag_gemm(x, integers((16, 32), 2), context=context),
        "gemm_rs copy": lambda x: gemm_rs(x, integers((16, 32), 2), context=context, scatter="copy"),
        "gemm_rs store": lambda x: gemm_rs(x, integers((16, 32), 2), context=context, scatter="store"),
        "all_gather": lambda x: all_gather(x, context=context),
        "reduce_scatter": lambda x: start_reduce_scatter(x, context=context).wait(),
        "gemm_ar": lambda x: gemm_ar(x, integers((16, 32), 2), context=context),
    }
    call, rows = calls[op], integers((16 * world, 32), 1)
    if is_known:
        call(rows)
    if "gemm" in op:  # these refuse nothing on all ranks, too
        call(rows[:0])
    try:
        call(rows[:0] if rank == world - 1 else rows)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
