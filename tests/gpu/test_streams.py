"""Ops that are called, or waited for, on several streams: who waits for whom, and whose memory may be had again when.

Each test holds one stream up, of one rank where the ranks would else change the order of their calls alike.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from ditron_train.ep import EPContext, begin_layout, combine, dispatch, dispatch_ahead
from ditron_train.ep.combine import begin_combine
from ditron_train.pp import PipelineContext, exchange
from ditron_train.pp.messages import FORWARD, Header
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.stream.cached_tensors import CachedTensor
from ditron_train.tp import TPContext, ag_gemm, gemm_rs, start_all_gather, start_reduce_scatter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
_CYCLES = 100_000_000  # 50 ms and more: longer than what the host enqueues meanwhile takes
_TOKENS, _HIDDEN, _MESSAGE_BYTES = 512, 512, 2 << 20


def hold_up(stream):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_CYCLES)


def values(*shape, seed, device):
    generator = torch.Generator(device=device).manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-4, 5, shape, generator=generator, device=device).bfloat16()


def settle():
    """All ranks are done with what they were given."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


@pytest.fixture
def streams(device):
    if dist.get_world_size() < 2:
        pytest.skip("needs two ranks")
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@pytest.fixture
def group(device):
    made = dist.new_group(list(range(dist.get_world_size())))
    yield made
    settle()
    dist.destroy_process_group(made)


@pytest.fixture
def tensor_parallel(group, device):
    context = TPContext(group, device)
    yield context
    context.arena.close()


@pytest.fixture
def expert_parallel(group, device):
    context = EPContext(group, device, 4 * dist.get_world_size(), 2)
    _begin(context, seed=9, tokens=4 * _TOKENS).finish()  # the buffers are large enough for any of the tests' layouts
    yield context
    context.arena.close()


def _begin(context, seed, tokens=_TOKENS):
    generator = torch.Generator(device=context.device).manual_seed(100 * seed + context.rank)
    probs = torch.rand(tokens, context.shape.num_experts, generator=generator, device=context.device)
    routed = torch.zeros(probs.shape, dtype=torch.bool, device=context.device).scatter_(1, probs.topk(2).indices, True)
    return begin_layout(routed, probs * routed, _HIDDEN, torch.bfloat16, context)


def test_an_op_follows_the_last_one_though_another_was_captured_between(tensor_parallel, streams, device, all_equal):
    first, second = streams
    context, graphs = tensor_parallel, [torch.cuda.CUDAGraph() for _ in streams]
    x = [values(64 * context.world_size, 64, seed=seed, device=device) for seed in range(3)]
    weight = values(64, 64, seed=3, device=device)
    expected = [gemm_rs(part, weight, context=context, scatter="store") for part in x]
    settle()
    if context.rank == 0:
        hold_up(first)
    with torch.cuda.stream(first):
        found = [gemm_rs(x[0], weight, context=context, scatter="store")]
    for graph, stream in zip(graphs, (torch.cuda.Stream(device), second)):  # nor does a capture wait for the last one
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            captured = gemm_rs(x[1], weight, context=context, scatter="store")
            graph.capture_end()
    with torch.cuda.stream(second):
        found.append(gemm_rs(x[2], weight, context=context, scatter="store"))
    context.synchronize()
    graphs[-1].replay()
    context.synchronize()
    assert all_equal(found[0], expected[0]) and all_equal(captured, expected[1]) and all_equal(found[1], expected[2])


def test_a_gather_that_is_waited_for_on_another_stream(tensor_parallel, streams, device, all_equal, monkeypatch):
    """It has this rank's own rows, which the first stream copies, and stays until the second one has read it."""
    first, second = streams
    context, x = tensor_parallel, values(256, 512, seed=1, device=device)
    expected = start_all_gather(x, context=context).wait().clone()
    context.gathered(*expected.shape, x.dtype).local.fill_(float("nan"))
    settle()
    with monkeypatch.context() as patch, torch.cuda.stream(first):
        run_again = context.recorder.run

        def run_again_and_sleep(*arguments):  # in front of the copy of this rank's own rows
            run_again(*arguments)
            torch.cuda._sleep(_CYCLES)

        patch.setattr(context.recorder, "run", run_again_and_sleep)
        gather = start_all_gather(x, context=context)
    with torch.cuda.stream(second):
        rows = gather.wait()
        found = [rows.clone()]
        torch.cuda._sleep(_CYCLES)
        found.append(rows.clone())
    with torch.cuda.stream(first):
        found.append(-start_all_gather(-x, context=context).wait())
    context.synchronize()
    assert [all_equal(rows, expected) for rows in found] == [True] * 3


