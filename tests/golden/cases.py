"""The calls whose records are golden: every op of the package on small shapes, by each of its ways, forward and
backward, in Triton's interpreter with 2 processes, and with 4 where their order matters.

A case makes its operands and a function that calls the op once. The function is called three times on a process group
of its own: ``call 1`` is the record of the first call, with what ranks agree on and the buffers that are made,
``call 3`` of the third, when nothing is new. Each ends with a hash of results and gradients. Operands are whole
numbers, or fractions with few bits, of which sums are exact in any order: bits do not depend on the kind of CPU or on
how many threads it has.

What these records do not cover:

- GPU paths that the interpreter does not take: ``KernelLaunch.repeat``, NVSHMEM, memory operations of streams and
  their watchdog, registered host memory, and all of ``sp``, ``ep``, ``pp`` and ``optim`` that depends on the device.
  Of ``tp`` the cases ``h200 ...`` record what it would enqueue on an H200 (``tests.support.simulated_gpu``): choices,
  stream order, copy engines and recorded graphs. Nothing is run there, so they have no bits.
- What a kernel does inside; ``kernels.json`` has its code.
- Whole layers and steps of Megatron, and what needs Transformer Engine: FP8 layers, its grouped GEMMs and gradients
  into ``main_grad`` by them.
- Bits of Newton-Schulz iterations, whose sums on a CPU depend on its kind: a case without ``is_exact`` has no hash.
- Calls over nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.call_recorder import CallRecorder, bits_of
from tests.support.processes import run_workers, run_workers_once
from tests.support.small_tiles import tiles_of_a_release

CPU = torch.device("cpu")
Tensors = Sequence["torch.Tensor | None"]
#: Named operands, and the call.
Prepared = tuple[Mapping[str, torch.Tensor], Callable[[], Tensors]]


@dataclass(frozen=True)
class Case:
    """One way to call one op.

    Attributes:
        name: Begins with the subpackage.
        world: How many processes.
        prepare: From a process group, and a stack of what is left behind the last call, to operands and the call.
        is_exact: Whether bits are the same on any CPU.
        calls: Which calls are recorded.
        simulates: Whether tensor parallelism takes its paths of an H200, of which nothing is run.
    """

    name: str
    world: int
    prepare: Callable[[contextlib.ExitStack, dist.ProcessGroup], Prepared]
    is_exact: bool = True
    calls: tuple[int, ...] = (1, 3)
    simulates: bool = False


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers from -3 to 3, another set on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def stacked(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Weights of experts, one behind another: kernels find them by how far apart they are, which differs from run to
    run where each has memory of its own."""
    return list(torch.stack(list(tensors)).unbind(0))


def eighths(*shape: int, seed: int) -> torch.Tensor:
    """Probabilities from 1/8 to 1."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(1, 9, shape, generator=generator).float() / 8


def gradients(function: Callable[..., Any], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Tensors:
    """Results of ``function``, then gradients of its inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    found = function(*leaves)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    return [*results, *torch.autograd.grad(results, leaves, grads, allow_unused=True)]


# -- tensor parallelism ---------------------------------------------------------------------------------------------


def _context(stack: contextlib.ExitStack, group: dist.ProcessGroup) -> Prepared:
    from ditron_train.tp import get_tp_context

    return {}, lambda: [torch.zeros(1)] if get_tp_context(group, CPU) else []


def _by_library(stack: contextlib.ExitStack) -> None:
    """As a tuning table may choose."""
    from ditron_train.tp import choices
    from ditron_train.tp import context as tp_context

    def chosen(problem, machine):
        return choices.with_library(choices.choose(problem, machine))

    stack.enter_context(mock.patch.object(tp_context, "choose", chosen))


def _ag_gemm(counts, n, k, layout, mode, dtype, stack, group) -> Prepared:
    from ditron_train.tp import GatherPlan, ag_gemm, get_tp_context

    if mode == "library":
        _by_library(stack)
    x = integers(counts[dist.get_rank()], k, seed=1, dtype=dtype)
    weight = integers(*((n, k) if layout == "nt" else (k, n)), seed=2, dtype=dtype)
    options: dict[str, Any] = dict(context=get_tp_context(group, CPU), layout=layout)
    options["row_counts"] = None if len({*counts}) == 1 else counts
    options["plan"] = None if mode in (None, "library") else GatherPlan(mode, push_programs=1, num_chunks=2)
    return dict(x=x, w=weight), lambda: ag_gemm(x, weight, return_gathered=True, **options)


