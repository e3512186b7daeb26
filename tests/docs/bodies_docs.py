"""What the workers of the documents' tests run: the plain code of each op's page, beside the op."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PAGES = Path(__file__).parents[2] / "docs" / "design" / "ops"
CPU = torch.device("cpu")


def plain_code(page: str) -> dict[str, Any]:
    """The names that the Python blocks of a page define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page, "exec"), names)
    return names


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers: sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensor_parallel() -> None:
    """Both ops and both layers."""
    from ditron_train.tp import ag_gemm, column_linear, gemm_ar, gemm_rs, get_tp_context, row_linear

    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    context = get_tp_context(group, CPU)
    x, weight = integers(24, 16, seed=1 + rank), integers(40, 16, seed=11 + rank)
    gathered = plain_code("ag_gemm.md")["plain_ag_gemm"](x, weight, group)
    assert torch.equal(ag_gemm(x, weight, context=context), gathered)
    code = plain_code("gemm_rs.md")
    rows, weight_2 = integers(24 * world, 16, seed=21 + rank), integers(32, 16, seed=31 + rank)
    assert torch.equal(gemm_rs(rows, weight_2, context=context), code["plain_gemm_rs"](rows, weight_2, group))
    summed = plain_code("gemm_ar.md")["plain_gemm_ar"](rows, weight_2, group)
    assert torch.equal(gemm_ar(rows, weight_2, context=context), summed)

    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = column_linear(*leaves, context=context)
    grad = integers(*y.shape, seed=41 + rank)
    y.backward(grad)
    wanted = plain_code("column_linear.md")["plain_column_linear_backward"](x, weight, grad, group)
    assert all(torch.equal(leaf.grad, one) for leaf, one in zip(leaves, wanted))

    leaves = rows.clone().requires_grad_(), weight_2.clone().requires_grad_()
    y = row_linear(*leaves, context=context)
    grad = integers(*y.shape, seed=51 + rank)
    y.backward(grad)
    wanted = plain_code("row_linear.md")["plain_row_linear_backward"](rows, weight_2, grad, group)
    assert all(torch.equal(leaf.grad, one) for leaf, one in zip(leaves, wanted))


def ring_order() -> None:
    """The order of the sums, on values that round."""
    from ditron_train.policy.all_reduce_order import SumMap
    from ditron_train.tp import gemm_ar, gemm_rs, get_tp_context

    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(8 * world, 16, generator=torch.Generator().manual_seed(rank)).bfloat16()
    partials = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(partials, x)
    own = [partial[8 * rank : 8 * rank + 8] for partial in partials]
    wanted = plain_code("gemm_rs.md")["ring_sum"](own, rank)
    weight = torch.eye(16, dtype=torch.bfloat16)  # so that each rank's product is its x
    assert torch.equal(gemm_rs(x, weight, context=get_tp_context(dist.group.WORLD, CPU)), wanted)

    sums = SumMap.ring(x.numel(), world)  # as on the CPU
    flat = [partial.view(-1) for partial in partials]
    wanted = plain_code("gemm_ar.md")["sum_by_map"](flat, sums.ends, sums.order_of_run, sums.orders).view_as(x)
    assert torch.equal(gemm_ar(x, weight, context=get_tp_context(dist.group.WORLD, CPU)), wanted)


def ulysses() -> None:
    """Both projections with one part of two heads a rank."""
    from ditron_train.sp import a2a_gemm, gemm_a2a, get_sp_context, output_layout

    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    context, layout = get_sp_context(group, CPU), output_layout(2 * world, 8, world)
    x, weight = integers(16, 24, seed=1 + rank), integers(world * 16, 24, seed=2)
    (part,) = gemm_a2a(x, weight, context=context, layout=layout)
    assert torch.equal(part.flatten(1), plain_code("gemm_a2a.md")["plain_gemm_a2a"](x, weight, group))
    back = integers(24, world * 16, seed=3)
    y = a2a_gemm((part,), back, context=context, layout=layout)
    assert torch.equal(y, plain_code("a2a_gemm.md")["plain_a2a_gemm"](part.flatten(1), back, group))


def experts() -> None:
    """Dispatch and combine of a random routing."""
    from ditron_train.ep import begin_layout, combine, dispatch, get_ep_context

    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    tokens, hidden, num_experts, topk = 12, 16, 4 * world, 3
    context = get_ep_context(group, CPU, num_experts, topk)
    generator = torch.Generator().manual_seed(rank)
    routed = torch.zeros(tokens, num_experts, dtype=torch.bool)
    routed.scatter_(1, torch.rand(tokens, num_experts, generator=generator).topk(topk, dim=1).indices, True)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    layout = begin_layout(routed, torch.rand(tokens, num_experts) * routed, hidden, x.dtype, context).finish()
    rows, _ = dispatch(x, layout, context)
    assert torch.equal(rows, plain_code("dispatch.md")["plain_dispatch"](x, routed, group))
    plain = plain_code("combine.md")
    scaled = rows * (1 + rank)  # so that the rows of a token differ by the rank of their experts
    for order in ("ascending_rounded", "ascending", "descending"):
        out, _ = combine(scaled, layout, context, order=order)
        by_rank, _ = combine(scaled, layout, context, order=f"by_rank_{order}")
        for token in range(tokens):
            owners = routed[token].nonzero().flatten() // (num_experts // world)
            back = torch.stack([x[token] * (1 + owner) for owner in owners.tolist()])
            assert torch.equal(out[token], plain["plain_sum"](back, order)), order
            of_ranks = [back[owners == owner] for owner in owners.unique()]
            assert torch.equal(by_rank[token], plain["plain_sum_by_rank"](of_ranks, order)), order


