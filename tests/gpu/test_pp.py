"""Pipeline messages on GPUs, under torchrun: the bits that were sent, whatever the timing; the schedules of
megatron-core.

Run with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` and with it unset: with one hardware queue every stream wait blocks all that
is enqueued after it.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

SIZES = [1, 3, 4096, 1_000_003, 8 << 20, (8 << 20) + 2, 33 << 20, 100 << 20]


def _module(name: str, path: Path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def new_context(device):
    """Makes contexts on groups of their own, so that one that failed leaves the next test alone (collective)."""
    if dist.get_world_size() < 2:
        pytest.skip("needs two GPUs")
    from ditron_train.pp import PipelineContext

    made = []

    def make(num_bytes: int, **options):
        group = dist.new_group(list(range(dist.get_world_size())))
        context = PipelineContext(group, device, **options)
        context.reserve(num_bytes)
        made.append(context)
        return context

    yield make
    torch.cuda.synchronize()
    for context in made:
        context.close()
        dist.destroy_process_group(context.group)
    made.clear()
    # What an error's traceback kept: freeing device memory waits for the device, which the next test may hold up.
    gc.collect()


def _payload(sender: int, lane: int, index: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(sender * 1_000_003 + lane * 500_009 + index)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator)


def _neighbours() -> tuple[int, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % world, (rank + 1) % world


def _header(num_bytes: int):
    from ditron_train.pp.messages import Header

    return Header((num_bytes,), torch.uint8)


def _agree(device: torch.device, mine: bool) -> bool:
    verdict = torch.tensor([int(mine)], device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())


def _swap(context, index: int, num_bytes: int, device: torch.device, variable: bool = False) -> bool:
    """One message on both lanes; whether what arrives are the bits that both neighbours sent."""
    from ditron_train.pp import exchange

    rank = dist.get_rank()
    previous, following = _neighbours()
    handles = exchange(
        context,
        send_next=_payload(rank, 0, index, num_bytes, device),
        send_prev=_payload(rank, 1, index, num_bytes, device),
        recv_prev=_header(num_bytes),
        recv_next=_header(num_bytes),
        variable_shapes=variable,
    )
    for handle in handles.values():
        handle.wait()
    right = torch.equal(handles["recv_prev"].tensor, _payload(previous, 0, index, num_bytes, device))
    return right & torch.equal(handles["recv_next"].tensor, _payload(following, 1, index, num_bytes, device))


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_every_size_arrives_on_both_lanes(device, new_context, num_slots):
    context = new_context(max(SIZES), num_slots=num_slots)
    right = all([_swap(context, index, num_bytes, device) for index, num_bytes in enumerate(SIZES * 3)])
    context.channel.synchronize()
    assert _agree(device, right)


def _late_and_freed(context, mebibytes: tuple[float, ...], device: torch.device) -> bool:
    """60 messages round the ring while the device is late here and there and what was sent is freed; whether all came
    right."""
    from ditron_train.pp import exchange

    rank = dist.get_rank()
    previous, _ = _neighbours()
    draw, draw_of_all = random.Random(rank), random.Random(7)
    received = []
    for index in range(60):
        num_bytes = int(draw_of_all.choice(mebibytes) * 2**20)
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randint(1, 3_000_000))
        data = _payload(rank, 0, index, num_bytes, device)
        handles = exchange(context, send_next=data, recv_prev=_header(num_bytes))
        del data
        torch.full((num_bytes,), 255, dtype=torch.uint8, device=device)  # takes freed memory, if there is any
        handles["recv_prev"].wait()
        received.append(handles["recv_prev"].tensor.clone())
        del handles
    torch.cuda.synchronize()
    context.check()
    return all(
        torch.equal(seen, _payload(previous, 0, index, seen.numel(), device)) for index, seen in enumerate(received)
    )


@pytest.mark.parametrize("mebibytes", [(12,), (0.0625, 1, 12)], ids=["large", "mixed"])
def test_late_producers_slow_consumers_and_freed_storage(device, new_context, mebibytes):
    """No host sync between messages: the GPU may be late anywhere, and what is sent is freed and its memory reused;
    small messages and large ones stay in order."""
    assert _agree(device, _late_and_freed(new_context(12 << 20), mebibytes, device))


def test_prefetched_receives_and_a_tensor_overwritten_after_wait(device, new_context):
    from ditron_train.pp import exchange

    rank = dist.get_rank()
    previous, _ = _neighbours()
    num_bytes = 5 << 20
    context = new_context(num_bytes, num_slots=3)
    static = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    waiting, right = [], True
    for index in range(40):
        static.copy_(_payload(rank, 0, index, num_bytes, device))
        handles = exchange(context, send_next=static, recv_prev=_header(num_bytes))
        handles["send_next"].wait()
        waiting.append((index, handles["recv_prev"]))
        while len(waiting) > index % 4:
            which, handle = waiting.pop(0)
            handle.wait()
            right &= torch.equal(handle.tensor, _payload(previous, 0, which, num_bytes, device))
    for which, handle in waiting:
        handle.wait()
        right &= torch.equal(handle.tensor, _payload(previous, 0, which, num_bytes, device))
    context.channel.synchronize()
    assert _agree(device, right)


def test_waiting_on_another_stream_than_the_one_that_posted(device, new_context):
    from ditron_train.pp import exchange

    rank = dist.get_rank()
    previous, _ = _neighbours()
    num_bytes = 20 << 20
    context = new_context(num_bytes)
    side = torch.cuda.Stream(device)
    right = True
    for index in range(10):
        handles = exchange(
            context, send_next=_payload(rank, 0, index, num_bytes, device), recv_prev=_header(num_bytes)
        )
        with torch.cuda.stream(side):
            handles["recv_prev"].wait()
            expected = _payload(previous, 0, index, num_bytes, device)
            right &= torch.equal(handles["recv_prev"].tensor, expected)
        torch.cuda.current_stream().wait_stream(side)
    context.channel.synchronize()
    assert _agree(device, right)


@pytest.mark.usefixtures("own_gpus")
def test_no_kernel_runs(device, new_context):
    """Nothing but copies between GPUs and inside the receiver: no SM of this package."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from ditron_train.pp import exchange

    num_bytes = 16 << 20
    context = new_context(num_bytes)
    data = _payload(dist.get_rank(), 0, 0, num_bytes, device)

    def step() -> None:
        exchange(context, send_next=data, recv_prev=_header(num_bytes))["recv_prev"].wait()

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    names = {event.name for event in profiled.events() if event.device_type == DeviceType.CUDA}
    on_device = {
        name for name in names if not name.startswith(("Memcpy", "Memset", "cuda", "cu", "Activity", "Context"))
    }
    assert not on_device, on_device


