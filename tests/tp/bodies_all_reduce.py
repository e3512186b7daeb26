"""What the workers of the all-reduce tests run: every function is called on each rank, with gloo initialised."""

from __future__ import annotations

import random
import time
from unittest import mock

import torch
import torch.distributed as dist
from bodies_tp import CPU, integers

from ditron_train.gemm.configs import GemmConfig
from ditron_train.policy.all_reduce_order import SumMap, probe_orders
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.tp import all_reduce as all_reduce_ops
from ditron_train.tp import gemm_ar, get_tp_context
from ditron_train.tp.all_reduce import largest_of_ranks
from ditron_train.tp.choices import Choice, GatherPlan
from ditron_train.tp.linear import PlainWgrad, column_linear, row_linear_ar

TILE = GemmConfig(16, 32, 16, 4, 2, 2)
WAYS = {
    "stores": Choice(TILE, GatherPlan("push", push_programs=3)),
    "copies": Choice(TILE, GatherPlan("copy", num_chunks=3)),
    "rounds": Choice(TILE, GatherPlan("copy"), rounds=2),
}


def simulated_map(num_elements: int, world: int, seed: int = 5) -> SumMap:
    """Chunks of odd lengths, in orders that come as NCCL's would: rings from any rank on, and chains."""
    generator = random.Random(seed)
    rings = [tuple((first + hop) % world for hop in range(world)) for first in range(world)]
    orders = (*rings, tuple(reversed(range(world))))
    cuts = sorted(generator.sample(range(1, num_elements), min(37, num_elements - 1)))
    ends = (*cuts, num_elements)
    return SumMap(ends, tuple(generator.randrange(len(orders)) for _ in ends), orders)


def ring_reduce(partials: list[torch.Tensor], sums: SumMap) -> torch.Tensor:
    """The all-reduce that the map says, element by element."""
    parts = [partial.reshape(-1) for partial in partials]
    out, start = torch.empty_like(parts[0]), 0
    for end, order in zip(sums.ends, sums.order_of_run):
        first, *others = sums.orders[order]
        total = parts[first][start:end]
        for rank in others:
            total = (total.float() + parts[rank][start:end].float()).to(total.dtype)
        out[start:end] = total
        start = end
    return out.view(partials[0].shape)


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def simulated(world: int):
    """NCCL adds in the orders of ``simulated_map``."""

    def sums_of(context, num_elements, dtype):
        return simulated_map(num_elements, world)

    return mock.patch.object(all_reduce_ops, "sums_of", sums_of)