def _gemm_rs(counts, n, k, layout, scatter, dtype, stack, group) -> Prepared:
    from ditron_train.tp import gemm_rs, get_tp_context

    if scatter == "library":
        _by_library(stack)
        scatter = None
    x = integers(sum(counts), k, seed=3, dtype=dtype)
    weight = integers(*((n, k) if layout == "nt" else (k, n)), seed=4, dtype=dtype)
    options = dict(context=get_tp_context(group, CPU), layout=layout, scatter=scatter)
    row_counts = None if len({*counts}) == 1 else counts
    return dict(x=x, w=weight), lambda: [gemm_rs(x, weight, row_counts=row_counts, **options)]


def _ar_orders(stack: contextlib.ExitStack, world: int, num_elements: int) -> None:
    """NCCL's orders of sums are asked of NCCL: here it is said to add in runs that begin at each rank in turn."""
    from unittest import mock

    from ditron_train.policy.all_reduce_order import SumMap
    from ditron_train.tp import all_reduce

    rings = tuple(tuple((first + hop) % world for hop in range(world)) for first in range(world))

    def sums_of(context: Any, size: int, dtype: torch.dtype) -> SumMap:
        ends = tuple(sorted({*range(37, size, 101), size}))
        return SumMap(ends, tuple(index % world for index in range(len(ends))), rings)

    stack.enter_context(mock.patch.object(all_reduce, "sums_of", sums_of))


def _gemm_ar(m, n, k, layout, way, dtype, stack, group) -> Prepared:
    from ditron_train.gemm.configs import GemmConfig
    from ditron_train.tp import gemm_ar, get_tp_context
    from ditron_train.tp.choices import Choice, GatherPlan

    tile = GemmConfig(16, 32, 16, 4, 2, 2)
    ways = {
        "stores": Choice(tile, GatherPlan("push", push_programs=3)),
        "copies": Choice(tile, GatherPlan("copy", num_chunks=3)),
        "rounds": Choice(tile, GatherPlan("copy"), rounds=2),
    }
    _ar_orders(stack, dist.get_world_size(), m * n)
    x = integers(m, k, seed=5, dtype=dtype)
    weight = integers(*((n, k) if layout == "nt" else (k, n)), seed=6, dtype=dtype)
    options = dict(context=get_tp_context(group, CPU), layout=layout, choice=ways.get(way))
    return dict(x=x, w=weight), lambda: [gemm_ar(x, weight, **options)]


def _move(name, shape, stack, group) -> Prepared:
    from ditron_train.tp import get_tp_context, start_all_gather, start_reduce_scatter

    context = get_tp_context(group, CPU)
    start = {"gather": start_all_gather, "scatter": start_reduce_scatter}[name]
    x = integers(*shape, seed=7, dtype=torch.bfloat16)
    return dict(x=x), lambda: [start(x, context=context).wait().clone()]


def _largest(stack, group) -> Prepared:
    from ditron_train.tp import get_tp_context
    from ditron_train.tp.all_reduce import largest_of_ranks

    context, value = get_tp_context(group, CPU), torch.tensor([2.0 + dist.get_rank()])

    def call() -> Tensors:
        amax = value.clone()
        largest_of_ranks(amax, context=context)
        return [amax]

    return {}, call