@triton.jit
def _spin_kernel(nanoseconds):
    """Every program keeps its place on a multiprocessor for ``nanoseconds``; it waits for nobody."""
    begin = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = begin
    while now - begin < nanoseconds:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@pytest.mark.usefixtures("own_gpus")
def test_messages_arrive_while_no_multiprocessor_has_room(device, new_context):
    """Two blocks of 1,024 threads on each multiprocessor are all it holds: what needs one waits for them. A local copy
    does.

    They stay so long that a host which other jobs keep busy is done with the message in their first half. The GPUs
    have to be this job's alone: beside kernels of another process a message was seen to come after 496 ms. A stream
    that shares its hardware queue with theirs waits for them, too, whatever it does, so they run on several streams in
    turn: what needs a multiprocessor is late beside each of them.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        pytest.skip("with one hardware queue the receiving stream is behind whatever kernel was enqueued before")
    from ditron_train.pp import exchange

    num_bytes, spin_ms = 16 << 20, 400
    context = new_context(num_bytes)
    data = _payload(dist.get_rank(), 0, 0, num_bytes, device)
    grid = (2 * torch.cuda.get_device_properties(device).multi_processor_count,)

    def message() -> None:
        exchange(context, send_next=data, recv_prev=_header(num_bytes))["recv_prev"].wait()

    def arrives_after_ms(side: torch.cuda.Stream) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin, arrived, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record(side)
        with torch.cuda.stream(side):
            _spin_kernel[grid](spin_ms * 1_000_000, num_warps=32)
        end.record(side)
        message()
        arrived.record()
        torch.cuda.synchronize()
        dist.barrier()
        assert begin.elapsed_time(end) >= spin_ms
        return begin.elapsed_time(arrived)

    message()
    _spin_kernel[grid](1000, num_warps=32)
    found_ms = [arrives_after_ms(torch.cuda.Stream(device)) for _ in range(4)]
    assert _agree(device, min(found_ms) < spin_ms / 2), found_ms


@pytest.mark.parametrize("announced", [False, True])
def test_a_silent_neighbour_becomes_an_error_within_the_deadline(device, new_context, monkeypatch, announced):
    """Its host never comes; or it has said what it sends, and the stream that waits for the data has to be
    released."""
    from ditron_train.pp import exchange
    from ditron_train.runtime.errors import PeerTimeoutError

    monkeypatch.setenv("DITRON_TIMEOUT_S", "2")
    context = new_context(1 << 20)
    rank = dist.get_rank()
    begin_s = time.monotonic()
    raised = None
    try:
        if rank == 0 and announced:
            context.local_senders[0].announce(_header(1 << 20))
        if rank == 1:
            exchange(context, recv_prev=_header(1 << 20))["recv_prev"].wait()
            torch.cuda.synchronize()  # blocks until the watchdog releases the stream
        while time.monotonic() - begin_s < 20:
            context.check()
            time.sleep(0.01)
    except PeerTimeoutError as error:
        raised = error
    seconds = time.monotonic() - begin_s
    torch.cuda.synchronize()
    assert _agree(device, raised is not None and seconds < 2 + 5)
    words = [None] * dist.get_world_size()
    dist.all_gather_object(words, str(raised))
    assert len(set(words)) == 1, words


def _disagree(context, device: torch.device, between: Callable[[], None]) -> Exception | None:
    """Rank 1 expects another size than is sent to it; the error that this rank raises, ``between`` called after each
    message."""
    from ditron_train.pp import exchange
    from ditron_train.runtime.errors import DitronError

    rank = dist.get_rank()
    expected = 1000 if rank == 1 else 1024
    raised = None
    try:
        for index in range(400):
            data = _payload(rank, 0, index, 1024, device)
            exchange(context, send_next=data, recv_prev=_header(expected))["recv_prev"].wait()
            between()
    except DitronError as error:
        raised = error
    torch.cuda.synchronize()
    return raised


def _tells_mismatch(raised: Exception | None) -> bool:
    from ditron_train.runtime.errors import MismatchError

    return isinstance(raised, MismatchError) and "expected [1000] uint8" in str(raised)


def test_neighbours_that_disagree(device, new_context):
    raised = _disagree(new_context(1 << 20), device, lambda: time.sleep(0.005))
    assert _agree(device, _tells_mismatch(raised))


def test_two_nodes_on_one_machine(device, monkeypatch):
    if dist.get_world_size() != 4:
        pytest.skip("needs four GPUs")
    from ditron_train.pp import PipelineContext

    rank = dist.get_rank()
    monkeypatch.setenv("NCCL_HOSTID", str(rank // 2))
    context = PipelineContext(dist.new_group(list(range(4))), device)
    num_bytes = 9 << 20
    context.reserve(num_bytes)
    right = [end is not None for end in context.local_senders] == [rank % 2 == 0, rank % 2 == 1]
    for variable in (False, True):
        for index in range(10):
            right &= _swap(context, index, num_bytes - index, device, variable)
    context.channel.synchronize()
    assert _agree(device, right)
    context.close()
    dist.destroy_process_group(context.group)


def test_flags_in_device_memory(device, new_context, monkeypatch):
    """Where CUDA refuses to register host memory: by kernels with one hardware queue, else by copy engine."""
    from ditron_train.pp import exchange
    from ditron_train.runtime.errors import NotSupportedError
    from ditron_train.stream import driver, waits_can_be_released

    monkeypatch.setattr(driver, "register_host_memory", lambda address, num_bytes: None)
    num_bytes = 9 << 20
    if not waits_can_be_released():
        with monkeypatch.context() as asked, pytest.raises(NotSupportedError, match="could not be released"):
            asked.setenv("DITRON_PP_PATH", "copy")
            new_context(num_bytes)
    previous, _ = _neighbours()
    context = new_context(num_bytes)
    assert not context.channel.mailbox.has_flags
    assert type(context.channel).__name__ == ("PipelineChannel" if waits_can_be_released() else "KernelChannel")
    right = True
    for index in range(8):
        data = _payload(dist.get_rank(), 0, index, num_bytes, device)
        handle = exchange(context, send_next=data, recv_prev=_header(num_bytes))["recv_prev"]
        handle.wait()
        right &= torch.equal(handle.tensor, _payload(previous, 0, index, num_bytes, device))
    context.channel.synchronize()
    assert _agree(device, right)


def test_received_tensors_lie_in_their_slots_until_let_go_of(device, new_context):
    """No copy: what arrives is used in place, behind slow kernels, and its slot is not written again before they are
    done."""
    from ditron_train.pp import exchange

    rank = dist.get_rank()
    previous, _ = _neighbours()
    num_bytes = 3 << 20
    context = new_context(num_bytes, num_slots=2, num_leases=4)
    draw = random.Random(rank)
    kept, right = [], torch.ones((), dtype=torch.bool, device=device)
    for index in range(60):
        if index == 30:  # what is leased outlives the memory that the slots grow out of
            num_bytes = 5 << 20
            context.reserve(num_bytes)
        data = _payload(rank, 0, index, num_bytes, device)
        handle = exchange(context, send_next=data, recv_prev=_header(num_bytes))["recv_prev"]
        handle.wait()
        kept.append((handle.tensor, _payload(previous, 0, index, num_bytes, device)))
        del handle
        while len(kept) > draw.randint(0, 6):
            tensor, expected = kept.pop(draw.randrange(len(kept)))
            if draw.random() < 0.3:
                torch.cuda._sleep(2_000_000)
            right &= (tensor == expected).all()
            del tensor
    for tensor, expected in kept:
        right &= (tensor == expected).all()
    context.channel.synchronize()
    assert 0 < context.local_senders[0].leased < 60
    assert _agree(device, bool(right))


LAYOUTS = [(1, 1), (1, 2), (2, 1)]  # of tensor and data parallel groups around the pipeline


@contextmanager
def _megatron(stages: int, tensor: int = 1, chunks: int | None = None):
    """Megatron's groups around a test, with deterministic kernels; yields the bodies of the native tests."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state

    import ditron_train.megatron
    from ditron_train.cpu import megatron_shim as megatron_cpu
    from ditron_train.pp import close_pipeline_contexts
    from tests.support.model_parallel import destroy_groups

    megatron_cpu.allow_torch_norm_with_sequence_parallel()  # torch's norm in the parameters' type
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # the embedding's backward is atomic otherwise
    try:
        yield _module("ditron_native_pp_workers", Path(__file__).parent.parent / "native" / "pp_workers.py")
    finally:
        torch.use_deterministic_algorithms(deterministic)
        ditron_train.megatron.restore()
        parallel_state.destroy_model_parallel()
        megatron_cpu.uninstall()
    # On every rank in the same order, which the end of the process does not promise; not after a failure.
    close_pipeline_contexts()
    destroy_groups()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("tensor, data", LAYOUTS)
