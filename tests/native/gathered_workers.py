"""What the workers of the gathered experts' tests run, without Megatron's layers."""

from __future__ import annotations

import gc
import random
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ditron_train.cpu.megatron_shim import megatron_on_cpu
from ditron_train.ep.gather import GatheredLayout
from ditron_train.megatron.ep import gather as ep_gather
from ditron_train.megatron.ep import gathered_spec
from ditron_train.megatron.ep.gather import GatheredCall, gather_linear, gather_to_rows, linear_scatter
from ditron_train.megatron.ep.gathered_spec import GATHERED_EXPERTS
from ditron_train.policy import fused_results, native_results
from ditron_train.tools.cases import RunEnvironment
from ditron_train.tools.cases.ep_gathered import GatheredExpertsCase
from ditron_train.tools.cases.ep_layers import moe_layer
from ditron_train.tp import gather
from ditron_train.tp.context import get_tp_context


def _integers(*size, seed, dtype):
    return torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _expected(all_x, all_grads, firsts, seconds, routed, experts):
    """By plain products in float64, of all ranks at once: result, its input's gradient, and weights' gradients."""
    x = torch.cat(all_x).double().requires_grad_()
    weights = [one.double().requires_grad_() for one in (*firsts, *seconds)]
    total = 0
    for expert in range(experts):
        h = x @ weights[expert].t()
        z = h[:, : weights[experts].shape[1]] @ weights[experts + expert].t()
        total = total + torch.where(routed[:, expert, None], z, 0.0)
    total.backward(torch.cat(all_grads).double())
    return total.detach(), x.grad, [weight.grad for weight in weights]


def layers_are_exact(num_tokens, hidden, ffn, local_experts, density, late_s=0.0, calls=3, min_rows=0):
    """Several calls with new routings on poisoned memory, a rank that is late in each; whether all was exact.

    In all calls but the first, sources are multiplied in groups that are drawn, other ones on each rank.
    With ``min_rows``: and whether experts of fewer rows were multiplied by themselves, in each of the four products.
    """
    asked = set()

    def few_of(layout):
        def few(rows, weights, transpose, out, experts):
            assert experts == [e for e, have in enumerate(layout.tokens_per_expert.tolist()) if 0 < have < min_rows]
            splits = layout.tokens_per_expert.tolist()
            for expert in experts:
                part = rows.split(splits)[expert]
                assert torch.equal(part, part.round()), "rows are there"
                weight = weights[expert].detach()
                out.split(splits)[expert].copy_(part @ (weight.t() if transpose else weight))
            asked.add((transpose, tuple(weights[0].shape)))

        return few if min_rows else None

    world, rank, dtype = dist.get_world_size(), dist.get_rank(), torch.float32
    context, experts = get_tp_context(None, torch.device("cpu")), local_experts * dist.get_world_size()
    empty, groups_in_sequence, draw = torch.empty, ep_gather.groups_in_sequence, random.Random(rank)
    equal = True

    def drawn_groups(order, product_us, transfer_us, lost_us):
        assert product_us >= 0 and transfer_us > 0 and lost_us > 0
        ends = [place for place in range(1, world) if draw.random() < 0.7]
        return [list(order[first:end]) for first, end in zip([0, *ends], [*ends, world])]

    for turn in range(calls):
        ep_gather.groups_in_sequence = groups_in_sequence if turn == 0 else drawn_groups
        generator = torch.Generator().manual_seed(turn)
        routed = torch.rand(world * num_tokens, experts, generator=generator) < density
        all_x, all_grads = ([_integers(num_tokens, hidden, seed=9 * turn + r + s, dtype=dtype) for r in range(world)]
                            for s in (0, 50))  # fmt: skip
        firsts = [_integers(2 * ffn, hidden, seed=100 + e, dtype=dtype) for e in range(experts)]
        seconds = [_integers(hidden, ffn, seed=200 + e, dtype=dtype) for e in range(experts)]
        own = slice(rank * local_experts, (rank + 1) * local_experts)
        x = all_x[rank].clone().requires_grad_()
        first, second = ([w.clone().requires_grad_() for w in ws[own]] for ws in (firsts, seconds))
        layout = GatheredLayout(routed[:, own].contiguous(), world)
        options = {"few": few_of(layout), "min_rows": min_rows}
        calls_of_layer = [GatheredCall(layout, context, "ascending", dtype, **options) for _ in range(2)]
        if rank == turn % world:
            time.sleep(late_s)
        context.gathered(world * num_tokens, hidden, dtype).local.fill_(float("nan"))
        dist.barrier()
        try:
            torch.empty = lambda *a, **k: empty(*a, **k).fill_(7) if k.get("dtype", dtype).is_floating_point else empty(*a, **k)  # fmt: skip  # noqa: E501
            h = gather_linear(x, first, calls_of_layer[0])[:, :ffn].contiguous()
            if rank == (turn + 1) % world:
                time.sleep(late_s)
            out = linear_scatter(h, second, calls_of_layer[1])
            out.backward(all_grads[rank])
        finally:
            torch.empty = empty
        total, grad_x, grads = _expected(all_x, all_grads, firsts, seconds, routed, experts)
        mine = slice(rank * num_tokens, (rank + 1) * num_tokens)
        pairs = [(out.detach(), total[mine]), (x.grad, grad_x[mine])]
        pairs += list(zip([w.grad for w in first], grads[own]))
        pairs += list(zip([w.grad for w in second], grads[experts:][own]))
        equal &= all(torch.equal(one.double(), two) for one, two in pairs)
    ep_gather.groups_in_sequence = groups_in_sequence
    return equal and len(asked) == (4 if min_rows else 0)