def _linear(kind, shape, n, k, has_bias, dtype, stack, group) -> Prepared:
    from ditron_train.tp import column_linear, get_tp_context, row_linear
    from ditron_train.tp.linear import row_linear_ar

    context, world = get_tp_context(group, CPU), dist.get_world_size()
    _ar_orders(stack, world, 0)
    (sequence, batch), is_column = shape, kind.startswith("column")
    is_reduced = kind.endswith("ar")
    layer = {"column": column_linear, "row": row_linear, "row ar": row_linear_ar}[kind]
    if is_column:
        x_shape = (sequence // world, batch, k)
        w_shape, y_shape = (n // world, k), (sequence, batch, n // world)
    else:
        x_shape, w_shape = (sequence, batch, k // world), (n, k // world)
        y_shape = (sequence if is_reduced else sequence // world, batch, n)
    x, weight, grad = (
        integers(*size, seed=seed, dtype=dtype) for seed, size in ((8, x_shape), (9, w_shape), (10, y_shape))
    )
    bias = [integers(n // world, seed=11, dtype=dtype)] if has_bias else []

    def function(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return layer(x, weight, context=context, **({"bias": bias[0]} if bias else {}))

    named = dict(x=x, w=weight, dy=grad, **({"b": bias[0]} if bias else {}))
    return named, lambda: gradients(function, [x, weight, *bias], [grad])


def _fp8(op, rows, n, k, mode, stack, group) -> Prepared:
    from ditron_train.gemm.operands import TensorScales
    from ditron_train.tp import GatherPlan, ag_gemm, gemm_rs, get_tp_context

    context = get_tp_context(group, CPU)
    scales = TensorScales(torch.tensor([0.5 + dist.get_rank()]), torch.tensor(0.25))
    x, weight = (integers(*size, seed=s).to(torch.float8_e4m3fn) for s, size in ((12, (rows, k)), (13, (n, k))))
    named = dict(x=x, w=weight, scale_x=scales.a, scale_w=scales.b)
    if op == "ag_gemm":
        plan = GatherPlan(mode, push_programs=1)
        return named, lambda: ag_gemm(x, weight, context=context, scales=scales, plan=plan, return_gathered=True)
    return named, lambda: [gemm_rs(x, weight, context=context, scales=scales, scatter=mode)]


def _simulated_cases() -> Iterator[Case]:
    """By the paths of GPUs. What is short is recorded as a graph in the fourth call at the latest; the fifth launches
    it."""
    options: dict[str, Any] = dict(is_exact=False, calls=(1, 4, 5), simulates=True)
    bf16 = torch.bfloat16
    for world in (2, 4):
        for rows, n, k in ((2048, 1024, 1024), (4096, 2048, 2048)):
            even = (rows // world,) * world
            words = f"{rows} {n} {k}, {world} ranks"
            options["calls"] = (1, 4, 5) if rows == 4096 else (1,)
            yield Case(f"h200 ag_gemm {words}", world, partial(_ag_gemm, even, n, k, "nt", None, bf16), **options)
            yield Case(f"h200 gemm_rs {words}", world, partial(_gemm_rs, even, n, k, "nt", None, bf16), **options)
            yield Case(f"h200 gemm_ar {words}", world, partial(_gemm_ar, rows, n, k, "nt", None, bf16), **options)
    yield Case("h200 gemm_ar rows of a decode", 2, partial(_gemm_ar, 8, 256, 128, "nt", None, bf16), **options)
    for world in (2, 4):
        words, sizes = f"by the library 1024, {world} ranks", (1024, 1024)
        even = (1024 // world,) * world
        yield Case(f"h200 ag_gemm {words}", world, partial(_ag_gemm, even, *sizes, "nt", "library", bf16), **options)
        yield Case(f"h200 gemm_rs {words}", world, partial(_gemm_rs, even, *sizes, "nt", "library", bf16), **options)
    for mode, scatter in (("push", "store"), ("copy", "copy")):
        uneven = (160, 96)
        yield Case(f"h200 ag_gemm {mode} 160+96", 2, partial(_ag_gemm, uneven, 256, 128, "nn", mode, bf16), **options)
        yield Case(
            f"h200 gemm_rs {scatter} 160+96", 2, partial(_gemm_rs, uneven, 256, 128, "nn", scatter, bf16), **options
        )
    for name, shape in (("gather", (64, 64)), ("scatter", (64, 64))):
        yield Case(f"h200 start {name}", 4, partial(_move, name, shape), **options)
    for kind in ("column", "row", "row ar"):
        yield Case(f"h200 {kind} linear", 2, partial(_linear, kind, (256, 1), 256, 256, False, bf16), **options)


def _tp_cases() -> Iterator[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    yield Case("tp context", 2, _context)
    for counts, n, k, layout, dtype in (
        ((32, 32), 48, 32, "nt", bf16),
        ((9, 20), 20, 17, "nn", f32),
        ((0, 25), 24, 36, "nt", f32),
    ):
        shape = f"{'+'.join(map(str, counts))} {n} {k} {layout}"
        for mode in ("push", "copy"):
            yield Case(f"tp ag_gemm {mode} {shape}", 2, partial(_ag_gemm, counts, n, k, layout, mode, dtype))
        for scatter in ("store", "copy"):
            yield Case(f"tp gemm_rs {scatter} {shape}", 2, partial(_gemm_rs, counts, n, k, layout, scatter, dtype))
    yield Case("tp ag_gemm by itself", 2, partial(_ag_gemm, (32, 32), 48, 32, "nt", None, bf16))
    yield Case("tp gemm_rs by itself", 2, partial(_gemm_rs, (32, 32), 48, 32, "nt", None, bf16))
    for world in (2, 4):
        words = f"by the library 40 32, {world} ranks"
        yield Case(f"tp ag_gemm {words}", world, partial(_ag_gemm, (16,) * world, 40, 32, "nn", "library", bf16))
        yield Case(f"tp gemm_rs {words}", world, partial(_gemm_rs, (16,) * world, 40, 32, "nt", "library", bf16))
    for world, counts in ((4, (16, 5, 0, 30)), (4, (16,) * 4)):
        shape = "+".join(map(str, counts))
        for mode, scatter in (("push", "store"), ("copy", "copy")):
            yield Case(
                f"tp ag_gemm {mode} {shape}, 4 ranks", world, partial(_ag_gemm, counts, 24, 32, "nt", mode, bf16)
            )
            yield Case(
                f"tp gemm_rs {scatter} {shape}, 4 ranks", world, partial(_gemm_rs, counts, 24, 32, "nn", scatter, bf16)
            )
    for way in ("stores", "copies", "rounds", None):
        name = f"tp gemm_ar {way or 'by itself'}"
        yield Case(f"{name} 33 48 24 nt", 2, partial(_gemm_ar, 33, 48, 24, "nt", way, bf16))
        yield Case(f"{name} 40 40 17 nn, 4 ranks", 4, partial(_gemm_ar, 40, 40, 17, "nn", way, bf16))
    for name, shape in (("gather", (6, 3, 10)), ("scatter", (8, 2, 5))):
        for world in (2, 4):
            yield Case(f"tp start {name}, {world} ranks", world, partial(_move, name, shape))
    yield Case("tp largest of ranks", 2, _largest)
    for kind, has_bias in (("column", True), ("column", False), ("row", False), ("row ar", False)):
        name = f"tp {kind} linear{' with bias' if has_bias else ''}"
        yield Case(name, 2, partial(_linear, kind, (16, 2), 32, 24, has_bias, f32))
        if not has_bias:
            yield Case(f"{name}, 4 ranks", 4, partial(_linear, kind, (12, 1), 20, 28, has_bias, f32))
    for mode in ("push", "copy"):
        yield Case(f"tp ag_gemm fp8 {mode}", 2, partial(_fp8, "ag_gemm", 40, 48, 32, mode))
    for scatter in ("store", "copy"):
        yield Case(f"tp gemm_rs fp8 {scatter}", 2, partial(_fp8, "gemm_rs", 40, 48, 32, scatter))


# -- every op of the catalog ------------------------------------------------------------------------------------------


def _spec_call(name, sizes, options, stack, group) -> Prepared:
    """An op as its case in ``tools.catalog`` calls it, with Megatron's groups around it where it needs them."""
    from ditron_train.policy import fused_results
    from ditron_train.tools.bench.megatron_ep import expert_parallel_world
    from ditron_train.tools.cases import RunEnvironment, Shape
    from ditron_train.tools.catalog import cases_of
    from tests.support.model_parallel import model_parallel

    case = next(case for case in cases_of(name.split()[0]) if case.op.name == name)
    world = dist.get_world_size()
    if case.groups == "expert":
        stack.enter_context(expert_parallel_world())
    elif case.groups == "tensor":
        stack.enter_context(model_parallel(tensor_model_parallel_size=world))
    _ar_orders(stack, world, 0)
    shape = Shape("custom", sizes, options)
    stack.enter_context(case.surroundings(shape))
    call = case.sample(shape, RunEnvironment(group, CPU, torch.float32), 0)
    for field in {"weights", "firsts", "seconds"} & {*getattr(call, "_fields", ())}:
        call = call._replace(**{field: stacked(getattr(call, field))})
    context = case.op.make_context(call)
    named = {f"in{index}": tensor for index, tensor in enumerate(case.op.inputs(call))}
    named |= {f"grad{index}": tensor for index, tensor in enumerate(case.op.grads(call))}
    return named, lambda: fused_results(case.op, call, context)


def _spec_cases() -> Iterator[Case]:
    """Ops of the catalog that make up calls of their own."""

    def case(name: str, world: int, sizes: dict[str, int], what: str = "", is_exact: bool = True, **options) -> Case:
        words = ", ".join(filter(None, [f"spec {name}", what, "4 ranks" if world == 4 else ""]))
        return Case(words, world, partial(_spec_call, name, sizes, options), is_exact)

    linear = {"m": 32, "n": 32, "k": 32}
    for name in ("ag_gemm", "gemm_rs", "gemm_ar", "ag_gemm nn", "gemm_rs nn"):
        yield case(f"tp {name}", 2, linear)
    for name in ("column", "row", "row ar"):
        yield case(f"tp {name}", 2, linear)
    attention = {"seqlen": 32, "heads": 8, "groups": 4, "head_size": 8}
    for name in (
        *("gemm_a2a", "a2a_gemm", "gemm_a2a nn", "a2a_gemm nn"),
        *("qkv_projection", "output_projection", "to_heads", "to_sequence"),
    ):
        for world in (2, 4) if name.startswith("to_") else (2,):
            yield case(f"sp {name}", world, attention)
    layer = {"tokens_per_rank": 12, "hidden": 32, "ffn_hidden": 16, "num_experts": 8, "topk": 2}
    for name in ("dispatch", "combine", "flex_dispatch", "flex_combine", "gathered_experts"):
        for what, zipf, deterministic in (("", 1.0, False), ("deterministic", 0.0, True)):
            for world in (2, 4) if name != "gathered_experts" and not what else (2,):
                yield case(f"ep {name}", world, layer, what, zipf=zipf, deterministic=deterministic)
    for name in ("group_gemm", "group_dgrad", "group_wgrad"):
        yield case(f"ep {name}", 2, {**layer, "n": 48, "k": 32}, zipf=1.0, deterministic=False)
    for model in ("ring", "pairs"):
        yield Case(f"spec pp send_recv, {model}", 2, partial(_message_spec, model))
    matrices = ((96, 64), (64, 64), (48, 64))
    yield case("muon step", 2, {"num_layers": 1, "num_matrices": 3}, is_exact=False, layer=matrices)


def _message_spec(model, stack, group) -> Prepared:
    from ditron_train.tools.cases import RunEnvironment, Shape
    from ditron_train.tools.cases.pp import MESSAGES

    call = MESSAGES.sample(Shape(model, {"num_bytes": 4992}), RunEnvironment(group, CPU, torch.bfloat16), 0)
    return dict(x=call.data), lambda: MESSAGES.op.fused(call, call.context)(call.data)


# -- sequence parallelism ---------------------------------------------------------------------------------------------


def _projections(is_qkv, sizes, dtype, stack, group) -> Prepared:
    from ditron_train.sp import get_sp_context, output_layout, output_projection, qkv_layout, qkv_projection

    heads, groups, head_dim, length, batch, hidden = sizes
    context, world = get_sp_context(group, CPU), dist.get_world_size()
    if is_qkv:
        layout = qkv_layout(heads, groups, head_dim, world)
        x = integers(length // world, batch, hidden, seed=20, dtype=dtype)
        weight = integers(world * layout.num_columns, hidden, seed=21, dtype=dtype)
        grads = [
            integers(length, batch, layout.num_heads(i), dim, seed=22 + i, dtype=dtype)
            for i, dim in enumerate(layout.head_dims)
        ]
        op: Callable[..., Any] = qkv_projection
    else:
        layout = output_layout(heads, head_dim, world)
        x = integers(length, batch, heads // world, head_dim, seed=26, dtype=dtype)
        weight = integers(hidden, heads * head_dim, seed=27, dtype=dtype)
        grads, op = [integers(length // world, batch, hidden, seed=28, dtype=dtype)], output_projection
    named = dict(x=x, w=weight, **{f"dy{i}": grad for i, grad in enumerate(grads)})
    return named, lambda: gradients(lambda x, w: op(x, w, context=context, layout=layout), [x, weight], grads)


def _exchange_heads(to_heads, sizes, dtype, stack, group) -> Prepared:
    from ditron_train.sp import get_sp_context, heads_exchange, output_layout, sequence_exchange

    heads, head_dim, length, batch = sizes
    context, world = get_sp_context(group, CPU), dist.get_world_size()
    layout = output_layout(heads, head_dim, world)
    split, whole = (length // world, batch, heads, head_dim), (length, batch, heads // world, head_dim)
    x = integers(*(split if to_heads else whole), seed=30, dtype=dtype)
    grad = integers(*(whole if to_heads else split), seed=31, dtype=dtype)
    if to_heads:
        return dict(x=x, dy=grad), lambda: gradients(
            lambda x: heads_exchange([x], context=context, layout=layout), [x], [grad]
        )
    return dict(x=x, dy=grad), lambda: gradients(
        lambda x: sequence_exchange([x], context=context, layout=layout), [x], [grad]
    )


def _gathered_keys(window, stack, group) -> Prepared:
    from ditron_train.schedule.keys import causal_ranges
    from ditron_train.sp.keys_values import FusedMoves, get_key_value_context

    context, world, rank = get_key_value_context(group, CPU), dist.get_world_size(), dist.get_rank()
    ranges = causal_ranges(2 * world, 4, window)
    moves, own = FusedMoves(context, ranges), [ranges[rank], ranges[2 * world - 1 - rank]]
    k, v = (integers(8, 1, 2, 8, seed=32 + rank, dtype=torch.bfloat16) for _ in range(2))
    grads = [integers(end - first, 1, 2, 8, seed=36 + rank, dtype=torch.bfloat16) for first, end in own]

    def run() -> list[torch.Tensor]:
        gathered = moves.gather(k, v)
        gathered.wait(0)
        gathered.wait(1)
        gathered.finish()
        arrived = [whole[first:end].clone() for whole in (gathered.keys, gathered.values) for first, end in own]
        return [*arrived, *moves.scatter(grads, grads, len(k))]

    return dict(k=k, v=v), run


def _sp_cases() -> Iterator[Case]:
    bf16 = torch.bfloat16
    for world, window in ((2, None), (4, 3)):
        yield Case(f"sp gathered keys, window {window}, {world} ranks", world, partial(_gathered_keys, window))
    for world, sizes in ((2, (4, 2, 8, 16, 1, 32)), (2, (6, 2, 5, 12, 3, 33)), (4, (8, 4, 16, 24, 1, 40))):
        words = f"{'x'.join(map(str, sizes))}, {world} ranks"
        yield Case(f"sp qkv projection {words}", world, partial(_projections, True, sizes, bf16))
        yield Case(f"sp output projection {words}", world, partial(_projections, False, sizes, bf16))


# -- expert parallelism -----------------------------------------------------------------------------------------------


def _routing(kind: str, tokens: int, num_experts: int, topk: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(40 + dist.get_rank())
    scores = torch.rand(tokens, num_experts, generator=generator)
    if kind == "one_expert":
        scores[:] = torch.arange(num_experts, dtype=torch.float32)
    routed = torch.zeros(tokens, num_experts, dtype=torch.bool)
    if tokens:
        routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
    return routed & (torch.rand(routed.shape, generator=generator) < 0.6) if kind == "dropped" else routed


def _experts(kind, tokens, sizes, dtype, order, pairs, options, stack, group) -> Prepared:
    """Dispatch, both linear layers and combine, by fused pairs or each by itself, with all gradients."""
    from ditron_train.ep import begin_layout, combine_rows, dispatch_tokens, get_ep_context
    from ditron_train.ep.dispatcher import ExpertCall, dispatch_linear, group_linear, linear_combine
    from ditron_train.ep.gemm_combine import layout_tiles

    num_experts, topk, hidden, columns = sizes
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_ep_context(group, CPU, num_experts, topk)
    routed = _routing(kind, tokens[rank], num_experts, topk)
    probs = eighths(tokens[rank], num_experts, seed=41) * routed
    x, grad = (
        integers(tokens[rank], hidden, seed=42, dtype=dtype),
        integers(tokens[rank], hidden, seed=43, dtype=dtype),
    )
    local = num_experts // world
    firsts = stacked([integers(columns, hidden, seed=50 + e, dtype=dtype) for e in range(local)])
    seconds = stacked([integers(hidden, columns, seed=70 + e, dtype=dtype) for e in range(local)])

    def function(x: torch.Tensor, probs: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ups, downs = weights[:local], weights[local:]
        layout = begin_layout(routed, probs.detach(), hidden, dtype, context, **options).finish()
        if pairs is None:
            rows, row_probs = dispatch_tokens(x, probs, layout, context, order)
            y = group_linear(rows, ups, layout_tiles(layout))
            h = (y.clamp(-4, 4) * row_probs[:, None]).to(dtype)
            return combine_rows(group_linear(h, downs, layout_tiles(layout)), layout, context, order)
        call = ExpertCall(layout, context, order, frozenset(pairs))
        y, row_probs = dispatch_linear(x, probs, ups, call)
        return linear_combine((y.clamp(-4, 4) * row_probs[:, None]).to(dtype), downs, call)

    inputs = [x, probs, *firsts, *seconds]
    named = dict(x=x, probs=probs, dy=grad, routed=routed)
    return {**named, "w": firsts[0], "v": seconds[0]}, lambda: gradients(function, inputs, [grad])


def _dispatch_ahead(tokens, stack, group) -> Prepared:
    """Tokens that are sent before the layout is known, then a combine in two steps."""
    from ditron_train.ep import begin_layout, dispatch, dispatch_ahead, get_ep_context
    from ditron_train.ep.combine import begin_combine

    context, rank = get_ep_context(group, CPU, 4, 2), dist.get_rank()
    routed = _routing("random", tokens[rank], 4, 2)
    probs = eighths(tokens[rank], 4, seed=44) * routed
    x = integers(tokens[rank], 16, seed=45)

    def call() -> Tensors:
        pending = begin_layout(routed, probs, 16, torch.float32, context)
        dispatch_ahead(x, pending)
        layout = pending.finish()
        rows, row_probs = dispatch(x, layout, context)
        return begin_combine(rows, layout, context, order="ascending", row_grads=row_probs).finish()

    return dict(x=x, probs=probs, routed=routed), call


def _ep_cases() -> Iterator[Case]:
    f32, bf16, sizes = torch.float32, torch.bfloat16, (4, 2, 32, 24)
    every = ("gemm_combine",)
    for name, pairs in (("apart", None), ("fused", every), ("beside wgrad", ("overlap_wgrad",))):
        yield Case(f"ep experts {name}", 2, partial(_experts, "random", (14, 9), sizes, bf16, "ascending", pairs, {}))
    for name, pairs in (("apart", None), ("fused", every)):
        one = partial(_experts, "one_expert", (8, 0), (6, 3, 16, 24), f32, "descending", pairs, {})
        yield Case(f"ep experts {name}, one expert", 2, one)
        four = partial(_experts, "dropped", (9, 4, 0, 7), (8, 3, 24, 16), f32, "ascending_rounded", pairs, {})
        yield Case(f"ep experts {name}, dropped, 4 ranks", 4, four)
        fixed = partial(_experts, "random", (12, 12), sizes, bf16, "ascending", pairs, {"capacity_factor": 1.8})
        yield Case(f"ep experts {name}, fixed capacity", 2, fixed)
    yield Case("ep dispatch ahead", 2, partial(_dispatch_ahead, (9, 14)))


# -- pipelines and optimizers ----------------------------------------------------------------------------------------


def _stages(shapes, num_leases, options, stack, group) -> Prepared:
    """Messages to both neighbours and from them. ``num_leases`` is 0 or above the number of calls: which slot is free
    again depends on timing."""
    from ditron_train.pp import PipelineContext, exchange
    from ditron_train.pp.messages import Header

    context = PipelineContext(group, CPU, num_slots=2, num_leases=num_leases)
    context.reserve(4096)
    sent = [integers(*shape, seed=60 + i) for i, shape in enumerate(shapes)]
    headers = [Header(tuple(one.shape), one.dtype) for one in sent]

    def call() -> Tensors:
        handles = exchange(
            context, send_next=sent[0], send_prev=sent[1], recv_prev=headers[0], recv_next=headers[1], **options
        )
        for name in ("recv_prev", "recv_next", "send_next", "send_prev"):
            handles[name].wait()
        return [handles[name].tensor.clone() for name in ("recv_prev", "recv_next")]

    return dict(x0=sent[0], x1=sent[1]), call


def _products(stack, group) -> Prepared:
    """The products of a Newton-Schulz step, on whole numbers."""
    from ditron_train.optim.products import addmm, gram, scaled_square

    x, a = integers(40, 72, seed=61, dtype=torch.bfloat16), integers(40, 40, seed=62)
    a = (a.tril() + a.tril(-1).t()).to(torch.bfloat16)
    b = integers(40, 72, seed=63, dtype=torch.bfloat16)

    def call() -> Tensors:
        return [gram(x), scaled_square(a, 2.0, 1.0), addmm(b, a, x, alpha=1.0, beta=2.0)]

    return dict(x=x, a=a, b=b), call


def _muon(shard, stack, group) -> Prepared:
    from ditron_train.optim import Muon

    params = [torch.nn.Parameter(integers(*shape, seed=64 + i)) for i, shape in enumerate(((16, 24), (8, 40), (5,)))]
    for index, param in enumerate(params):
        param.grad = integers(*param.shape, seed=67 + index)
    optimizer = Muon(params, lr=0.5, shard_group=group if shard else None)

    def call() -> Tensors:
        optimizer.step()
        return [param.detach() for param in params]

    return {f"p{i}": param.detach() for i, param in enumerate(params)}, call


def _other_cases() -> Iterator[Case]:
    yield Case("pp both ways", 2, partial(_stages, ((40, 25), (40, 25)), 4, {}))
    yield Case("pp both ways, 4 stages", 4, partial(_stages, ((40, 25), (40, 25)), 4, {}))
    yield Case("pp copied out", 2, partial(_stages, ((20, 50), (7, 3)), 0, {}))
    yield Case("pp variable shapes", 2, partial(_stages, ((13, 5), (7, 3)), 4, {"variable_shapes": True}))
    yield Case("muon products", 1, _products)
    yield Case("muon alone", 1, partial(_muon, False), is_exact=False)
    yield Case("muon sharded", 2, partial(_muon, True), is_exact=False)


def all_cases() -> list[Case]:
    """Every case."""
    found = [*_tp_cases(), *_simulated_cases(), *_sp_cases(), *_ep_cases(), *_other_cases(), *_spec_cases()]
    assert len({case.name for case in found}) == len(found), "two cases have one name"
    return found


def records(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Their records by ``"<case>, call <n>, rank <r>"``."""
    found = {}
    for world, simulates in sorted({(case.world, case.simulates) for case in cases}):
        names = [case.name for case in cases if (case.world, case.simulates) == (world, simulates)]
        for rank, of_rank in enumerate(_of_ranks(world, names, simulates)):
            found.update({f"{key}, rank {rank}": lines for key, lines in of_rank.items()})
    return found


def _of_ranks(world: int, names: Sequence[str], simulates: bool) -> list[dict[str, list[str]]]:
    """What each rank recorded. Where a GPU is simulated its processes are used for nothing else: launches for it are
    kept there."""
    if not simulates:
        return run_workers(world, records_of, names)
    outcomes = run_workers_once(world, records_of, names)
    assert all(outcome.ok for outcome in outcomes), "\n".join(outcome.traceback for outcome in outcomes)
    return [outcome.value for outcome in outcomes]


def records_of(names: Sequence[str]) -> dict[str, list[str]]:
    """This rank's records of the cases named, by ``"<case>, call <n>"``; runs on every rank (collective)."""
    found = {}
    with tiles_of_a_release():
        for case in all_cases():
            if case.name in names:
                found.update(_records_of_case(case))
    return found


def _records_of_case(case: Case) -> dict[str, list[str]]:
    from ditron_train.policy import gate

    group = dist.new_group(list(range(dist.get_world_size())))
    found = {}
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack, CallRecorder() as recorder:
        if case.simulates:
            from ditron_train.tp import get_tp_context
            from tests.support.simulated_gpu import simulate

            simulate(stack, recorder, get_tp_context(group, CPU))
        named, call = case.prepare(stack, group)
        recorder.name(**named)
        recorder.take()
        for number in range(1, max(case.calls) + 1):
            with recorder.paused():
                dist.barrier(group)  # what the call before it let go of is back
            results = call()
            lines = recorder.take()
            with recorder.paused():
                bits = bits_of(results) if case.is_exact else "not compared"
            if number in case.calls:
                found[f"{case.name}, call {number}"] = [*lines, f"bits {bits}"]
            recorder.take()
            recorder.reuse_memory()
            del results
    gate.forget()
    return found