@pytest.mark.parametrize("start", [start_all_gather, start_reduce_scatter])
def test_memory_of_a_started_op_that_is_waited_for_on_another_stream(
    tensor_parallel, streams, device, all_equal, start
):
    first, second = streams
    context, x = tensor_parallel, values(128 * dist.get_world_size(), 512, seed=1, device=device)
    expected = start(x, context=context).wait().clone()
    settle()
    hold_up(context.comm_stream)
    with torch.cuda.stream(first):
        started = start(x.clone(), context=context)
    with torch.cuda.stream(second):
        result = started.wait()
        torch.cuda._sleep(_CYCLES)
        found = result.clone()
    shapes = x.shape, result.shape
    del started, result
    with torch.cuda.stream(first):
        spoiled = [torch.full(shape, float("nan"), dtype=x.dtype, device=device) for shape in shapes for _ in range(4)]
    context.synchronize()
    assert all_equal(found, expected)
    del spoiled


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_rows_move_one_op_after_another(expert_parallel, streams, device, all_equal, op):
    context = expert_parallel
    layouts = [_begin(context, seed=seed).finish() for seed in range(2)]
    x = [values(_TOKENS, _HIDDEN, seed=seed, device=device) for seed in range(2)]
    rows = [dispatch(*pair, context)[0] for pair in zip(x, layouts)]

    def move(index):
        if op == "dispatch":
            return dispatch(x[index], layouts[index], context)[0]
        return combine(rows[index], layouts[index], context, order="ascending")[0]

    expected, found = [move(index) for index in range(2)], []
    settle()
    if context.rank == 0:
        hold_up(streams[0])
    for index, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            found.append(move(index))
    torch.cuda.synchronize()
    context.check()
    assert [all_equal(*pair) for pair in zip(found, expected)] == [True, True]


def test_counts_are_exchanged_one_after_another(expert_parallel, streams):
    context = expert_parallel
    expected = [_begin(context, seed=seed).finish() for seed in range(2)]
    settle()
    if context.rank == 0:
        hold_up(streams[0])
    pending = []
    for seed, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            pending.append(_begin(context, seed=seed))
    torch.cuda.synchronize()
    context.check()
    for layout, one in zip(expected, pending):
        assert torch.equal(layout.tokens_per_expert, one.finish().tokens_per_expert)
        assert torch.equal(layout.tables.recv_offsets, one.tables.recv_offsets)


def test_counts_do_not_wait_for_the_rows_of_another_microbatch(
    expert_parallel, streams, device, all_equal, shares_gpus
):
    """Nor are its tokens sent ahead then: of which dispatch the layout holds the epoch is not known."""
    context = expert_parallel
    layouts = [_begin(context, seed=seed).finish() for seed in range(2)]
    x = [values(_TOKENS, _HIDDEN, seed=seed, device=device) for seed in range(2)]
    expected = [dispatch(*pair, context)[0] for pair in zip(x, layouts)]
    for _ in range(2):  # the first time for kernels, whose code CUDA may load only when the device is idle
        settle()
        moved = torch.cuda.Event()
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(2 * _CYCLES)
            found = [dispatch(x[0], layouts[0], context)[0]]
            moved.record()
        with torch.cuda.stream(streams[1]):
            pending = _begin(context, seed=1)
            dispatch_ahead(x[1], pending)
            layout = pending.finish()  # waits for the counts
            was_sent_ahead, was_beside = layout.ahead is not None, not moved.query()
            found.append(dispatch(x[1], layout, context)[0])
        torch.cuda.synchronize()
        context.check()
        assert [all_equal(*pair) for pair in zip(found, expected)] == [True, True]
        assert not was_sent_ahead
    assert was_beside or shares_gpus or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def test_memory_of_a_layout_that_is_used_on_another_stream(expert_parallel, streams, device):
    context, (first, second) = expert_parallel, streams
    x = values(_TOKENS, _HIDDEN, seed=1, device=device)
    dispatch(x, _begin(context, seed=2).finish(), context)  # compiled
    with torch.cuda.stream(first):
        layout = _begin(context, seed=1).finish()
    settle()
    hold_up(second)
    with torch.cuda.stream(second):
        rows, _ = dispatch(x, layout, context)
    tables = (layout.tables.limits, layout.dest_slots, layout.expert_ids, layout.entries, layout.origins)
    addresses = {table.untyped_storage().data_ptr() for table in tables}
    sizes = [table.untyped_storage().nbytes() for table in tables]
    del layout, tables
    with torch.cuda.stream(first):
        had_again = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes for _ in range(4)]
    assert not addresses & {tensor.data_ptr() for tensor in had_again}
    torch.cuda.synchronize()
    context.check()
    assert len(rows)


def test_memory_of_a_combine_that_is_finished_on_another_stream(expert_parallel, streams, device, all_equal):
    context, (first, second) = expert_parallel, streams
    layout = _begin(context, seed=1).finish()
    rows, _ = dispatch(values(_TOKENS, _HIDDEN, seed=1, device=device), layout, context)
    expected, _ = combine(rows, layout, context, order="ascending")
    begin_combine(rows, layout, context, order="ascending").finish()  # compiled
    settle()
    hold_up(context.fork())
    with torch.cuda.stream(first):
        pending = begin_combine(rows.clone(), layout, context, order="ascending")
    with torch.cuda.stream(second):
        out, _ = pending.finish()
        torch.cuda._sleep(_CYCLES)
        found = out.clone()
    del pending, out
    with torch.cuda.stream(first):
        shapes = (rows.shape, expected.shape)
        spoiled = [
            torch.full(shape, float("nan"), dtype=rows.dtype, device=device) for shape in shapes for _ in range(4)
        ]
    torch.cuda.synchronize()
    context.check()
    assert all_equal(found, expected)
    del spoiled


