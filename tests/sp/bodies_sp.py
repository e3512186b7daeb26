"""What the workers of the sequence parallel tests run, and the native sequence of operations that they compare
with."""

from __future__ import annotations

import contextlib
import importlib
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ditron_train.sp import (
    HeadsLayout,
    LateWgrad,
    SPContext,
    get_sp_context,
    heads_exchange,
    output_layout,
    output_projection,
    qkv_layout,
    qkv_projection,
    sequence_exchange,
    transfer,
)
from ditron_train.sp.a2a_gemm import A2AGemmPlan
from tests.support.refused_launches import check_refused_launches


def integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values -2..2: the sums of these tests are exact in fp32 in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class NativeExchange(torch.autograd.Function):
    """all_to_all_single, whose backward is itself."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()  # before empty_like, which keeps strides
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        return NativeExchange.forward(ctx, grad)


def native_to_heads(x: torch.Tensor, world: int) -> torch.Tensor:
    """[s / W, b, h, d] -> [s, b, h / W, d] by one all-to-all and a reorder of the 2 W chunks."""
    s, b, h, d = x.shape
    y = NativeExchange.apply(x.view(s, b, world, h // world, d).movedim(2, 0).contiguous())
    chunks = [chunk for rank in range(world) for chunk in (rank, 2 * world - 1 - rank)]
    order = torch.argsort(torch.tensor(chunks, device=x.device))
    return y.view(2 * world, s // 2, b, h // world, d).index_select(0, order).reshape(world * s, b, h // world, d)


def native_to_sequence(x: torch.Tensor, world: int) -> torch.Tensor:
    """[s, b, h / W, d] -> [s / W, b, h, d]."""
    s, b, h, d = x.shape
    chunks = torch.tensor([chunk for rank in range(world) for chunk in (rank, 2 * world - 1 - rank)], device=x.device)
    y = x.view(2 * world, s // (2 * world), b, h, d).index_select(0, chunks).reshape(world, s // world, b, h, d)
    return NativeExchange.apply(y).movedim(0, 2).reshape(s // world, b, world * h, d)


def native_qkv(x, weight, layout: HeadsLayout, world: int):
    """GEMM, split group by group, three all-to-alls, three reorders."""
    mixed = torch.matmul(x, weight.t())
    groups = world * layout.num_groups
    parts = torch.split(mixed.view(*x.shape[:2], groups, sum(layout.widths)), list(layout.widths), dim=3)
    return tuple(
        native_to_heads(part.reshape(*x.shape[:2], -1, head_dim), world)
        for part, head_dim in zip(parts, layout.head_dims)
    )


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def check_projections(
    rank: int,
    world: int,
    context: SPContext,
    *,
    heads,
    groups,
    head_dim,
    length,
    batch,
    hidden,
    dtype,
    value_dim=None,
    seed=0,
    make=integers,
    device="cpu",
):
    """Forward and all gradients of both projections against the native sequence, with ``torch.equal``."""
    layout = qkv_layout(heads, groups, head_dim, world, value_head_dim=value_dim)
    x = leaf(make(length // world, batch, hidden, dtype=dtype, seed=seed + rank).to(device))
    weight = leaf(make(world * layout.num_columns, hidden, dtype=dtype, seed=seed + 100).to(device))
    x_native, weight_native = leaf(x), leaf(weight)
    fused = qkv_projection(x, weight, context=context, layout=layout)
    native = native_qkv(x_native, weight_native, layout, world)
    grads = [
        make(*part.shape, dtype=dtype, seed=seed + 200 + 10 * rank + i).to(device) for i, part in enumerate(native)
    ]
    for fused_part, native_part in zip(fused, native):
        assert fused_part.is_contiguous() and torch.equal(fused_part, native_part)
    torch.autograd.backward(fused, grads)
    torch.autograd.backward(native, grads)
    assert torch.equal(x.grad, x_native.grad)
    assert torch.equal(weight.grad, weight_native.grad)

    out_dim = head_dim if value_dim is None else value_dim
    out_layout = output_layout(heads, out_dim, world)
    attended = leaf(make(length, batch, heads // world, out_dim, dtype=dtype, seed=seed + 300 + rank).to(device))
    weight = leaf(make(hidden, heads * out_dim, dtype=dtype, seed=seed + 400).to(device))
    attended_native, weight_native = leaf(attended), leaf(weight)
    y = output_projection(attended, weight, context=context, layout=out_layout)
    y_native = torch.matmul(native_to_sequence(attended_native, world).flatten(2), weight_native.t())
    assert torch.equal(y, y_native)
    grad = make(*y.shape, dtype=dtype, seed=seed + 500 + rank).to(device)
    y.backward(grad)
    y_native.backward(grad)
    assert torch.equal(attended.grad, attended_native.grad)
    assert torch.equal(weight.grad, weight_native.grad)


def check_bias(rounds_once: bool) -> None:
    """The QKV projection with a bias: each rank adds that of its own heads, once, and its gradient is that of the
    rank's own rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context, layout = get_sp_context(None, torch.device("cpu")), qkv_layout(4 * world, 2 * world, 8, world)
    columns = world * layout.num_columns
    inputs = [integers(4, 2, 16, dtype=torch.float32, seed=1 + rank)]
    inputs += [integers(*shape, dtype=torch.float32, seed=5 + len(shape)) for shape in ((columns, 16), (columns,))]
    x, weight, bias = (leaf(one) for one in inputs)
    x_native, weight_native, bias_native = (leaf(one) for one in inputs)
    fused = qkv_projection(x, weight, context=context, layout=layout, bias=bias, rounds_once=rounds_once)
    mixed = torch.matmul(x_native, weight_native.t()) + bias_native
    parts = torch.split(mixed.view(4, 2, world * layout.num_groups, -1), list(layout.widths), dim=3)
    native = tuple(
        native_to_heads(part.reshape(4, 2, -1, head_dim), world) for part, head_dim in zip(parts, layout.head_dims)
    )
    for fused_part, native_part in zip(fused, native, strict=True):
        assert torch.equal(fused_part, native_part)
    grads = [integers(*part.shape, dtype=torch.float32, seed=20 + 10 * rank + i) for i, part in enumerate(native)]
    torch.autograd.backward(fused, grads)
    torch.autograd.backward(native, grads)
    for found, expected in ((x, x_native), (weight, weight_native), (bias, bias_native)):
        assert torch.equal(found.grad, expected.grad)


