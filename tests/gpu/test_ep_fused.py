"""Fused kernels of expert parallelism on GPUs under torchrun: equal bits to dispatch, grouped GEMM and combine in
turn."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")

from ditron_train.ep import begin_layout, combine, dispatch, get_ep_context  # noqa: E402
from ditron_train.ep.combine import begin_combine  # noqa: E402
from ditron_train.ep.context import compiling  # noqa: E402
from ditron_train.ep.gemm_combine import gemm_combine, layout_tiles  # noqa: E402
from ditron_train.ep.grouped_gemm import group_gemm  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def world(device):
    yield device
    torch.cuda.synchronize()
    dist.barrier()


def normals(*shape, dtype, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def routing(tokens, experts, topk, seed, popular=0.0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.rand(tokens, experts, device="cuda", generator=generator)
    scores += popular * (torch.arange(experts, device="cuda") % 5 == 1)
    routed = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
    if tokens:
        routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
    return routed, scores * routed


def one_form(x, layout, context, weights, back, order, form):
    """Forward and backward products and movements: "apart" one after the other, "combine" with the grouped GEMM
    and combine in one kernel."""
    zero, tiles = order == "descending", layout_tiles(layout)
    rows, row_probs = dispatch(x, layout, context, zero_probs=zero)
    y = group_gemm(rows, weights, tiles)
    if form == "apart":
        out, _ = combine(group_gemm(y, back, tiles), layout, context, order=order)
    else:
        out = gemm_combine(y, layout, context, back, order=order)
    again, _ = dispatch(out, layout, context)
    dy = group_gemm(again, back, tiles, transpose=False)
    options = dict(order=order, row_grads=row_probs)
    drows = group_gemm(dy, weights, tiles, transpose=False)
    if form == "apart":
        dx, grads = combine(drows, layout, context, **options)
    else:
        dx, grads = begin_combine(drows, layout, context, **options).finish()
    return [rows, row_probs, y, again, dy], [out, dx, grads]


CASES = [
    # experts of a rank, topk, hidden, ffn, tokens by rank, dtype, order, capacity, popularity of some experts
    (8, 4, 1024, 512, (3000, 2000, 17, 0, 900, 1, 2500, 64), torch.bfloat16, "ascending_rounded", None, 0.0),
    (16, 8, 2048, 768, (4096,) * 8, torch.bfloat16, "descending", 4.0, 0.3),
    (3, 2, 520, 264, (1000, 1, 500, 777, 0, 1200, 300, 5), torch.float16, "ascending", None, 5.0),
    (32, 8, 7168, 2048, (4096,) * 8, torch.bfloat16, "descending", None, 0.2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:4])))
def test_fused_forms_equal_their_parts(case):
    local, topk, hidden, ffn, tokens, dtype, order, capacity, popular = case
    rank, experts = dist.get_rank(), local * dist.get_world_size()
    context = get_ep_context(dist.group.WORLD, torch.device("cuda"), experts, topk)
    weights = [normals(ffn, hidden, dtype=dtype, seed=1000 * rank + i) * 0.02 for i in range(local)]
    back = [normals(hidden, ffn, dtype=dtype, seed=1000 * rank + 500 + i) * 0.02 for i in range(local)]
    for step in range(3):
        x = normals(tokens[rank], hidden, dtype=dtype, seed=step)
        routed, probs = routing(tokens[rank], experts, topk, 10 * step + rank, popular)
        if step == rank:
            torch.cuda._sleep(20_000_000)

        def run(form, step=step, x=x, routed=routed, probs=probs):
            layout = begin_layout(routed, probs, hidden, dtype, context, capacity_factor=capacity).finish()
            if step == 0 and form == "apart":  # every rank compiles a part of the kernels, several at a time
                with compiling(context):
                    one_form(x, layout, context, weights, back, order, ("apart", "combine")[rank % 2])
                dist.barrier()
                layout = begin_layout(routed, probs, hidden, dtype, context, capacity_factor=capacity).finish()
            of_rows, of_tokens = one_form(x, layout, context, weights, back, order, form)
            context.buffers.rows(1, 1, hidden, dtype).local.fill_(float("nan"))
            used = int(layout.expert_tokens.sum())
            return [part[:used] for part in of_rows] + of_tokens

        parts = run("apart")
        names = ("rows", "row_probs", "y", "grad rows", "dy", "out", "dx", "grads")
        wrong = [name for name, a, b in zip(names, parts, run("combine")) if not torch.equal(a, b)]
        assert not wrong, (step, wrong)
    context.check()


def test_replays_in_a_graph_with_other_tokens():
    """With a capacity nothing depends on the host: dispatch, GEMMs and combine replay with the tokens of that
    moment."""
    rank, experts, topk, hidden, ffn, tokens = dist.get_rank(), 4 * dist.get_world_size(), 2, 512, 256, 512
    context = get_ep_context(dist.group.WORLD, torch.device("cuda"), experts, topk)
    weights = [normals(ffn, hidden, dtype=torch.bfloat16, seed=i) for i in range(4)]
    back = [normals(hidden, ffn, dtype=torch.bfloat16, seed=10 + i) for i in range(4)]
    x = normals(tokens, hidden, dtype=torch.bfloat16, seed=rank)
    routed, probs = routing(tokens, experts, topk, rank)

    def forward():
        layout = begin_layout(routed, probs, hidden, x.dtype, context, capacity_factor=3.0).finish()
        rows, _ = dispatch(x, layout, context)
        y = group_gemm(rows, weights, layout_tiles(layout))
        return gemm_combine(y, layout, context, back, order="ascending")

    forward()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = forward()
    for step in range(3):
        x.copy_(normals(tokens, hidden, dtype=torch.bfloat16, seed=100 * step + rank))
        fresh = routing(tokens, experts, topk, 100 * step + rank)
        routed.copy_(fresh[0])
        probs.copy_(fresh[1])
        graph.replay()
        assert torch.equal(out, forward()), step
    context.check()


@pytest.mark.parametrize("kind", ["uneven", "one busy expert"])
def test_experts_of_min_rows_by_transformer_engine(kind):
    """Experts of fewer than 257 rows are Transformer Engine's, the others fused, in the same kernel: out is
    that of Transformer Engine's products of all experts, and it multiplies some experts as it does among all."""
    pytest.importorskip("transformer_engine")
    from ditron_train.ep.plan import pairs_of_step
    from ditron_train.megatron.ep.experts import TEGemm

    rank, world = dist.get_rank(), dist.get_world_size()
    local, topk, hidden, ffn, tokens, needed = 16, 2, 7168, 2048, 4096, 257
    context = get_ep_context(dist.group.WORLD, torch.device("cuda"), local * world, topk)
    weights, back = (
        [normals(*shape, dtype=torch.bfloat16, seed=1000 * rank + first + i) * 0.02 for i in range(local)]
        for first, shape in ((0, (ffn, hidden)), (500, (hidden, ffn)))
    )
    for step in range(3):
        generator = torch.Generator(device="cuda").manual_seed(10 * step + rank)
        likely = torch.logspace(0, -2.5, local * world, device="cuda")
        if kind == "one busy expert":
            likely = torch.full_like(likely, 0.002)
            likely[1] = 1.0
        routed = torch.zeros(tokens, local * world, dtype=torch.bool, device="cuda")
        routed.scatter_(1, torch.multinomial(likely.expand(tokens, -1), topk, generator=generator), True)
        probs = routed * torch.rand(routed.shape, device="cuda", generator=generator)
        x = normals(tokens, hidden, dtype=torch.bfloat16, seed=step)
        layout = begin_layout(routed, probs, hidden, x.dtype, context).finish()
        few = layout.experts_below(needed)
        pairs, min_rows = pairs_of_step(frozenset(["gemm_combine"]), layout.expert_rows, {"gemm_combine": needed})
        total = torch.tensor([len(few)], device="cuda")
        dist.all_reduce(total)
        assert 0 < int(total) < local * world, "some experts, not all"
        assert not pairs or min_rows == {"gemm_combine": needed}
        rows, _ = dispatch(x, layout, context)
        gemm = TEGemm(layout.tokens_per_expert.tolist())
        y = gemm(rows, weights, True)
        z, dx = gemm(y, back, True), gemm(y, weights, False)
        for product, args in ((z, (y, back, True)), (dx, (y, weights, False))):
            again = product.clone()
            for expert, part in enumerate(again.split(gemm._splits)):
                part.fill_(float("nan")) if expert in few else None
            gemm.some(*args, again, few)
            assert torch.equal(again, product), (kind, step)
        expected, _ = combine(z, layout, context, order="descending")
        seen = gemm_combine(y, layout, context, back, order="descending", min_rows=needed, few=gemm.some)
        assert torch.equal(expected, seen), (kind, step, len(few))
    context.check()