def test_memory_of_messages_that_was_allocated_on_another_stream(group, streams, device, all_equal):
    """Of more messages than are kept alive: the stream that sends waits for the oldest, the one of its memory does
    not."""
    context, (first, second) = PipelineContext(group, device, num_slots=6), streams
    context.reserve(_MESSAGE_BYTES)
    header = Header((_MESSAGE_BYTES,), torch.uint8)
    settle()
    hold_up(context.local_senders[FORWARD]._stream)
    handles = []
    for number in range(4):
        with torch.cuda.stream(first if number < 2 else second):
            tensor = torch.full((_MESSAGE_BYTES,), 1 + number, dtype=torch.uint8, device=device)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            handles.append(exchange(context, send_next=tensor, recv_prev=header, may_lease=False)["recv_prev"])
        if number == 1:
            first.wait_stream(second)
        del tensor
    with torch.cuda.stream(first):
        spoiled = [torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=device) for _ in range(8)]
    with torch.cuda.stream(second):
        for handle in handles:
            handle.wait()
    torch.cuda.synchronize()
    found = torch.stack([handle.tensor for handle in handles])
    expected = torch.arange(1, 5, dtype=torch.uint8, device=device)[:, None].expand_as(found)
    assert len(spoiled) == 8 and all_equal(found, expected)
    settle()
    context.close()


def test_a_kept_tensor_is_used_behind_what_made_it(streams, device):
    first, second = streams
    with torch.cuda.stream(first):
        torch.cuda._sleep(_CYCLES)
        table = CachedTensor(torch.ones(1 << 20, device=device))
    with torch.cuda.stream(second):
        found = 2 * table.get()
        torch.cuda._sleep(_CYCLES)
        later = 3 * table.get()
    del table  # as a newer one takes its place
    with torch.cuda.stream(first):
        spoiled = [torch.zeros(1 << 20, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    assert len(spoiled) == 4 and bool((found == 2).all()) and bool((later == 3).all())


@pytest.mark.parametrize("prefetched", [False, True])
def test_messages_that_are_taken_on_several_streams(group, streams, device, all_equal, prefetched):
    """A message is not overwritten before it is copied out, nor its memory had again before the taking stream is done
    with it."""
    context = PipelineContext(group, device, num_slots=2)
    context.reserve(_MESSAGE_BYTES)
    first, second = streams
    header = Header((_MESSAGE_BYTES // 2,), torch.bfloat16)
    previous = torch.arange(4, device=device) + 10 * context.previous_rank
    sent = [
        torch.full(header.shape, 10 * context.rank + index, dtype=header.dtype, device=device) for index in range(4)
    ]
    settle()
    handles = [exchange(context, send_next=sent[0], recv_prev=header, may_lease=False)["recv_prev"]]
    if prefetched:  # the first one is copied out when the second is posted, into memory of the current stream
        handles.append(exchange(context, send_next=sent[1], recv_prev=header, may_lease=False)["recv_prev"])
    hold_up(first)
    with torch.cuda.stream(first):
        handles[0].wait()
        found = [handles[0].tensor.clone()]
    handles[0] = None
    spoiled = [torch.full(header.shape, -1.0, dtype=header.dtype, device=device) for _ in range(4)]
    with torch.cuda.stream(second):
        for index in range(1, 4):
            if len(handles) == index:
                handles.append(
                    exchange(context, send_next=sent[index], recv_prev=header, may_lease=False)["recv_prev"]
                )
            handles[index].wait()
            found.append(handles[index].tensor.clone())
    torch.cuda.synchronize()
    context.check()
    right = torch.stack([(message == value).all() for message, value in zip(found, previous)])
    assert all_equal(right, torch.ones_like(right)), right.tolist()
    del spoiled
    settle()
    context.close()


def test_ops_are_refused_where_another_gpu_is_current(tensor_parallel, expert_parallel, device, all_equal):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, weight = values(64, 64, seed=1, device=device), values(64, 64, seed=2, device=device)
    layout = _begin(expert_parallel, seed=1).finish()
    tokens = values(_TOKENS, _HIDDEN, seed=1, device=device)
    with torch.cuda.device((device.index + 1) % torch.cuda.device_count()):
        with pytest.raises(NotSupportedError, match="the current GPU is"):
            ag_gemm(x, weight, context=tensor_parallel)
        with pytest.raises(NotSupportedError, match="the current GPU is"):
            dispatch(tokens, layout, expert_parallel)
    rows, _ = dispatch(tokens, layout, expert_parallel)
    back, _ = combine(rows, layout, expert_parallel, order="ascending")
    assert all_equal(back, 2 * tokens)
