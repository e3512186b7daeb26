"""TP ops against NCCL and cuBLAS, ``torch.equal``: published shapes, random ones, stragglers, poison, graphs, bad
calls, groups.

Random shapes equal cuBLAS and NCCL, or, where cuBLAS sums in another order (few tiles, long K), one GEMM of this
package and NCCL, which still proves the movement and the order of the reduction. Where ranks share GPUs the order of
sums is the recorded one, not that of an NCCL run there (``shared_gpus``).
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ditron_train.data import load_workloads
from ditron_train.gemm import matmul_nn, matmul_nt
from ditron_train.runtime.errors import ArenaError, MismatchError, NotSupportedError, PeerTimeoutError
from ditron_train.runtime.groups import forget_destroyed_groups
from ditron_train.stream import driver
from ditron_train.stream import recorded_graph as recorded
from ditron_train.tp import (
    GatherPlan,
    TPContext,
    ag_gemm,
    choices,
    column_linear,
    gemm_rs,
    get_tp_context,
    row_linear,
    start_all_gather,
    start_reduce_scatter,
)
from ditron_train.tp import context as tp_context
from ditron_train.tp.ag_gemm import AgGemmPlan, LibraryAgGemmPlan
from ditron_train.tp.gemm_rs import GemmRsCopyPlan
from ditron_train.tp.reduce_scatter import ReduceScatter

sys.path.insert(0, str(Path(__file__).parents[1] / "tp"))
from bodies_tp import gather_rows  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
PLANS = [GatherPlan("push", push_programs=16), GatherPlan("copy", num_chunks=1), GatherPlan("copy", num_chunks=4)]
SCATTERS = ["store", "copy"]
NUM_RANDOM_SHAPES, NUM_RANDOM_SHAPES_OF_SHARED_GPUS = 500, 80


@pytest.fixture(scope="module")
def context(device):
    return get_tp_context(dist.group.WORLD, device)


def normals(*shape, seed, dtype=torch.bfloat16):
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + dist.get_rank())
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def gathered(x, counts=None):
    if counts is not None:
        return gather_rows(x, counts)
    total = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(total, x)
    return total


def scattered(partial, counts=None):
    world, rank = dist.get_world_size(), dist.get_rank()
    if counts is None:
        out = partial.new_empty(partial.shape[0] // world, *partial.shape[1:])
        dist.reduce_scatter_tensor(out, partial.contiguous())
        return out
    padded = partial.new_zeros(world, max(counts), partial.shape[1])  # NCCL's even reduce-scatter of padded shares
    start = 0
    for owner, count in enumerate(counts):
        padded[owner, :count] = partial[start : start + count]
        start += count
    out = partial.new_empty(max(counts), partial.shape[1])
    dist.reduce_scatter_tensor(out, padded.view(-1, partial.shape[1]))
    return out[: counts[rank]]


def poison(context):
    """NaN in all symmetric buffers of data, on every rank before any goes on."""
    for name in ("tp.gathered", "tp.partials"):
        num_bytes = context.arena.capacity_bytes(name)
        if num_bytes:
            context.arena.tensor(name, (num_bytes // 2,), torch.bfloat16).local.fill_(float("nan"))
    torch.cuda.synchronize()
    dist.barrier()


def products(x, weight, layout):
    """cuBLAS's, then our tile GEMM's."""
    yield x @ (weight.t() if layout == "nt" else weight)
    yield matmul_nt(x, weight) if layout == "nt" else matmul_nn(x, weight)


@pytest.mark.parametrize("shape", load_workloads()["ag_gemm"]["shapes"], ids=lambda s: s["model"])
def test_ag_gemm_at_published_shapes(context, all_equal, shape):
    world = context.world_size
    x = normals(shape["M"] // world, shape["K"], seed=1)
    weight = normals(shape["N"] // world, shape["K"], seed=2)
    everything = gathered(x)
    expected = everything @ weight.t()
    for plan in PLANS:
        y, total = ag_gemm(x, weight, context=context, plan=plan, return_gathered=True)
        context.synchronize()
        assert all_equal(total, everything) and all_equal(y, expected), plan
    weight_nn = weight.t().contiguous()
    y = ag_gemm(x, weight_nn, context=context, layout="nn")
    context.synchronize()
    assert all_equal(y, everything @ weight_nn)


@pytest.mark.parametrize("shape", load_workloads()["gemm_rs"]["shapes"], ids=lambda s: s["model"])
def test_gemm_rs_at_published_shapes(context, all_equal, shape):
    x = normals(shape["M"], shape["K"] // context.world_size, seed=3)
    weight = normals(shape["N"], shape["K"] // context.world_size, seed=4)
    expected = scattered(x @ weight.t())
    for scatter in SCATTERS:
        y = gemm_rs(x, weight, context=context, scatter=scatter)
        context.synchronize()
        assert all_equal(y, expected), scatter
    weight_nn = weight.t().contiguous()
    y = gemm_rs(x, weight_nn, context=context, layout="nn")
    context.synchronize()
    assert all_equal(y, scattered(x @ weight_nn))


@pytest.mark.parametrize(
    "m, n, k", [(8192, 28672, 8192), (8192, 8192, 14336), (8192, 5120, 8192), (4096, 2752, 4096), (2048, 512, 8192)]
)
def test_cublas_multiplies_rank_by_rank(device, all_equal, monkeypatch, m, n, k):
    """As a table may say; where cuBLAS has other bits for fewer rows, tiles multiply: the bits are native either way,
    unless cuBLAS splits the sums of all rows."""

    def chosen(problem, machine):
        return choices.with_library(choices.choose(problem, machine))

    monkeypatch.setattr(tp_context, "choose", chosen)
    context = TPContext(dist.new_group(list(range(dist.get_world_size()))), device)
    share = m // context.world_size
    x, weight, partials = (normals(*shape, seed=seed) for seed, shape in enumerate([(share, k), (n, k), (m, k)]))
    weight_nn = weight.t().contiguous()
    for repeat in range(3):
        if repeat:
            poison(context)
        if dist.get_rank() == repeat % context.world_size:
            torch.cuda._sleep(int(2e7))
        y, total = ag_gemm(x, weight, context=context, return_gathered=True)
        everything = gathered(x)
        assert all_equal(total, everything)
        out = gemm_rs(partials, weight, context=context)
        y_nn = ag_gemm(x, weight_nn, context=context, layout="nn")
        context.synchronize()
        for found, operands, layout in ((y, weight, "nt"), (y_nn, weight_nn, "nn")):
            assert any(all_equal(found, one) for one in products(everything, operands, layout))
        assert any(all_equal(out, scattered(one)) for one in products(partials, weight, "nt"))
        x.add_(1.0)
    by_library = [plan for plan in context.prepared.values() if isinstance(plan, LibraryAgGemmPlan)]
    assert len(by_library) == 2 or n < 1024  # many tiles, whose sums cuBLAS does not split
    context.arena.close()


def test_gemm_rs_whose_first_rows_go_in_halves(context, all_equal, monkeypatch):
    """A chunk of two waves, whose bytes take longer than its products: the links are last."""
    sent, send = [], ReduceScatter.send

    def seen(self, partial, position, rows, *, signals):
        sent.append((position, rows.stop - rows.start, signals))
        send(self, partial, position, rows, signals=signals)

    monkeypatch.setattr(ReduceScatter, "send", seen)
    rows, n, k = 2048, 4096, 1024
    x, weight = normals(context.world_size * rows, k, seed=13), normals(n, k, seed=14)
    expected = scattered(x @ weight.t())
    for _ in range(8):  # recorded at some of them
        y = gemm_rs(x, weight, context=context, scatter="copy")
        context.synchronize()
        assert all_equal(y, expected)
    assert sent[:2] == [(0, rows // 2, False), (0, rows // 2, True)]
    assert [entry[1:] for entry in sent[2 : context.world_size]] == [(rows, True)] * (context.world_size - 2)


def test_random_shapes(context, all_equal, shares_gpus):
    """Even and uneven rows, any N and K, both layouts and dtypes, every plan; buffers poisoned, ranks late at random.

    Compilation is what takes the time, so fp16 comes with one layout and plan.
    """
    world, rank = context.world_size, context.rank
    different = []
    for seed in range(NUM_RANDOM_SHAPES_OF_SHARED_GPUS if shares_gpus else NUM_RANDOM_SHAPES):
        draw, own = random.Random(seed), random.Random(seed * 1000 + rank)
        align = draw.choice([128, 8, 8, 1])
        n, k = (max(1, draw.randint(1, 1500) // align * align) for _ in range(2))
        counts = None if draw.random() < 0.5 else [draw.randint(0, 300) for _ in range(world)]
        rows = draw.choice([128, 256, 8 * draw.randint(1, 60), draw.randint(1, 500)])
        if counts is not None and sum(counts) == 0:
            counts[0] = 1
        layout = draw.choice(["nt", "nn"])
        plan, scatter = draw.choice(PLANS), draw.choice(SCATTERS)
        half = layout == "nt" and counts is None and plan is PLANS[1]
        dtype = torch.float16 if half else torch.bfloat16
        weight = normals(*((n, k) if layout == "nt" else (k, n)), seed=seed, dtype=dtype)
        x = normals(rows if counts is None else counts[rank], k, seed=seed + 1, dtype=dtype)
        total = gathered(x, counts)
        if seed % 3 == 0:
            context.gathered(total.shape[0], k + -k % 8, dtype).local.fill_(float("nan"))
            torch.cuda.synchronize()
            dist.barrier()
        if own.random() < 0.2:
            torch.cuda._sleep(int(2e6 * own.random()))
        y = ag_gemm(x, weight, context=context, layout=layout, row_counts=counts, plan=plan)
        z = gemm_rs(total, weight, context=context, layout=layout, row_counts=counts, scatter=scatter)
        context.synchronize()
        references = products(total, weight, layout)
        if not any(all_equal(y, partial) and all_equal(z, scattered(partial, counts)) for partial in references):
            different.append((seed, counts or rows, n, k, layout, dtype))
    assert not different


@pytest.mark.parametrize("rows, hidden, width", [(2048, 1024, 2048), (8192, 4096, 11008)])
def test_linear_layers_repeat_a_hundred_times(context, all_equal, rows, hidden, width):
    """Column then row linear, forward and all gradients, against NCCL and cuBLAS, with a random straggler and poisoned
    buffers."""
    world, rank = context.world_size, context.rank
    w1 = normals(width // world // 8 * 8, hidden, seed=5).requires_grad_()
    w2 = normals(hidden, width // world // 8 * 8, seed=6).requires_grad_()
    repeats = 100 if rows <= 2048 else 10
    for repeat in range(repeats):
        x = normals(rows // world, 1, hidden, seed=10 + repeat).requires_grad_()
        w1.grad = w2.grad = None
        poison(context)
        if random.Random(repeat * 17 + rank).random() < 0.3:
            torch.cuda._sleep(int(3e6 * random.Random(repeat + rank).random()))
        hidden_states = column_linear(x, w1, context=context)
        y = row_linear(hidden_states, w2, context=context)
        grad = normals(*y.shape, seed=300 + repeat)
        y.backward(grad)
        context.synchronize()
        with torch.no_grad():
            total_x, total_grad = gathered(x), gathered(grad)
            inner = total_x @ w1.t()
            assert all_equal(y.detach(), scattered(inner @ w2.t()))
            grad_inner = total_grad @ w2
            assert all_equal(w2.grad, total_grad.view(-1, hidden).t() @ inner.view(-1, inner.shape[-1]))
            assert all_equal(x.grad, scattered(grad_inner @ w1))
            assert all_equal(w1.grad, grad_inner.view(-1, inner.shape[-1]).t() @ total_x.view(-1, hidden))


@pytest.mark.parametrize("plan, scatter", list(zip(PLANS, [*SCATTERS, "copy"])), ids=str)
def test_graph_replay_mixed_with_eager_calls(context, all_equal, plan, scatter):
    x, weight = normals(1024, 1024, seed=7), normals(1024, 1024, seed=8)
    ag_gemm(x, weight, context=context, plan=plan)
    gemm_rs(gathered(x), weight, context=context, scatter=scatter)
    context.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = ag_gemm(x, weight, context=context, plan=plan)
        z = gemm_rs(y, weight, context=context, scatter=scatter)
    for repeat in range(10):
        x.copy_(normals(1024, 1024, seed=20 + repeat))
        graph.replay()
        context.synchronize()
        expected = gathered(x) @ weight.t()
        assert all_equal(y, expected) and all_equal(z, scattered(expected @ weight.t()))
        assert all_equal(ag_gemm(x, weight, context=context, plan=plan), expected)


@pytest.mark.parametrize("plan, scatter", [(GatherPlan("copy"), "copy"), (GatherPlan("push", 16), "store")], ids=str)
def test_the_same_shape_in_other_memory(context, all_equal, plan, scatter):
    """What is kept of a launch belongs to addresses and strides, in turn here: other rows, strides, one that is not
    aligned."""
    size, rows = 1024, 512
    memory = normals(3 * rows * size, seed=31)
    xs = [memory[first : first + rows * size].view(rows, size) for first in (0, rows * size, 8, 1)]
    wide, square = normals(size, 2 * size, seed=32), normals(size, size, seed=33)
    weights = [square, square.t(), wide[:, :size], wide[:, size:]]
    tall = normals(context.world_size * rows, 2 * size, seed=34)
    shares = [tall[:, :size], tall[:, size:], tall[:, size:].contiguous(), tall[:, 1 : size + 1]]
    expected = [
        (matmul_nt(gathered(x.contiguous()), weight), scattered(matmul_nt(share, weight)))
        for x, weight, share in zip(xs, weights, shares)
    ]
    for _ in range(4):
        for x, weight, share, (product, total) in zip(xs, weights, shares, expected):
            assert all_equal(ag_gemm(x, weight, context=context, plan=plan), product)
            assert all_equal(gemm_rs(share, weight, context=context, scatter=scatter), total)
    context.synchronize()


@pytest.fixture
def launched(monkeypatch):
    """How many recordings have been launched, as a list of one."""
    count, launch = [0], driver.graph_launch

    def counted(*arguments):
        count[0] += 1
        launch(*arguments)

    monkeypatch.setattr(driver, "graph_launch", counted)
    return count


def test_recorded_ops_repeat_in_the_same_and_in_other_memory(device, all_equal, launched):
    """Inputs change in place and are stored elsewhere in turn, ranks are late, buffers are poisoned, a captured graph
    runs in between."""
    context = TPContext(dist.new_group(list(range(dist.get_world_size()))), device)
    world, rank = context.world_size, context.rank
    rows, size, plan = 256 * world, 1024, GatherPlan("copy")
    weight = normals(size, size, seed=61)
    inputs = [normals(rows, size, seed=62 + turn) for turn in range(3)]
    for _ in range(2):
        y = ag_gemm(gemm_rs(inputs[0], weight, context=context, scatter="copy"), weight, context=context, plan=plan)
    context.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = ag_gemm(gemm_rs(inputs[0], weight, context=context, scatter="copy"), weight, context=context, plan=plan)
    for repeat in range(30):
        for turn, x in enumerate(inputs):
            x.copy_(normals(rows, size, seed=100 * repeat + turn))
            if repeat % 4 == 0:
                poison(context)
            if random.Random(repeat * 17 + 5 * turn + rank).random() < 0.2:
                torch.cuda._sleep(int(3e6))
            total = gemm_rs(x, weight, context=context, scatter="copy")
            product = ag_gemm(total, weight, context=context, plan=plan)
            if turn == 0:
                graph.replay()
            expected = scattered(matmul_nt(x, weight))
            assert all_equal(total, expected) and all_equal(product, matmul_nt(gathered(expected), weight)), (
                repeat,
                turn,
            )
            assert turn or all_equal(y, product)
            del total, product
    context.synchronize()
    assert launched[0] >= 60
    context.arena.close()


def test_recordings_that_go_while_they_run(device, all_equal, monkeypatch):
    """More sequences than are kept, none of them waited for."""
    monkeypatch.setattr(recorded, "_MOST_RECORDED", 4)
    monkeypatch.setattr(recorded, "_IDLE_RUNS", 6)
    context = TPContext(dist.new_group(list(range(dist.get_world_size()))), device)
    rows, size = 256 * context.world_size, 1024
    weight, memory = normals(size, size, seed=71), normals(16, rows, size, seed=72)
    first = None
    for phase in range(4):
        for _ in range(8):
            inputs = memory[4 * phase : 4 * phase + 4]
            outs = [gemm_rs(x, weight, context=context, scatter="copy") for x in inputs]
            assert all(all_equal(out, scattered(matmul_nt(x, weight))) for x, out in zip(inputs, outs))
            del outs
        kept = set(context.recorder.sequences._recordings)
        assert len(kept) == 4 and kept != first
        first = kept
    context.synchronize()
    context.arena.close()


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "all_gather", "reduce_scatter"])
def test_memory_that_is_given_back_and_had_again(device, all_equal, monkeypatch, launched, op):
    """As a probe does it, or torch's allocator when memory runs out; graphs of copies from there must not be
    launched."""
    numbers, ask = {}, driver.allocation_of

    def noted(address):
        numbers.setdefault(address, set()).add(number := ask(address))
        return number

    monkeypatch.setattr(driver, "allocation_of", noted)
    context = TPContext(dist.new_group(list(range(dist.get_world_size()))), device)
    rank_rows = min(4096, 16384 // context.world_size)  # so few in all that ops are recorded
    rows, weight = rank_rows * context.world_size, normals(256, 4096, seed=1)

    def run(seed):
        if op == "gemm_rs":
            x = normals(rows, 256, seed=seed)
            return gemm_rs(x, weight, context=context, layout="nn", scatter="copy"), scattered(matmul_nn(x, weight))
        x = normals(rank_rows if op != "reduce_scatter" else rows, 4096, seed=seed)
        if op == "reduce_scatter":
            return start_reduce_scatter(x, context=context).wait(), scattered(x)
        if op == "all_gather":
            return start_all_gather(x, context=context).wait().clone(), gathered(x)
        return ag_gemm(x, weight, context=context, plan=GatherPlan("copy")), matmul_nt(gathered(x), weight)

    for phase in range(4):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = launched[0]
        for repeat in range(6):
            found, expected = run(10 * phase + repeat)
            assert all_equal(found, expected), (phase, repeat)
            del found, expected
        assert launched[0] > before
    context.synchronize()
    context.arena.close()
    if not any(len(found) > 1 for found in numbers.values()):
        pytest.skip("equal bits, but the driver gave this process no address twice")


_OPS = {"ag_gemm": AgGemmPlan, "gemm_rs": GemmRsCopyPlan}


@pytest.mark.parametrize("op", _OPS)
def test_a_recorded_op_says_that_a_peer_is_late(device, monkeypatch, launched, op):
    monkeypatch.setenv("DITRON_TIMEOUT_S", "3")
    world, rank = dist.get_world_size(), dist.get_rank()
    context = TPContext(dist.new_group(list(range(world))), device)
    weight, x = normals(256, 256, seed=1), normals(128 * world, 256, seed=2)

    def run():
        if op == "gemm_rs":
            return gemm_rs(x, weight, context=context, scatter="copy")
        return ag_gemm(x, weight, context=context, plan=GatherPlan("copy"))

    for _ in range(6):
        y = run()
        del y
    context.synchronize()
    before = launched[0]
    assert before > 0 and any(
        isinstance(key[0], _OPS[op]) for key in context.recorder.sequences._recordings
    )  # not its sends alone
    if rank == 0:  # at once: a collective's memory in between may take the address that the result had
        with pytest.raises(PeerTimeoutError, match="tp.gather" if op == "ag_gemm" else "tp.reduce_scatter"):
            run()
            assert launched[0] == before + 1
            context.synchronize()
    dist.barrier()


def test_without_cuda_bindings(device, all_equal, monkeypatch):
    """Streams are ordered by torch's events, and data moves by multiprocessors whatever is asked for."""
    monkeypatch.setattr("ditron_train.stream.driver._driver", lambda: None)
    context = TPContext(dist.new_group(list(range(dist.get_world_size()))), device)
    share = 2048 // context.world_size
    shapes = [(share, 1024), (share, 1024), (1024, share)]
    x, w1, w2 = (normals(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes))
    for repeat in range(5):
        torch.cuda._sleep(int(2e7))  # so that what is not ordered comes too early
        x.data.copy_(normals(share, 1024, seed=60 + repeat))
        y = row_linear(column_linear(x, w1, context=context), w2, context=context)
        grad = normals(*y.shape, seed=50 + repeat)
        found = [y.detach(), *torch.autograd.grad(y, (x, w1, w2), grad)]
        context.synchronize()
        with torch.no_grad():
            total_x, total_grad = gathered(x), gathered(grad)
            inner, grad_inner = total_x @ w1.t(), total_grad @ w2
            right = [
                scattered(inner @ w2.t()),
                scattered(grad_inner @ w1),
                grad_inner.t() @ total_x,
                total_grad.t() @ inner,
            ]
        assert all(all_equal(*pair) for pair in zip(found, right))
    assert all_equal(ag_gemm(x.detach(), w1.detach(), context=context, plan=GatherPlan("copy")), inner)
    context.arena.close()