@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize("options", [{}, {"variable": True}, {"forward_only": True}, {"tied": True}], ids=str)
def test_megatron_schedules_have_the_bits_of_native(device, chunks, options, tensor, data, monkeypatch):
    stages = dist.get_world_size() // (tensor * data)
    if stages < 2:
        pytest.skip(f"needs {2 * tensor * data} GPUs")
    if (tensor, data) != (1, 1) and options:
        pytest.skip("the plain schedules are enough inside other groups")
    if stages == 2 and chunks and "variable" in options:
        pytest.skip("native mixes up the shapes of the two directions between two ranks")
    monkeypatch.setenv("DITRON_POLICY", "bits")  # messages this small are faster natively
    with _megatron(stages, tensor, chunks) as workers:
        from megatron.core import parallel_state

        import ditron_train.megatron

        case = workers.Case(
            stages, 2 * stages, chunks=chunks, tensor=tensor, dtype=torch.bfloat16, device="cuda",
            batched=stages > 2 or chunks is None, **options,
        )  # fmt: skip
        native = workers.train(case)
        again = workers.train(case)
        assert _agree(device, all(torch.equal(a, b) for a, b in zip(native, again))), "native differs from itself"
        for overlap, warmup_flush in (
            [(False, False)] if chunks is None else [(False, False), (True, False), (True, True)]
        ):
            ditron_train.megatron.apply(features="pp")
            before = workers.messages_of_fused()
            fused = workers.train(case, overlap, warmup_flush)
            sent = workers.messages_of_fused() - before
            ditron_train.megatron.restore()
            assert _agree(device, all(torch.equal(a, b) for a, b in zip(native, fused)))
            assert sent > 0 or parallel_state.is_pipeline_last_stage(ignore_virtual=True)


@pytest.mark.usefixtures("nccl")
def test_the_policy_decides_alike_on_all_stages(device, monkeypatch):
    stages = dist.get_world_size()
    if stages < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("DITRON_POLICY", "strict")
    with _megatron(stages) as workers:
        import ditron_train.megatron
        from ditron_train.policy import gate

        case = workers.Case(stages, stages, dtype=torch.bfloat16, device="cuda", batched=True)
        native = workers.train(case)
        gate.forget("pp")
        ditron_train.megatron.apply(features="pp")
        fused = workers.train(case)
        assert _agree(device, all(torch.equal(a, b) for a, b in zip(native, fused)))
        decided = [None] * stages
        dist.all_gather_object(decided, [answer.reason for answer in gate.answers("pp")])
        assert len(decided[0]) == 1 and all(one == decided[0] for one in decided), decided