def call_projections(context: SPContext, *, heads, groups, head_dim, length, batch, hidden, dtype) -> None:
    """The ops of ``check_projections``, with zeros."""
    from ditron_train.sp import a2a_gemm, gemm_a2a

    world, options = context.world_size, dict(dtype=dtype, device=context.device)
    x = torch.zeros(length // world, batch, hidden, **options)
    for layout in (qkv_layout(heads, groups, head_dim, world), output_layout(heads, head_dim, world)):
        parts = [
            torch.zeros(length, batch, layout.num_heads(i), dim, **options) for i, dim in enumerate(layout.head_dims)
        ]
        weight, first, last = torch.zeros(world * layout.num_columns, hidden, **options), "nt", "nn"
        if len(parts) == 1:
            weight, first, last = weight.t().contiguous(), "nn", "nt"
        gemm_a2a(x, weight, context=context, layout=layout, weight_layout=first)
        a2a_gemm(parts, weight, context=context, layout=layout, weight_layout=last)


def call_exchanges(context: SPContext, *, heads, groups, head_dim, length, batch, dtype) -> None:
    """The ops of ``check_exchanges``, with zeros."""
    from ditron_train.sp import to_heads, to_sequence

    world, options = context.world_size, dict(dtype=dtype, device=context.device)
    for layout in (qkv_layout(heads, groups, head_dim, world), output_layout(heads, head_dim, world)):
        sizes = [(layout.num_heads(i), dim) for i, dim in enumerate(layout.head_dims)]
        to_heads(
            [torch.zeros(length // world, batch, n * world, dim, **options) for n, dim in sizes],
            context=context,
            layout=layout,
        )
        to_sequence(
            [torch.zeros(length, batch, n, dim, **options) for n, dim in sizes], context=context, layout=layout
        )


def copies_for_backward(late: bool) -> list[bool]:
    """Whether the output projection copies what it has multiplied: in training, in evaluation, and in both passes of
    a recomputed call; results and gradients are those of the first call."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context, layout = get_sp_context(None, torch.device("cpu")), output_layout(2 * world, 8, world)
    weight = leaf(integers(16, 16 * world, dtype=torch.float32, seed=1))
    attended = leaf(integers(4 * world, 1, 2, 8, dtype=torch.float32, seed=2 + rank))
    call, copies, results = A2AGemmPlan.run, [], []

    def counted(prepared, parts, weight, keep, table):
        copies.append(keep)
        return call(prepared, parts, weight, keep, table)

    def project(attended: torch.Tensor) -> torch.Tensor:
        given = LateWgrad(weight) if late else None
        return output_projection(attended, weight, context=context, layout=layout, late=given)

    with mock.patch.object(A2AGemmPlan, "run", counted):
        for run in (project, lambda x: checkpoint(project, x, use_reentrant=True)):
            y = run(attended)
            y.sum().backward()
            results.append((y.detach(), attended.grad, weight.grad))
            attended.grad = weight.grad = None
            with torch.no_grad():
                assert torch.equal(project(attended), y)
    for first, second in zip(*results):
        assert first is None and second is None or torch.equal(first, second)
    return copies


def check_late_gradient(rank: int, world: int, context: SPContext, case: dict) -> None:
    """Both projections in one graph, the output projection's weight gradient left to the other one's backward."""
    heads, length, batch, dtype = (case[name] for name in ("heads", "length", "batch", "dtype"))
    layout = qkv_layout(heads, case["groups"], case["head_dim"], world)
    out_layout = output_layout(heads, case["head_dim"], world)
    inputs = [
        integers(length // world, batch, case["hidden"], dtype=dtype, seed=1 + rank),
        integers(world * layout.num_columns, case["hidden"], dtype=dtype, seed=2),
        integers(case["hidden"], heads * case["head_dim"], dtype=dtype, seed=3),
    ]
    grad = integers(length // world, batch, case["hidden"], dtype=dtype, seed=4 + rank)

    def results(is_late: bool, trained: tuple[bool, bool, bool]) -> list[torch.Tensor | None]:
        leaves = [leaf(one).requires_grad_(one_trained) for one, one_trained in zip(inputs, trained)]
        late = LateWgrad(leaves[2]) if is_late else None
        query, key, value = qkv_projection(*leaves[:2], context=context, layout=layout, late=late)
        attended = query + (key + value).sum(dim=2, keepdim=True)
        y = output_projection(attended, leaves[2], context=context, layout=out_layout, late=late)
        y.backward(grad)
        return [y.detach(), *(leave.grad for leave in leaves)]

    for trained in ((True, True, True), (False, True, True), (True, False, True), (True, True, False)):
        for fused, native, expected in zip(results(True, trained), results(False, trained), (True, *trained)):
            assert (fused is not None) == (native is not None) == expected
            assert not expected or torch.equal(fused, native)


def check_exchanges(
    rank: int, world: int, context: SPContext, *, heads, groups, head_dim, length, batch, dtype, seed, device="cpu"
):
    """Both exchanges on real-valued data, bit for bit, and their gradients."""
    layout = qkv_layout(heads, groups, head_dim, world)
    generator = torch.Generator().manual_seed(seed + rank)
    shapes = [(length // world, batch, count, head_dim) for count in (heads, groups, groups)]
    parts = [leaf(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes]
    native_parts = [leaf(part) for part in parts]
    fused = heads_exchange(parts, context=context, layout=layout)
    native = [native_to_heads(part, world) for part in native_parts]
    for fused_part, native_part in zip(fused, native):
        assert torch.equal(fused_part, native_part)
    grads = [torch.randn(part.shape, generator=generator).to(dtype).to(device) for part in native]
    torch.autograd.backward(fused, grads)
    torch.autograd.backward(native, grads)
    for part, native_part in zip(parts, native_parts):
        assert torch.equal(part.grad, native_part.grad)

    out_layout = output_layout(heads, head_dim, world)
    attended = leaf(torch.randn(length, batch, heads // world, head_dim, generator=generator).to(dtype).to(device))
    attended_native = leaf(attended)
    (y,) = sequence_exchange((attended,), context=context, layout=out_layout)
    y_native = native_to_sequence(attended_native, world)
    assert torch.equal(y, y_native)
    grad = torch.randn(y.shape, generator=generator).to(dtype).to(device)
    y.backward(grad)
    y_native.backward(grad)
    assert torch.equal(attended.grad, attended_native.grad)


def run_projections(cases: list[dict], first_epoch: int = 0) -> None:
    """One context, one case after another: buffers and flags grow and shrink."""
    world, rank = dist.get_world_size(), dist.get_rank()
    context = SPContext(None, torch.device("cpu"), first_epoch=first_epoch)
    for index, case in enumerate(cases):
        check_projections(rank, world, context, seed=1000 * index, **case)
    if cases[0]["dtype"] == torch.float32:  # sums of 16-bit results would not be exact
        check_late_gradient(rank, world, context, cases[0])
    context.arena.close()


def check_late_rank(late_s: float) -> None:
    """Projections and exchanges to which one rank sends late, after start signals that arrived in time."""
    world, rank = dist.get_world_size(), dist.get_rank()
    context = get_sp_context(None, torch.device("cpu"))
    case = dict(heads=4, groups=2, head_dim=8, length=4 * world, batch=1, dtype=torch.float32)

    def delayed(function):
        def call(*arguments):
            time.sleep(late_s)
            return function(*arguments)

        return call

    # By name: the package has functions of the modules' names.
    by_kernel = [importlib.import_module(f"ditron_train.sp.{name}") for name in ("a2a_gemm", "gemm_a2a")]
    stores = [(transfer, "push_item"), (by_kernel[0], "push_item"), *((one, "store_tile") for one in by_kernel)]
    for late_rank in range(world):
        with contextlib.ExitStack() as stack:
            for module, name in stores if rank == late_rank else ():
                stack.enter_context(mock.patch.object(module, name, delayed(getattr(module, name))))
            check_projections(rank, world, context, hidden=16, seed=1000 * late_rank, **case)
            check_exchanges(rank, world, context, seed=1000 * late_rank, **case)


def run_exchanges(cases: list[dict]) -> None:
    """As ``run_projections``."""
    world, rank = dist.get_world_size(), dist.get_rank()
    context = SPContext(None, torch.device("cpu"))
    for index, case in enumerate(cases):
        check_exchanges(rank, world, context, seed=1000 * index, **case)
    context.arena.close()


def _small(context: SPContext, **changes):
    """Arguments of a good call of ``gemm_a2a``, some of them changed."""
    world = context.world_size
    layout = qkv_layout(2 * world, world, 8, world)
    good = dict(
        x=torch.zeros(8, 1, 16), weight=torch.zeros(world * layout.num_columns, 16), layout=layout, weight_layout="nt"
    )
    return {**good, **changes}


def bad_input(name: str) -> str:
    """The error of a call that this rank alone can see is wrong; nothing is signalled, so a good call follows."""
    from ditron_train.sp import a2a_gemm, gemm_a2a, to_heads, to_sequence

    world = dist.get_world_size()
    context = SPContext(None, torch.device("cpu"))
    layout = qkv_layout(2 * world, world, 8, world)
    out = output_layout(2 * world, 8, world)
    attended = torch.zeros(4 * world, 1, 2, 8)
    table = torch.arange(8 * world, dtype=torch.int32).view(world, 8)
    calls = {
        "odd": lambda: gemm_a2a(context=context, **_small(context, x=torch.zeros(7, 1, 16))),
        "empty": lambda: gemm_a2a(context=context, **_small(context, x=torch.zeros(0, 1, 16))),
        "columns": lambda: gemm_a2a(context=context, **_small(context, weight=torch.zeros(24, 16))),
        "k": lambda: gemm_a2a(context=context, **_small(context, x=torch.zeros(8, 1, 15))),
        "dtype": lambda: gemm_a2a(context=context, **_small(context, x=torch.zeros(8, 1, 16).half())),
        "layout": lambda: gemm_a2a(context=context, **_small(context, weight_layout="tt")),
        "table": lambda: gemm_a2a(context=context, **_small(context, row_table=torch.zeros(2, 8))),
        "later table": lambda: [
            gemm_a2a(context=context, **_small(context, row_table=rows)) for rows in (table, table.long())
        ],
        "dimensions": lambda: gemm_a2a(context=context, **_small(context, x=torch.zeros(16))),
        "parts": lambda: a2a_gemm((attended, attended), torch.zeros(16, 16 * world), context=context, layout=out),
        "heads": lambda: a2a_gemm((attended[:, :, :1],), torch.zeros(16, 16 * world), context=context, layout=out),
        "sequence": lambda: to_sequence((attended[:-2],), context=context, layout=out),
        "double": lambda: to_sequence((attended.double(),), context=context, layout=out),
        "unlike": lambda: to_heads(
            (torch.zeros(4, 1, 2 * world, 8), torch.zeros(4, 1, world, 8), torch.zeros(6, 1, world, 8)),
            context=context,
            layout=layout,
        ),
    }
    try:
        calls[name]()
    except ValueError as error:
        check_projections(
            dist.get_rank(),
            world,
            context,
            heads=2 * world,
            groups=world,
            head_dim=8,
            length=4 * world,
            batch=1,
            hidden=16,
            dtype=torch.float32,
        )
        context.arena.close()
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{name} was accepted")


def different_calls(known: bool) -> str:
    """Rank 1 calls with another length: at a new shape, or at shapes that everybody has agreed on before."""
    from ditron_train.sp import gemm_a2a

    context = SPContext(None, torch.device("cpu"))
    lengths = (8, 16)
    if known:
        for length in lengths:
            gemm_a2a(context=context, **_small(context, x=torch.zeros(length, 1, 16)))
    try:
        gemm_a2a(context=context, **_small(context, x=torch.zeros(lengths[dist.get_rank() % 2], 1, 16)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("different calls were accepted")


def interrupted(op: str) -> None:
    """What is to run beside a transfer fails: that error, and the next calls are good."""
    from ditron_train.sp import gather_sequence, gemm_a2a

    class Interruption(Exception):
        pass

    def fail() -> None:
        raise Interruption

    context = SPContext(None, torch.device("cpu"))
    world, rank = context.world_size, context.rank
    attended = torch.zeros(4 * world, 1, 2, 8)
    try:
        if op == "gemm_a2a":
            gemm_a2a(context=context, meanwhile=fail, **_small(context))
        else:
            gather_sequence((attended,), context=context, layout=output_layout(2 * world, 8, world), meanwhile=fail)
    except Interruption:
        for channel in (context.heads_channel, context.sequence_channel):
            assert channel.tickets[0] == channel.tickets[1], (
                "a kernel that waits would look for the flags of the call before"
            )
        sizes = dict(
            heads=2 * world, groups=world, head_dim=8, length=4 * world, batch=1, hidden=16, dtype=torch.float32
        )
        check_late_gradient(rank, world, context, sizes)
        context.arena.close()
        return
    raise AssertionError("nothing was raised")


def refused(op: str) -> int:
    """Any launch of an op is refused on all ranks; returns how many it has."""
    from ditron_train.sp import gather_sequence, gemm_a2a, to_heads, to_sequence

    context = SPContext(None, torch.device("cpu"))
    world, rank = context.world_size, context.rank
    layout = output_layout(2 * world, 8, world)
    rows = integers(4, 1, 2 * world, 8, dtype=torch.float32, seed=rank)
    heads = integers(4 * world, 1, 2, 8, dtype=torch.float32, seed=rank)
    product = dict(x=rows.flatten(2), weight=integers(2 * world * 8, 2 * world * 8, dtype=torch.float32, seed=9))

    def call(repeat: int) -> list[torch.Tensor]:
        given = dict(context=context, layout=layout)
        if op == "to_heads":
            return list(to_heads([rows.clone()], **given))
        if op == "to_sequence":
            return list(to_sequence([heads.clone()], **given))
        if op == "gather_sequence":
            return [gather_sequence([heads.clone()], meanwhile=lambda: None, **given).clone()]
        return list(gemm_a2a(**product, weight_layout="nt", **given))

    try:
        return check_refused_launches(context, call)
    finally:
        context.arena.close()


def absent_peer(op: str) -> str:
    """Rank 1 does not come; the others give up by the deadline and name it."""
    from ditron_train.sp import a2a_gemm, gather_sequence, gemm_a2a

    context = SPContext(None, torch.device("cpu"))
    world = context.world_size
    out = output_layout(2 * world, 8, world)
    weight = torch.zeros(16, 16 * world)

    def call() -> None:
        parts = (torch.zeros(4 * world, 1, 2, 8),)
        if op == "gemm_a2a":
            gemm_a2a(context=context, **_small(context))
        elif op == "gather_sequence":
            gather_sequence(parts, context=context, layout=out, meanwhile=lambda: None)
        else:
            a2a_gemm(parts, weight, context=context, layout=out)

    call()
    if dist.get_rank() == 1:
        return "absent"
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("an absent peer was not noticed")


def packed(lengths: list[int], heads: int, groups: int, head_dim: int, hidden: int) -> None:
    """Packed sequences: each is cut for itself. The reference takes rows apart by the host's table."""
    from ditron_train.sp import packed_rows
    from ditron_train.sp.layouts import global_rows

    world, rank = dist.get_world_size(), dist.get_rank()
    context = SPContext(None, torch.device("cpu"))
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    total = starts[-1] + 2 * world  # rows behind the last sequence
    bounds = [*starts, total]
    host = [
        torch.cat([a + torch.from_numpy(global_rows(r, world, (b - a) // world)) for a, b in zip(bounds, bounds[1:])])
        for r in range(world)
    ]
    table = packed_rows(torch.tensor(starts, dtype=torch.int32), world, total // world)
    assert torch.equal(table.long(), torch.stack(host))

    layout, out = qkv_layout(heads, groups, head_dim, world), output_layout(heads, head_dim, world)
    whole = integers(total, 1, hidden, dtype=torch.float32, seed=1)
    weight = integers(world * layout.num_columns, hidden, dtype=torch.float32, seed=2)
    x = leaf(whole[host[rank]])
    mixed = (whole @ weight.t()).view(total, 1, world * layout.num_groups, -1)
    split = torch.split(mixed, list(layout.widths), dim=3)
    own = slice(rank * layout.num_groups, (rank + 1) * layout.num_groups)
    weight = leaf(weight)
    parts = qkv_projection(x, weight, context=context, layout=layout, row_table=table)
    for part, expected, dim in zip(parts, split, layout.head_dims):
        assert torch.equal(part, expected[:, :, own].reshape(total, 1, -1, dim))
    heads_of_rank = heads // world
    attended = integers(total, 1, heads, head_dim, dtype=torch.float32, seed=3)
    weight_out = integers(hidden, heads * head_dim, dtype=torch.float32, seed=4)
    mine = attended[:, :, rank * heads_of_rank : (rank + 1) * heads_of_rank]
    y = output_projection(mine, weight_out, context=context, layout=out, row_table=table)
    assert torch.equal(y, (attended.flatten(2) @ weight_out.t())[host[rank]])

    grads = [integers(*part.shape, dtype=torch.float32, seed=5 + rank) for part in parts]
    torch.autograd.backward(parts, grads)
    exchanged = [
        leaf(torch.zeros(total // world, world * layout.num_heads(i), dim)) for i, dim in enumerate(layout.head_dims)
    ]
    results = heads_exchange(exchanged, context=context, layout=layout, row_table=table)
    torch.autograd.backward(results, [grad.squeeze(1) for grad in grads])
    grouped = [part.grad.view(total // world, world * layout.num_groups, -1) for part in exchanged]
    grad_mixed = torch.cat(grouped, dim=2).flatten(1)
    assert torch.equal(x.grad.squeeze(1), grad_mixed @ weight.detach())
    assert torch.equal(weight.grad, grad_mixed.t() @ x.detach().squeeze(1))
    context.arena.close()


def gathered_packed(lengths: list[int], heads: int, dtype: torch.dtype, first_epoch: int = 0) -> int:
    """Rows of packed sequences to all ranks, and sums back, in buffers that hold NaN before; returns how many sums are
    zero. Some partial sums are -0, and each addition rounds."""
    from ditron_train.sp import packed_rows, sum_to_sequence, to_all

    world, rank, head_dim = dist.get_world_size(), dist.get_rank(), 8
    context = SPContext(None, torch.device("cpu"), first_epoch=first_epoch)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total, num_zeros = int(starts[-1]), 0
    table = packed_rows(starts, world, total // world)
    layout = HeadsLayout(1, (heads * head_dim,) * 2, (head_dim,) * 2)
    options = dict(context=context, layout=layout, row_table=table)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        whole = [torch.randn(total, heads, head_dim, generator=generator).to(dtype) for _ in range(2)]
        partial = [torch.randn(world, total, heads, head_dim, generator=generator).to(dtype) for _ in range(2)]
        partial = [torch.where(one.abs() < 0.3, -0.0, one) for one in partial]
        for plan in context.prepared.values():
            plan.buffer.local.fill_(float("nan"))
        dist.barrier()
        for one, wanted in zip(to_all([one[table[rank].long()] for one in whole], **options), whole, strict=True):
            assert torch.equal(one, wanted) and one.is_contiguous()
        sums = sum_to_sequence([one[rank] for one in partial], **options)
        for one, parts in zip(sums, partial, strict=True):
            wanted = parts[(rank + 1) % world]
            for step in range(2, world + 1):
                wanted = wanted + parts[(rank + step) % world]
            kind = torch.int16 if dtype.itemsize == 2 else torch.int32
            assert torch.equal(one.view(kind), wanted[table[rank].long()].view(kind)) and one.is_contiguous()
            num_zeros += int((one == 0).sum())
    context.arena.close()
    return num_zeros


def empty_on_one_rank() -> list[str]:
    """What each rank hears where the last one has an empty sequence, on the way to heads and back."""
    from ditron_train.sp import gemm_a2a, to_sequence

    world, words = dist.get_world_size(), []
    is_last = dist.get_rank() == world - 1
    out, attended = output_layout(2 * world, 8, world), torch.zeros(4 * world, 1, 2, 8)
    calls = (
        lambda context: gemm_a2a(context=context, **_small(context, x=torch.zeros(0 if is_last else 8, 1, 16))),
        lambda context: to_sequence((attended[:0] if is_last else attended,), context=context, layout=out),
    )
    for call in calls:
        context = SPContext(dist.new_group(list(range(world))), torch.device("cpu"))
        try:
            call(context)
        except Exception as error:
            words.append(f"{type(error).__name__}: {error}")
    return words