def test_epochs_wrap(device, all_equal):
    context = TPContext(dist.new_group(list(range(dist.get_world_size()))), device, first_epoch=2**31 - 6)
    weight = normals(512, 512, seed=9)
    for repeat in range(12):
        x = normals(256, 512, seed=40 + repeat)
        y = ag_gemm(x, weight, context=context, plan=PLANS[repeat % 3])
        z = gemm_rs(y, weight, context=context, scatter=SCATTERS[repeat % 2])
        context.synchronize()
        expected = gathered(x) @ weight.t()
        assert all_equal(y, expected) and all_equal(z, scattered(expected @ weight.t()))


def test_a_late_peer_and_different_calls_are_errors(device, monkeypatch, shares_gpus):
    monkeypatch.setenv("DITRON_TIMEOUT_S", "6" if shares_gpus else "3")
    world, rank = dist.get_world_size(), dist.get_rank()
    weight = normals(256, 256, seed=9)
    for rows, dtype in ((256, torch.bfloat16), (128, torch.float16)):  # of rank 0; the others have 128 and bf16
        context = TPContext(dist.new_group(list(range(world))), device)
        if rank > 0:
            rows, dtype = 128, torch.bfloat16
        with pytest.raises(MismatchError) as mismatch:
            ag_gemm(normals(rows, 256, seed=1, dtype=dtype), weight.to(dtype), context=context)
            context.synchronize()
        words = [None] * world
        dist.all_gather_object(words, str(mismatch.value))
        assert len(set(words)) == 1 and "rank 1: total_rows" in words[0]
    context = TPContext(dist.new_group(list(range(world))), device)
    gemm_rs(normals(128 * world, 256, seed=1), weight, context=context)
    context.synchronize()
    if rank == 0:
        with pytest.raises(PeerTimeoutError, match="tp.gemm_rs"):
            gemm_rs(normals(128 * world, 256, seed=1), weight, context=context)
            context.synchronize()
    dist.barrier()