def pipeline() -> None:
    """A ring of messages."""
    from ditron_train.pp import exchange, get_pipeline_context
    from ditron_train.pp.messages import Header

    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    message, expected = integers(6, 5, seed=1 + rank), torch.empty(6, 5)
    plain = plain_code("send_recv.md")["plain_exchange"]
    received = plain(message, expected, (rank + 1) % world, (rank - 1) % world)
    context = get_pipeline_context(group, CPU)
    context.reserve(message.nbytes)
    handles = exchange(context, send_next=message, recv_prev=Header(tuple(message.shape), message.dtype))
    for handle in handles.values():
        handle.wait()
    assert torch.equal(handles["recv_prev"].tensor, received)


def gathered_experts() -> None:
    """Both linear layers between the gather and the reduce-scatter."""
    from ditron_train.ep.gather import GatheredLayout
    from ditron_train.megatron.ep.gather import GatheredCall, gather_linear, linear_scatter
    from ditron_train.tp import get_tp_context

    rank, world, tokens = dist.get_rank(), dist.get_world_size(), 6
    context = get_tp_context(dist.group.WORLD, CPU)
    all_tokens = integers(world * tokens, 8, seed=1)
    routed = integers(world * tokens, 2 * world, seed=2) > 0
    weights = [
        [integers(*shape, seed=20 * i + e) for e in range(2 * world)] for i, shape in enumerate(((16, 8), (8, 8)))
    ]
    own, mine = slice(2 * rank, 2 * rank + 2), slice(rank * tokens, (rank + 1) * tokens)
    layout = GatheredLayout(routed[:, own].contiguous(), world)
    y = gather_linear(all_tokens[mine], weights[0][own], GatheredCall(layout, context, "ascending", torch.float32))
    call = GatheredCall(layout, context, "ascending", torch.float32)
    out = linear_scatter(y[:, :8].contiguous(), weights[1][own], call)
    plain = plain_code("gathered_experts.md")["plain_gathered"]
    whole = sum(
        plain(all_tokens, routed[:, 2 * r : 2 * r + 2], *(w[2 * r : 2 * r + 2] for w in weights)) for r in range(world)
    )
    assert torch.equal(out, whole[mine])


def cross_entropy() -> None:
    """Loss and gradient, on values that round."""
    from ditron_train.loss import cross_entropy

    code, rank, world, words = plain_code("cross_entropy.md"), dist.get_rank(), dist.get_world_size(), 100
    logits = torch.randn(7, 2, words, generator=torch.Generator().manual_seed(rank)).bfloat16().requires_grad_()
    shared = torch.Generator().manual_seed(100)
    target, grad = torch.randint(words * world, (7, 2), generator=shared), torch.randn(7, 2, generator=shared)
    first_word = rank * words
    loss = cross_entropy(logits, target, dist.group.WORLD, first_word=first_word)
    loss.backward(grad)
    with torch.no_grad():
        wanted, softmax = code["plain_cross_entropy"](logits, target, dist.group.WORLD, first_word)
    gradient = code["plain_cross_entropy_backward"](softmax, target, grad, first_word, logits.dtype)
    assert torch.equal(loss, wanted) and torch.equal(logits.grad, gradient)


def lookup() -> None:
    """Rows and gradient, on values that round."""
    from ditron_train.embedding import lookup as own

    code, rank, num_words = plain_code("lookup.md"), dist.get_rank(), 20
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(num_words, 16, generator=generator).bfloat16().requires_grad_()
    words = torch.randint(num_words * dist.get_world_size(), (7, 9), generator=generator) - rank * num_words
    grad = torch.randn(7, 9, 16, generator=generator).bfloat16()
    is_elsewhere = ((words < 0) | (words >= num_words)).unsqueeze(-1)
    index = words.masked_fill(is_elsewhere[..., 0], 0)
    rows = own(weight, index, is_elsewhere[..., 0]).masked_fill(is_elsewhere, 0.0)
    rows.backward(grad)
    assert torch.equal(rows, code["plain_lookup"](weight, words))
    assert torch.equal(weight.grad, code["plain_lookup_backward"](grad, words, num_words))
