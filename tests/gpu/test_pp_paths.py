"""Pipeline messages by kernels and by NVSHMEM's put-with-signal on GPUs, under torchrun: the bits that were sent.

NVSHMEM here reaches the GPUs of one host, which it maps; over a network these tests were not run.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ditron_train.symm import start_nvshmem


def _base():
    name = "ditron_gpu_test_pp"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_pp.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


base = _base()
new_context = base.new_context
SIZES = [1024, 1, 4099, 1 << 20, (1 << 20) + 16, 3_000_001, 64 << 20]


@pytest.fixture(params=["kernel", "nvshmem"])
def path(device, request, monkeypatch):
    if request.param == "nvshmem":
        pytest.importorskip("nvshmem.core")
        request.getfixturevalue("own_gpus")
        start_nvshmem(device)  # pairs, which are a part of the job, cannot
    monkeypatch.setenv("DITRON_PP_PATH", request.param)
    return request.param


@pytest.mark.parametrize("num_slots", [1, 3])
def test_every_size_arrives_on_both_lanes(device, new_context, path, num_slots):
    context = new_context(max(SIZES), num_slots=num_slots)
    names = {type(end).__name__ for end in (*context.local_senders, *context.local_receivers)}
    assert names == ({"NvshmemSender", "NvshmemReceiver"} if path == "nvshmem" else {"Sender", "Receiver"})
    right = all([base._swap(context, index, num_bytes, device) for index, num_bytes in enumerate(SIZES * 2)])
    context.check()
    assert base._agree(device, right)


def test_pairs(device, new_context, path):
    """Even ranks send to the next one, which answers; tensors at odd addresses too."""
    from ditron_train.pp import exchange

    rank = dist.get_rank()
    context = new_context(8 << 20)
    right = True
    for index, num_bytes in enumerate([1 << 10, 8 << 20, 77, 999_999, 1 << 20] * 3):
        there, back = (
            base._payload(rank - rank % 2 + lane, lane, index, num_bytes + 1, device)[lane:] for lane in (0, 1)
        )
        if rank % 2 == 0:
            exchange(context, send_next=there[:num_bytes])
            handle = exchange(context, recv_next=base._header(num_bytes))["recv_next"]
        else:
            handle = exchange(context, recv_prev=base._header(num_bytes))["recv_prev"]
            exchange(context, send_prev=back[:num_bytes])
        handle.wait()
        right &= torch.equal(handle.tensor, (back if rank % 2 == 0 else there)[:num_bytes])
    context.check()
    assert base._agree(device, right)


def test_late_producers_slow_consumers_and_freed_storage(device, new_context, path):
    assert base._agree(device, base._late_and_freed(new_context(12 << 20), (0.0625, 1, 12), device))


@pytest.mark.parametrize("sends", [False, True], ids=["producer", "consumer"])
def test_a_silent_neighbour_becomes_an_error_within_the_deadline(device, new_context, path, monkeypatch, sends):
    """The producer never comes, or the consumer never takes anything."""
    from ditron_train.pp import exchange
    from ditron_train.runtime.errors import PeerTimeoutError

    monkeypatch.setenv("DITRON_TIMEOUT_S", "2")
    context = new_context(1 << 20, num_slots=1)
    data = base._payload(0, 0, 0, 1 << 20, device)
    torch.cuda.synchronize()
    dist.barrier()
    begin_s, raised = time.monotonic(), None
    try:
        if dist.get_rank() == 1 and sends:
            for _ in range(3):
                exchange(context, send_next=data)
        elif dist.get_rank() == 1 and path == "nvshmem":
            exchange(context, recv_prev=base._header(1 << 20))["recv_prev"].wait()
        elif dist.get_rank() == 1:  # its host was told that something comes
            context.local_receivers[0].channel.wait_for(0, 1, peer=0, chunk=0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()
        while time.monotonic() - begin_s < (3.5 if path == "nvshmem" else 15):
            context.check()
            time.sleep(0.01)
    except PeerTimeoutError as error:
        raised = error
    seconds = time.monotonic() - begin_s
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if raised is None else str(raised))
    if path == "nvshmem":  # no host memory is shared: who waited knows
        assert [text is not None for text in told] == [rank == 1 for rank in range(len(told))], told
    else:
        assert told[0] and len(set(told)) == 1, told
    assert raised is None or 1.5 < seconds < 2 + 5


def test_neighbours_that_disagree(device, new_context, path, monkeypatch):
    monkeypatch.setenv("DITRON_TIMEOUT_S", "3")
    context = new_context(1 << 20)

    def let_it_be_seen() -> None:  # headers that travel with the data are compared on the device
        torch.cuda.synchronize()
        context.check()

    raised = base._disagree(context, device, let_it_be_seen)
    right = base._tells_mismatch(raised)
    assert base._agree(device, right or (path == "nvshmem" and dist.get_rank() != 1 and raised is not None))


def _captured_until(is_over, target: torch.Tensor) -> str:
    """Captures two writes to `target` as a user would, in CUDA's default mode, the second when `is_over()`; what the
    driver says of it, nothing where the graph runs. Not by torch, whose allocator would still hold to a capture that
    failed."""
    from cuda.bindings import driver as cuda

    from ditron_train.stream import driver

    stream, half = driver.stream_create(), target.numel() // 2
    driver._check(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    driver.memset_u32_async(target.data_ptr(), 7, half, stream)
    while not is_over():
        time.sleep(0.005)
    status, graph = cuda.cuStreamEndCapture(stream)
    if status:
        return status.name
    driver._check(cuda.cuGraphDestroy(graph))
    driver._check(cuda.cuStreamDestroy(stream))
    return ""


@pytest.mark.parametrize("relaxed", [True, False], ids=["as_it_is", "without_relaxed_mode"])
def test_the_watchdog_releases_while_a_graph_is_captured(device, new_context, monkeypatch, relaxed):
    """A stream waits for a flag in device memory that nobody writes, and its deadline passes in the middle of a user's
    capture."""
    from ditron_train.runtime.errors import PeerTimeoutError
    from ditron_train.stream import driver, waits

    if not waits.waits_can_be_released():
        pytest.skip("with one hardware queue streams wait for flags in host memory alone")
    monkeypatch.setenv("DITRON_TIMEOUT_S", "1")
    monkeypatch.setattr(driver, "register_host_memory", lambda address, num_bytes: None)
    monkeypatch.setattr(waits, "_the_watchdog", None)  # a thread of this test's own
    if not relaxed:
        monkeypatch.setattr(driver, "call_beside_captures", lambda: None)
    context, target = new_context(1 << 20), torch.zeros(2, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin_s, logged, refusal, raised = time.monotonic(), None, "", None
    if dist.get_rank() == 1:
        context.local_receivers[0].channel.wait_for(0, 1, peer=0, chunk=0, stream=torch.cuda.Stream(device))
        (entry,) = waits._the_watchdog._waits
        logged = _captured_until(lambda: entry.released or entry.refusal or time.monotonic() - begin_s > 8, target)
        refusal = entry.refusal
    while raised is None and time.monotonic() - begin_s < 15:
        try:
            context.check()
            time.sleep(0.01)
        except PeerTimeoutError as error:
            raised = error
    torch.cuda.synchronize()  # the wait is released, at the latest when the capture is over
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (logged, refusal, type(raised).__name__))
    assert {words[2] for words in told} == {"PeerTimeoutError"}
    if relaxed:
        assert told[1][:2] == ("", "")
    else:
        assert told[1][0] and told[1][1], told


@pytest.mark.usefixtures("own_gpus")
def test_between_nodes_by_nvshmem(device, monkeypatch):
    """Every rank a node of its own, simulated; with shapes that only the sender knows, too."""
    pytest.importorskip("nvshmem.core")
    from ditron_train.pp import PipelineContext

    if dist.get_world_size() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("DITRON_TRANSPORT", "nvshmem")
    monkeypatch.setattr("ditron_train.pp.context.node_of_process", lambda: (str(dist.get_rank()),))
    group = dist.new_group(list(range(dist.get_world_size())))
    context = PipelineContext(group, device, with_network=True)
    context.reserve(9 << 20)
    assert [type(end).__name__ for end in context.local_senders] == ["NvshmemSender"] * 2 and context.channel is None
    right = True
    for variable in (False, True):
        for index in range(8):
            right &= base._swap(context, index, (9 << 20) - index * 1000, device, variable)
    torch.cuda.synchronize()
    context.check()
    assert base._agree(device, right)
    context.close()
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("own_gpus")
def test_megatron_schedules_have_the_bits_of_native(device, path, monkeypatch):
    stages = dist.get_world_size()
    if stages < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("DITRON_POLICY", "bits")
    for chunks in (None, 2):
        with base._megatron(stages, chunks=chunks) as workers:
            from megatron.core import parallel_state

            import ditron_train.megatron

            case = workers.Case(
                stages, 2 * stages, chunks=chunks, dtype=torch.bfloat16, device="cuda", batched=chunks is None
            )
            native = workers.train(case)
            ditron_train.megatron.apply(features="pp")
            before = workers.messages_of_fused()
            fused = workers.train(case, chunks is not None, False)
            sent = workers.messages_of_fused() - before
            ditron_train.megatron.restore()
            assert base._agree(device, all(torch.equal(a, b) for a, b in zip(native, fused)))
            assert sent > 0 or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