def error_of(call):
    """The words of what ``call`` raises, as every rank has them."""
    with pytest.raises((ArenaError, NotSupportedError)) as caught:
        call()
    words = [None] * dist.get_world_size()
    dist.all_gather_object(words, str(caught.value))
    return set(words)


def test_bad_input_is_the_same_error_on_every_rank(context, all_equal):
    """And the next call works."""
    x, weight = normals(64, 256, seed=1), normals(128, 256, seed=2)
    expected = gathered(x) @ weight.t()
    for bad_x, bad_weight, words in (
        (x.cpu(), weight.cpu(), "x is on cpu, the context on cuda"),
        (x, weight.cpu(), "operands on cuda"),
        (x, normals(128, 264, seed=2), "do not fit"),
        (x.float(), weight.float(), "torch.float32"),
        (x, weight.half(), "operands of torch.bfloat16 and torch.float16"),
    ):
        for op in (ag_gemm, gemm_rs):
            assert all(words in text for text in error_of(partial(op, bad_x, bad_weight, context=context)))
        assert all_equal(ag_gemm(x, weight, context=context), expected)
    context.synchronize()


def test_too_little_memory_is_the_same_error_on_every_rank(device, all_equal, monkeypatch):
    context = TPContext(dist.new_group(list(range(dist.get_world_size()))), device)
    x, weight = normals(64, 256, seed=1), normals(128, 256, seed=2)
    (words,) = error_of(lambda: context.gathered(2**30, 2**11, torch.bfloat16))
    assert "bytes of symmetric memory failed" in words
    if dist.get_rank() == 0:
        monkeypatch.setenv("DITRON_ARENA_BYTES", str(context.arena.num_bytes + 2**20))
    (words,) = error_of(lambda: ag_gemm(normals(4096, 4096, seed=1), normals(128, 4096, seed=2), context=context))
    assert "rank 0's cap DITRON_ARENA_BYTES" in words
    for _ in range(2):
        assert all_equal(ag_gemm(x, weight, context=context), gathered(x) @ weight.t())
    context.synchronize()


