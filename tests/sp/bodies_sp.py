"""What the workers of the sequence parallel tests run, and the native sequence of operations that they compare with."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.sp import (
    HeadsLayout,
    SPContext,
    heads_exchange,
    output_layout,
    output_projection,
    qkv_layout,
    qkv_projection,
    sequence_exchange,
)


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
        native_to_heads(part.reshape(*x.shape[:2], -1, head_dim), world) for part, head_dim in zip(parts, layout.head_dims)
    )


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def check_projections(
    rank: int, world: int, context: SPContext, *, heads, groups, head_dim, length, batch, hidden, dtype, value_dim=None, seed=0,
    make=integers, device="cpu",
):  # fmt: skip
    """Forward and all gradients of both projections against the native sequence, with ``torch.equal``."""
    layout = qkv_layout(heads, groups, head_dim, world, value_head_dim=value_dim)
    x = leaf(make(length // world, batch, hidden, dtype=dtype, seed=seed + rank).to(device))
    weight = leaf(make(world * layout.num_columns, hidden, dtype=dtype, seed=seed + 100).to(device))
    x_native, weight_native = leaf(x), leaf(weight)
    ours = qkv_projection(x, weight, context=context, layout=layout)
    native = native_qkv(x_native, weight_native, layout, world)
    grads = [make(*part.shape, dtype=dtype, seed=seed + 200 + 10 * rank + i).to(device) for i, part in enumerate(native)]
    for ours_part, native_part in zip(ours, native):
        assert ours_part.is_contiguous() and torch.equal(ours_part, native_part)
    torch.autograd.backward(ours, grads)
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


def check_exchanges(rank: int, world: int, context: SPContext, *, heads, groups, head_dim, length, batch, dtype, seed, device="cpu"):
    """Both exchanges on real-valued data, bit for bit, and their gradients."""
    layout = qkv_layout(heads, groups, head_dim, world)
    generator = torch.Generator().manual_seed(seed + rank)
    shapes = [(length // world, batch, count, head_dim) for count in (heads, groups, groups)]
    parts = [leaf(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes]
    native_parts = [leaf(part) for part in parts]
    ours = heads_exchange(parts, context=context, layout=layout)
    native = [native_to_heads(part, world) for part in native_parts]
    for ours_part, native_part in zip(ours, native):
        assert torch.equal(ours_part, native_part)
    grads = [torch.randn(part.shape, generator=generator).to(dtype).to(device) for part in native]
    torch.autograd.backward(ours, grads)
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
    context.arena.close()


def run_exchanges(cases: list[dict]) -> None:
    """As ``run_projections``."""
    world, rank = dist.get_world_size(), dist.get_rank()
    context = SPContext(None, torch.device("cpu"))
    for index, case in enumerate(cases):
        check_exchanges(rank, world, context, seed=1000 * index, **case)
    context.arena.close()