def poison(context) -> None:
    """Not a number into all that peers write, on every rank before any goes on: what a peer pushes comes unasked."""
    for name in ("tp.partials", "tp.pushed", "tp.gathered", "tp.largest"):
        num_bytes = context.arena.capacity_bytes(name)
        if num_bytes:
            context.arena.tensor(name, (num_bytes // 4,), torch.float32).local.fill_(float("nan"))
    if context.is_cuda:
        torch.cuda.synchronize(context.device)
    dist.barrier(context.group)


def check_gemm_ar(m: int, n: int, k: int, layout: str, way: str, dtype_name: str, repeats: int) -> None:
    """gemm_ar against partial products reduced in given orders; buffers poisoned, a random straggler."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, dtype_name)
    context = get_tp_context(None, CPU)
    rng = random.Random(rank)
    for repeat in range(repeats):
        x = integers((m, k), 100 * repeat + rank, dtype)
        weight = integers((n, k) if layout == "nt" else (k, n), 7 + repeat + 50 * rank, dtype)
        scale = torch.tensor(1.0 + rank / 8, dtype=dtype)  # partials of several magnitudes, exact in themselves
        partial = ((x * scale).float() @ (weight.float().t() if layout == "nt" else weight.float())).to(dtype)
        expected = ring_reduce(gathered(partial), simulated_map(m * n, world))
        if repeat:
            poison(context)
        dist.barrier()
        time.sleep(rng.random() * 0.02)
        with simulated(world):
            y = gemm_ar(x * scale, weight, context=context, layout=layout, choice=WAYS[way])
        assert torch.equal(y, expected), (rank, repeat)


def check_alternating(repeats: int) -> None:
    """Small all-reduces of several sizes in turn, which share slots by parity alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    rng = random.Random(rank)
    sizes = [(1, 8), (16, 600), (3, 40)]
    weights = {size: integers((size[1], 16), 3) for size in sizes}
    for repeat in range(repeats):
        m, n = sizes[rng.randrange(1) + repeat % 3]
        x = integers((m, 16), 100 * repeat + rank)
        others = [integers((m, 16), 100 * repeat + peer) for peer in range(world)]
        time.sleep(rng.random() * 0.01)
        y = gemm_ar(x, weights[m, n], context=context, choice=WAYS["stores"])
        assert torch.equal(y, sum(others) @ weights[m, n].t()), (rank, repeat)


def check_largest(first_epoch: int, repeats: int) -> None:
    """The largest of all ranks' values, late ranks, poisoned slots, small all-reduces of the same channel between."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU, first_epoch=first_epoch)
    rng, nan, inf = random.Random(rank), float("nan"), float("inf")
    weight, kept = integers((8, 16), 3), torch.zeros(1)
    for repeat in range(repeats):
        values = [
            [0.0] * world,
            [float(repeat * peer % 7) for peer in range(world)],
            [inf if peer == repeat % world else 1.0 for peer in range(world)],
            [nan if peer != repeat % world else 2.0**-126 for peer in range(world)],
            [nan] * world,
        ][repeat % 5]
        if repeat % 4 == 3:
            poison(context)
        time.sleep(rng.random() * 0.01)
        value = kept.fill_(values[rank]) if repeat % 2 else torch.tensor(values[rank])
        largest_of_ranks(value, context=context)
        numbers = [one for one in values if one == one]
        assert value.item() == max(numbers) if numbers else torch.isnan(value), (rank, repeat, values, value)
        if repeat % 3 == 2:
            x = integers((2, 16), 100 * repeat + rank)
            y = gemm_ar(x, weight, context=context, choice=WAYS["stores"])
            others = [integers((2, 16), 100 * repeat + peer) for peer in range(world)]
            assert torch.equal(y, sum(others) @ weight.t()), (rank, repeat)


def refuse_largest() -> list[str]:
    """What is no amax is refused on every rank, before anything is signalled."""
    context, logged = get_tp_context(None, CPU), []
    for value in (torch.zeros(2), torch.zeros(1, dtype=torch.bfloat16)):
        try:
            largest_of_ranks(value, context=context)
        except NotSupportedError as error:
            logged.append(str(error))
    check_largest(0, 2)
    return logged


def check_layers(shape: tuple[int, int], n: int, k: int) -> None:
    """The row linear layer, forward and all gradients, against gloo and torch.matmul on integers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    x = integers((*shape, k // world), 40 + rank).requires_grad_()
    weight = integers((n, k // world), 50 + rank).requires_grad_()
    y = row_linear_ar(x, weight, context=context)
    partial = x.detach() @ weight.detach().t()
    dist.all_reduce(partial)
    assert torch.equal(y.detach(), partial)
    grad = integers(tuple(y.shape), 60)
    y.backward(grad)
    assert torch.equal(x.grad, grad @ weight.detach())
    assert torch.equal(weight.grad, grad.view(-1, n).t() @ x.detach().view(-1, k // world))

    empty = torch.zeros(0, 2, k, requires_grad=True)
    weight = integers((8, k), 1).requires_grad_()
    y = row_linear_ar(empty, weight, context=context)
    assert y.shape == (0, 2, 8)
    y.backward(torch.ones_like(y))
    assert empty.grad.shape == empty.shape and not weight.grad.any()


class _Doubled(PlainWgrad):
    """Products get twice the gradient: that they do is seen."""

    def operand(self, grad_output: torch.Tensor) -> torch.Tensor:
        return 2 * grad_output


def check_operands(tokens: int, n: int, k: int) -> None:
    """Products of gradients get what ``Wgrad.operand`` makes of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    for layer in (row_linear_ar, column_linear):
        for frozen in (False, True):
            found = []
            for wgrad in (PlainWgrad(), _Doubled()):
                rows = tokens // world if layer is column_linear else tokens
                x = integers((rows, 2, k), 1).requires_grad_()
                weight = integers((n, k), 10 + rank).requires_grad_(not frozen)
                y = layer(x, weight, context=context, wgrad=wgrad)
                y.backward(integers(tuple(y.shape), 30 + rank))
                found.append(x.grad)
            assert found[0].any() and torch.equal(found[1], 2 * found[0]), (layer, frozen)


def nothing_on_one_rank() -> str:
    """The error of a call that has rows on some ranks only."""
    context = get_tp_context(None, CPU)
    rows = 0 if dist.get_rank() == dist.get_world_size() - 1 else 32
    try:
        gemm_ar(integers((rows, 16), 1), integers((16, 16), 2), context=context, choice=WAYS["copies"])
        context.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        context.arena.close()  # else the next one to use the group's context is told, too
    return "no error"


def revealed(kind: str, num_elements: int, dtype: torch.dtype) -> tuple[bool, str | None]:
    """Whether a simulated all-reduce is seen as it is, and why not."""
    world = dist.get_world_size()
    sums, calls = simulated_map(num_elements, world), []

    def all_reduce(x: torch.Tensor) -> None:
        calls.append(kind)
        parts = gathered(x)
        if kind == "tree":
            x.copy_((parts[0] + parts[1]) + (parts[2] + parts[3]))
        elif kind == "unrounded":
            x.copy_(sum((part.float() for part in parts[1:]), parts[0].float()))
        elif kind == "by call" and len(calls) % 2:
            x.copy_(ring_reduce(parts, SumMap.ring(num_elements, world)))
        else:
            x.copy_(ring_reduce(parts, sums))

    found = probe_orders(all_reduce, num_elements, group=dist.group.WORLD, device=CPU, dtype=dtype)
    if found.sums is None:
        return False, found.reason
    rng = torch.Generator().manual_seed(3)
    values = [torch.randn(num_elements, generator=rng).to(dtype) for _ in range(world)]
    return torch.equal(ring_reduce(values, found.sums), ring_reduce(values, sums)), found.reason