def a_gather_that_nobody_consumes(where) -> bool:
    """Whether a call is exact behind one that failed on all ranks once its gather had started, where copies are slow:
    rows of the one that failed must not be taken for those of the next."""
    shape = moe_layer("test", 12, 16, 8, 2 * dist.get_world_size(), 2)
    shape.options["deterministic"] = True
    case = GatheredExpertsCase(GATHERED_EXPERTS)
    place = RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32)

    def fail(*args, **options):
        raise torch.OutOfMemoryError("no room")

    owner, name = {"layout": (gathered_spec, "GatheredLayout"), "product": (ep_gather, "GatheredProduct")}[where]
    with megatron_on_cpu(), case.surroundings(shape):
        context = case.op.make_context(case.sample(shape, place, 1))
        first, second = (case.sample(shape, place, seed) for seed in (1, 2))
        fused_results(case.op, first, context)  # memory is there
        kept = getattr(owner, name)
        setattr(owner, name, fail)
        try:
            fused_results(case.op, first, context)
            return False
        except torch.OutOfMemoryError:
            pass
        finally:
            setattr(owner, name, kept)
        context.gathered(dist.get_world_size() * 12, 16, torch.float32).local.fill_(float("nan"))
        dist.barrier()
        copy = gather.copy_with_flags
        gather.copy_with_flags = lambda *args: (time.sleep(0.5 * dist.get_rank()), copy(*args))
        fused, native = fused_results(case.op, second, context), native_results(case.op, second)
        gather.copy_with_flags = copy
    return all(torch.equal(a, b) for a, b in zip(native, fused, strict=True))


def weight_grads_of_frozen_tokens() -> bool:
    """Tokens that need no gradient, the GEMM beside their movement on rank 0 alone: whether the weights' gradients are
    exact."""
    world, rank, dtype = dist.get_world_size(), dist.get_rank(), torch.float32
    x = _integers(6, 8, seed=rank, dtype=dtype)
    weights = [_integers(8, 8, seed=10 + expert, dtype=dtype).requires_grad_() for expert in range(2)]
    routed = torch.rand(world * len(x), len(weights), generator=torch.Generator().manual_seed(rank)) < 0.6
    layout = GatheredLayout(routed, world)
    call = GatheredCall(layout, get_tp_context(None, torch.device("cpu")), "ascending", dtype)
    if rank == 0:
        y = gather_linear(x, weights, call)
    else:
        pieces = gather_to_rows(x, call).split(layout.tokens_per_expert.tolist())
        y = torch.cat([piece @ weight.t() for piece, weight in zip(pieces, weights)])
    y.backward(torch.ones_like(y))
    all_x = torch.cat([_integers(6, 8, seed=source, dtype=dtype) for source in range(world)])
    sums = [all_x[routed[:, expert]].sum(0).expand(8, -1) for expert in range(len(weights))]
    return all(torch.equal(weight.grad, total) for weight, total in zip(weights, sums, strict=True))


def trials_beside_newer_permutations() -> bool:
    """Whether the spec compares both paths exactly where ``permute`` returns what it does since Megatron-core 0.17:
    offsets of padding and counts, too."""
    permute = gathered_spec.permute
    gathered_spec.permute = lambda *args, **options: (*permute(*args, **options)[:3], None, None)
    try:
        shape = moe_layer("test", 12, 16, 8, 2 * dist.get_world_size(), 2)
        shape.options["deterministic"] = True
        case = GatheredExpertsCase(GATHERED_EXPERTS)
        place = RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32)
        with megatron_on_cpu(), case.surroundings(shape):
            call = case.sample(shape, place, 1)
            native, fused = native_results(case.op, call), fused_results(case.op, call, case.op.make_context(call))
    finally:
        gathered_spec.permute = permute
    return all(torch.equal(a, b) for a, b in zip(native, fused, strict=True))


def trial_of_an_evaluation() -> bool:
    """Whether both paths of the experts can be compared, and are equal, where the first call is one of inference."""
    shape = moe_layer("test", 12, 16, 8, 2 * dist.get_world_size(), 2)
    shape.options["deterministic"] = True
    case = GatheredExpertsCase(GATHERED_EXPERTS)
    place = RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32)
    with megatron_on_cpu(), case.surroundings(shape), torch.inference_mode():
        call = case.sample(shape, place, 1)
        trial = case.op.trial(call, case.op.make_context(call))
        native, fused = trial.native(), trial.fused()
    return all(torch.equal(a, b) for a, b in zip(native, fused, strict=True))


def trials_keep_no_memory() -> bool:
    """Whether what stock Megatron has computed is freed once its results are, without a garbage collection."""
    shape = moe_layer("test", 12, 16, 8, 2 * dist.get_world_size(), 2)
    shape.options["deterministic"] = True
    case = GatheredExpertsCase(GATHERED_EXPERTS)
    place = RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32)
    products, kept = gathered_spec.native_products, []

    def noted(*args):
        found = products(*args)

        def note(function):
            def run(*tensors):
                out = function(*tensors)
                kept.extend(StorageWeakRef(one.untyped_storage()) for one in (out if isinstance(out, list) else [out]))
                return out

            return run

        return {name: note(function) for name, function in found.items()}

    gathered_spec.native_products = noted
    gc.disable()
    try:
        with megatron_on_cpu(), case.surroundings(shape):
            native_results(case.op, case.sample(shape, place, 1))
    finally:
        gathered_spec.native_products = products
        gc.enable()
    return bool(kept) and all(reference.expired() for reference in kept)