@pytest.mark.parametrize("transport", ["torch", "nvshmem"])
def test_overlapping_groups_in_sequence(device, all_equal, transport, monkeypatch, request):
    """A rank's groups share its GPU, not their memory or flags: calls of all of them in a row, nobody waits for the
    host.

    Not at first: while some compile for one group, the others would wait for them in the next group, up to the
    deadline.
    """
    if transport == "nvshmem":
        pytest.importorskip("nvshmem.core")
        request.getfixturevalue("own_gpus")
    monkeypatch.setenv("DITRON_TRANSPORT", transport)
    world, rank = dist.get_world_size(), dist.get_rank()
    lists = [list(range(world)), [0, 1], list(range(1, world)) if world > 2 else [0, 1]]
    groups = [dist.new_group(ranks) for ranks in lists]
    contexts = {number: TPContext(groups[number], device) for number, ranks in enumerate(lists) if rank in ranks}
    weight = normals(256, 512, seed=3)
    num_ways = 6  # plans by ways to scatter
    for repeat in range(2 * num_ways):
        results = []
        for number in range(len(lists)):
            if repeat < num_ways:
                torch.cuda.synchronize()
                dist.barrier()
            context = contexts.get(number)
            if context is None:
                continue
            x = normals(128 + 64 * number, 512, seed=10 * repeat + number)
            y = ag_gemm(x, weight, context=context, plan=PLANS[repeat % 3])
            z = gemm_rs(y, weight[:, :256], context=context, scatter=SCATTERS[repeat % 2])
            results.append((context, x, y, z))
        right = True
        for context, x, y, z in results:
            context.synchronize()
            whole = x.new_empty(x.shape[0] * context.world_size, 512)
            dist.all_gather_into_tensor(whole, x, group=context.group)
            partial = matmul_nt(matmul_nt(whole, weight), weight[:, :256])
            total = partial.new_empty(x.shape[0], 256)
            dist.reduce_scatter_tensor(total, partial, group=context.group)
            right &= torch.equal(y, matmul_nt(whole, weight)) and torch.equal(z, total)
        assert all_equal(torch.tensor(right), torch.tensor(True))
    for context in contexts.values():
        assert context.arena.transport_name == transport
        context.arena.close()


def test_groups_that_come_and_go_leave_no_memory(device, all_equal):
    """Of this process alone: other jobs may share the GPU. What is behind the buffers is freed, not only
    forgotten."""
    world, held = dist.get_world_size(), []
    for number in range(3):
        context = get_tp_context(dist.new_group(list(range(world))), device)
        x, weight = normals(4096 // world, 4096, seed=number), normals(256, 4096, seed=number + 10)
        assert all_equal(ag_gemm(x, weight, context=context), matmul_nt(gathered(x), weight))
        assert all_equal(gemm_rs(gathered(x), weight, context=context), scattered(matmul_nt(gathered(x), weight)))
        context.synchronize()
        held += [StorageWeakRef(segment.local.untyped_storage()) for segment, _ in context.arena._segments.values()]
        assert not any(storage.expired() for storage in held[-2:])
        dist.destroy_process_group(context.group)
        del context
        forget_destroyed_groups()
        assert held and all(storage.expired() for storage in held)
        dist.barrier()
