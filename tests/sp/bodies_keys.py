"""What the workers of the tests of gathered keys and values run: an attention in plain PyTorch, and the exchanges that
its results are compared with."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

from ditron_train.schedule.keys import chunks_of
from ditron_train.sp import keys_values
from ditron_train.sp.all_gather_attention import GatheredAttention, NativeMoves, all_gather_attention
from ditron_train.sp.keys_values import FusedMoves, KeyValueContext, get_key_value_context
from ditron_train.stream.op_context import context_of


class PlainAttention:
    """Softmax attention in fp32, rounded to the inputs' type; of [b, s, h, d] or [s, b, h, d].

    Gradients that are small become -0, which a sum over steps and ranks has to turn into +0 as native does.
    """

    def __init__(self, seq_dim, masks, delay_s=0.0):
        self.seq_dim, self.masks, self.delay_s = seq_dim, masks, delay_s

    def _whole(self, step, q, k, v):
        if self.seq_dim == 0:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
        out = scores.masked_fill(~self.masks[step], float("-inf")).softmax(-1)
        out = torch.einsum("bhst,bthd->bshd", out, v)
        return out.transpose(0, 1) if self.seq_dim == 0 else out

    def forward(self, step, q, k, v):
        time.sleep(self.delay_s * random.random())
        return self._whole(step, q.float(), k.float(), v.float()).to(q.dtype).contiguous(), (q.sum().view(1), None)

    def backward(self, step, grad, attended):
        q, k, v, out, saved = attended
        assert torch.equal(saved[0], q.sum().view(1)) and saved[1] is None
        assert torch.equal(out, self.forward(step, q, k, v)[0])
        with torch.enable_grad():
            leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
            found = torch.autograd.grad(self._whole(step, *leaves), leaves, grad.float())
        return [torch.where(x.abs() < 0.05, -0.0, x).to(q.dtype) for x in found]


class RingMoves(NativeMoves):
    """The native exchanges, whose sums over ranks are in the order of NCCL's ring, rounded at every hop."""

    def scatter(self, keys, values, num_rows):
        def reduce_scatter(out, whole, group):
            world, rank = dist.get_world_size(group), dist.get_rank(group)
            parts = [torch.empty_like(whole) for _ in range(world)]
            dist.all_gather(parts, whole, group=group)
            total, *others = [parts[(rank + 1 + step) % world].chunk(world)[rank] for step in range(world)]
            for part in others:
                total = total + part
            out.copy_(total)

        native, dist.reduce_scatter_tensor = dist.reduce_scatter_tensor, reduce_scatter
        try:
            return super().scatter(keys, values, num_rows)
        finally:
            dist.reduce_scatter_tensor = native


def attended_ranges(num_chunks, rows, *, causal=True, window=(-1, -1)):
    """The rows that each chunk's queries see under a mask that is aligned with the sequence."""
    left, right = window[0], 0 if causal else window[1]
    total, ranges = num_chunks * rows, []
    for chunk in range(num_chunks):
        first = 0 if left < 0 else max(0, chunk * rows - left)
        ranges.append((first, total if right < 0 else min(total, (chunk + 1) * rows + right)))
    return tuple(ranges)


def masks_of(rank, world, rows, causal, window):
    """Of each step, which keys of its range a query sees [rows, keys]."""
    ranges = attended_ranges(2 * world, rows, causal=causal, window=window)
    masks = []
    for chunk in chunks_of(rank, world):
        first, end = ranges[chunk]
        query = torch.arange(chunk * rows, (chunk + 1) * rows)[:, None]
        key = torch.arange(first, end)[None]
        right = 0 if causal else window[1]
        seen = torch.ones(rows, end - first, dtype=torch.bool)
        if right >= 0:
            seen &= key <= query + right
        if window[0] >= 0:
            seen &= key >= query - window[0]
        masks.append(seen)
    return ranges, masks


def _results(moves, kernels, seq_dim, inputs, grad):
    leaves = [x.detach().requires_grad_() for x in inputs]
    call = GatheredAttention(moves, kernels, seq_dim, None)
    out = all_gather_attention(*leaves, call)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def poison(context):
    """Rows that no rank sends have to stay unread."""
    if context.arena.capacity_bytes("sp.keys_values"):
        for plan in context.prepared.values():
            plan._sizes.buffer.local.fill_(float("nan"))


def assert_same_bits(found, wanted):
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride(), name
        kind = torch.int16 if one.dtype.itemsize == 2 else torch.int32
        assert torch.equal(one.contiguous().view(kind), other.contiguous().view(kind)), name


def values_of(case, heads, generator):
    shape = [case["batch"], 2 * case["rows"], heads, case["head_dim"]]
    shape = shape if case["seq_dim"] else [shape[1], shape[0], *shape[2:]]
    return torch.randn(shape, generator=generator).to(case["dtype"])


def run_cases(cases, delay_s=0.0, first_epoch=0):
    """Bits of both paths; returns how many elements of the native dk and dv are zero."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = context_of(KeyValueContext, None, torch.device("cpu"), first_epoch=first_epoch)
    random.seed(rank)
    num_zeros = 0
    for seed, case in enumerate(cases):
        ranges, masks = masks_of(rank, world, case["rows"], case["causal"], case["window"])
        seq_dim = case["seq_dim"]
        generator = torch.Generator().manual_seed(100 * seed + rank)
        inputs = [values_of(case, case[name], generator) for name in ("heads", "groups", "groups")]
        grad = values_of(case, case["heads"], generator)
        kernels = PlainAttention(seq_dim, masks, delay_s)
        native = _results(RingMoves(context.group, ranges, context.device), kernels, seq_dim, inputs, grad)
        for _ in range(2):
            poison(context)
            time.sleep(delay_s * random.random())
            assert_same_bits(_results(FusedMoves(context, ranges), kernels, seq_dim, inputs, grad), native)
        for one in native[2:]:
            assert not torch.signbit(one[one == 0]).any()
            num_zeros += int((one == 0).sum())
    return num_zeros


def count_sent(rows, window):
    """Bytes that each rank sends to its peers in one gather, and in one exchange of gradients."""
    world = dist.get_world_size()
    context = get_key_value_context(None, torch.device("cpu"))
    sent = []
    native = keys_values.copy_in_sequence

    def counted(copies, stream):
        copies = list(copies)
        sent.append(sum(num_bytes for _, _, num_bytes in copies if num_bytes > 4))
        native(copies, stream)

    keys_values.copy_in_sequence = counted
    try:
        ranges, masks = masks_of(dist.get_rank(), world, rows, True, window)
        x = torch.randn(2 * rows, 1, 1, 8)
        _results(FusedMoves(context, ranges), PlainAttention(0, masks), 0, [x, x, x], x)
    finally:
        keys_values.copy_in_sequence = native
    gathered, own, again, own_again, scattered = sent
    assert own == own_again and gathered == again
    return gathered, scattered
