"""Bodies of the tests of ``ditron_train.pp``: each runs on every rank of a gloo world."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.support.patience import Lateness

CPU = torch.device("cpu")


def payload(sender: int, lane: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What ``sender`` sends as message ``index`` of a lane: bits that differ between all messages."""
    count = 1
    for size in shape:
        count *= size
    generator = torch.Generator().manual_seed(sender * 1_000_003 + lane * 500_009 + index)
    num_bytes = count * dtype.itemsize
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def make_context(num_bytes: int, num_slots: int | None = None, **options):
    from ditron_train.pp import PipelineContext

    context = PipelineContext(dist.group.WORLD, CPU, num_slots=num_slots, **options)
    context.reserve(num_bytes)
    return context


def ring(messages: int, num_slots: int, shape: tuple[int, ...], dtype: torch.dtype, jitter: bool) -> int:
    """Every rank sends ``messages`` on both lanes to its neighbours; returns how many arrived with the right bits."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header

    rank, world = dist.get_rank(), dist.get_world_size()
    header = Header(shape, dtype)
    context = make_context(payload(0, 0, 0, shape, dtype).numel() * dtype.itemsize, num_slots)
    delays = random.Random(rank)
    right = 0
    for index in range(messages):
        if jitter and delays.random() < 0.1:
            time.sleep(delays.random() * 0.004)
        handles = exchange(
            context,
            send_next=payload(rank, 0, index, shape, dtype),
            send_prev=payload(rank, 1, index, shape, dtype),
            recv_prev=header,
            recv_next=header,
        )
        order = ["recv_prev", "recv_next", "send_next", "send_prev"]
        delays.shuffle(order)
        for name in order:
            handles[name].wait()
        right += same_bits(handles["recv_prev"].tensor, payload((rank - 1) % world, 0, index, shape, dtype))
        right += same_bits(handles["recv_next"].tensor, payload((rank + 1) % world, 1, index, shape, dtype))
    return right


def random_program(seed: int, num_slots: int) -> bool:
    """Random sizes, types, prefetched receives and delays; the same program on all ranks, in lock step or ahead."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header

    rank, world = dist.get_rank(), dist.get_world_size()
    program, own = random.Random(seed), random.Random(seed * 31 + rank)
    context = make_context(1 << 18, num_slots)
    waiting: list[tuple] = []
    right = True
    for index in range(60):
        dims = [program.randint(0, 40) for _ in range(program.randint(0, 3))]
        dtype = program.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
        lane = program.randint(0, 1)
        prefetch = program.randint(0, 3)
        shape = tuple(dims)
        name, source = (("recv_prev", (rank - 1) % world), ("recv_next", (rank + 1) % world))[lane]
        send = {("send_next", "send_prev")[lane]: payload(rank, lane, index, shape, dtype)}
        if own.random() < 0.2:
            time.sleep(own.random() * 0.005)
        handles = exchange(context, **send, **{name: Header(shape, dtype)}, may_lease=own.random() < 0.7)
        waiting.append((handles[name], payload(source, lane, index, shape, dtype)))
        while len(waiting) > prefetch:
            handle, expected = waiting.pop(0)
            handle.wait()
            right &= same_bits(handle.tensor, expected)
    for handle, expected in waiting:
        handle.wait()
        right &= same_bits(handle.tensor, expected)
    return right


def slow_neighbour(num_slots: int) -> tuple[int, bool]:
    """Rank 0 sends as fast as it can to rank 1, which begins when all slots are full and is slow; returns how far
    ahead the sender ever got."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header

    rank = dist.get_rank()
    header = Header((1000,), torch.float32)
    context = make_context(4000, num_slots, num_leases=0)
    ahead, right = 0, True
    for index in range(12):
        if rank == 0:
            exchange(context, send_next=payload(0, 0, index, *_of(header)))
            ahead = max(ahead, index + 1 - int(_own_flag(context, 2)))
            if index + 1 == num_slots:
                dist.barrier()
        else:
            if index == 0:
                dist.barrier()
            time.sleep(0.02)
            handle = exchange(context, recv_prev=header)["recv_prev"]
            handle.wait()
            right &= same_bits(handle.tensor, payload(0, 0, index, *_of(header)))
    dist.barrier()
    return ahead, right


def received_tensors_are_kept(seed: int, num_slots: int, num_leases: int) -> tuple[bool, int]:
    """Received tensors are used in place and let go of in any order, also after the slots have grown; returns whether
    their contents stood, and how many messages were leased."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header

    rank, world = dist.get_rank(), dist.get_world_size()
    draw = random.Random(seed * 31 + rank)
    context = make_context(1 << 10, num_slots, num_leases=num_leases)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    right = True
    for index in range(60):
        if index == 30:
            context.reserve(1 << 11)
        shape = (256 if index < 30 else 512,)
        handles = exchange(
            context,
            send_next=payload(rank, 0, index, shape, torch.float32),
            send_prev=payload(rank, 1, index, shape, torch.float32),
            recv_prev=Header(shape, torch.float32),
            recv_next=Header(shape, torch.float32),
        )
        for lane, name, source in ((0, "recv_prev", (rank - 1) % world), (1, "recv_next", (rank + 1) % world)):
            handles[name].tensor.requires_grad_(True)
            handles[name].wait()
            assert handles[name].tensor.is_leaf and handles[name].tensor._base is None
            kept.append((handles[name].tensor, payload(source, lane, index, shape, torch.float32)))
        del handles
        while len(kept) > draw.randint(0, 14):
            tensor, expected = kept.pop(draw.randrange(len(kept)))
            right &= same_bits(tensor.detach(), expected)
            del tensor
    right &= all(same_bits(tensor.detach(), expected) for tensor, expected in kept)
    dist.barrier()
    return right, sum(sender.leased for sender in context.local_senders)


def _of(header):
    return header.shape, header.dtype


def _own_flag(context, index: int) -> torch.Tensor:
    """This rank's flag, one int32, wherever it is; of NVSHMEM's 64-bit signals the lower half."""
    channel = context.channel
    if channel is None:
        return context._nvshmem_channel.signals.local[2 * index]
    if not channel.flags_in_host:
        return channel.signals.local[index]
    word = (ctypes.c_int32 * 1).from_address(channel.mailbox.flag_host_address(dist.get_rank(), index))
    return torch.frombuffer(word, dtype=torch.int32)[0]


def swap(context, index: int, header, variable_shapes: bool = False) -> bool:
    """One message like ``header`` on both lanes; whether what arrives are the bits that both neighbours sent."""
    from ditron_train.pp import exchange

    rank, world = dist.get_rank(), dist.get_world_size()
    handles = exchange(
        context,
        send_next=payload(rank, 0, index, *_of(header)),
        send_prev=payload(rank, 1, index, *_of(header)),
        recv_prev=header,
        recv_next=header,
        variable_shapes=variable_shapes,
    )
    for handle in handles.values():
        handle.wait()
    right = same_bits(handles["recv_prev"].tensor, payload((rank - 1) % world, 0, index, *_of(header)))
    return right & same_bits(handles["recv_next"].tensor, payload((rank + 1) % world, 1, index, *_of(header)))


def wrap_around() -> bool:
    """Counters that pass 2**31 and 2**32: nothing is lost, doubled or waited for forever."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header

    rank, world = dist.get_rank(), dist.get_world_size()
    right = True
    for start in (2**31 - 5, 2**32 - 5):
        context = make_context(4096, 2)
        for lane in (0, 1):
            context.local_senders[lane].messages = context.local_receivers[lane].messages = start
            for end in (context.local_senders[lane], context.local_receivers[lane]):
                end._fragments = end._ring_messages = start
            for flag in (lane, 2 + lane):
                _own_flag(context, flag).fill_((start + 2**31) % 2**32 - 2**31)
            if context.channel is not None:
                context.channel.mailbox.headers.acknowledge(lane, start)
        dist.barrier()
        for index in range(20):
            data = payload(rank, 0, index, (9,), torch.float32)
            handle = exchange(context, send_next=data, recv_prev=Header((9,), torch.float32))["recv_prev"]
            handle.wait()
            right &= same_bits(handle.tensor, payload((rank - 1) % world, 0, index, (9,), torch.float32))
        dist.barrier()
    return right


def _set_deadline(context: Any, seconds: float) -> None:
    """Of waits for peers from now on."""
    from ditron_train.symm.control import CONTROL_TIMEOUT_NS

    for channel in (context.channel, context._nvshmem_channel):
        if channel is not None:
            channel.timeout_s = seconds
            channel.control[CONTROL_TIMEOUT_NS] = int(seconds * 1e9)


def dead_neighbour(victim: int, slots: int, deadline_s: float) -> float:
    """One rank dies in the middle; returns how long the others took to raise after that, less what the machine was
    late by."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header
    from ditron_train.runtime.errors import PeerTimeoutError

    rank = dist.get_rank()
    header = Header((64,), torch.float32)
    context = make_context(256, slots)
    try:
        for index in range(50):
            if index == 5:  # until here a busy machine may be as late as it likes
                _set_deadline(context, deadline_s)
                if rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
            begin_s, late = time.monotonic(), Lateness()
            with late:
                handles = exchange(context, send_next=payload(rank, 0, index, *_of(header)), recv_prev=header)
                handles["recv_prev"].wait()
    except PeerTimeoutError as error:
        assert error.op == "pp" and error.missing_rank != error.waiting_rank
        return time.monotonic() - begin_s - late.seconds
    raise AssertionError("nobody noticed")


def late_neighbour(turns: int, for_slots: bool) -> tuple[float, float]:
    """Rank 1 never sends, or receives (``for_slots``); how long rank 0's error says that it waited, on every rank, and
    how long rank 0 did."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header
    from ditron_train.runtime.errors import PeerTimeoutError

    header = Header((64,), torch.float32)
    context = make_context(256, 2, num_leases=0)
    assert context.channel is not None
    context.channel.turns = turns
    begin_s = time.monotonic()  # on rank 1, which may leave the barrier long after rank 0
    dist.barrier()
    if dist.get_rank() == 0:
        begin_s = time.monotonic()
    try:
        while dist.get_rank() == 0:
            if for_slots:
                exchange(context, send_next=payload(0, 0, 0, *_of(header)))
            else:
                exchange(context, recv_prev=header)["recv_prev"].wait()
        while True:
            context.check()
            time.sleep(0.01)
    except PeerTimeoutError as error:
        assert error.waiting_rank == 0 and f"waited {error.timeout_s:g} s" in str(error)
        return error.timeout_s, time.monotonic() - begin_s


def stalled_stage(stalled: int, deadline_s: float) -> tuple[int, int]:
    """A line of stages in which one takes its message and sends none; the last one waits first. Who waited for whom,
    as every rank is told."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header
    from ditron_train.runtime.errors import PeerTimeoutError

    rank, world = dist.get_rank(), dist.get_world_size()
    header = Header((64,), torch.float32)
    context = make_context(256, 2)
    _set_deadline(context, deadline_s)
    dist.barrier()
    time.sleep(0.2 * (world - rank))
    try:
        if rank > 0:
            exchange(context, recv_prev=header)["recv_prev"].wait()
        if rank != stalled:
            exchange(context, send_next=payload(rank, 0, 0, *_of(header)))
        while True:
            context.check()
            time.sleep(0.01)
    except PeerTimeoutError as error:
        return error.waiting_rank, error.missing_rank


def disagree(case: str) -> str:
    """Neighbours that disagree; returns the error's class and words. Without a mailbox the sender, rank 0, is not
    told: it soon stops to wait."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header
    from ditron_train.runtime.errors import MismatchError

    rank = dist.get_rank()
    context = make_context(4096)
    if rank == 0 and context.channel is None:
        _set_deadline(context, 1.5)
    shape, dtype = (8, 4), torch.float32
    if rank == 1:
        shape, dtype = {"size": ((8, 5), dtype), "dtype": (shape, torch.int32)}[case]
    try:
        for _ in range(1000):
            handles = exchange(context, send_next=torch.zeros(8, 4), recv_prev=Header(shape, dtype))
            handles["recv_prev"].wait()
    except MismatchError as error:
        return f"MismatchError: {error}"
    return "no error"


def failure_of_rank_1() -> tuple[bool, bool, str]:
    """Whether a channel has failed before and after rank 1 records a failure of its own, and what a check raises."""
    from ditron_train.runtime.errors import PeerTimeoutError

    context = make_context(4096)
    before = context.channel.failed
    dist.barrier()
    if dist.get_rank() == 1:
        context.channel.record_timeout(peer=0, chunk=3, expected_epoch=4, seen_epoch=3)
    dist.barrier()
    try:
        context.channel.check()
    except PeerTimeoutError as error:
        return before, context.channel.failed, str(error)
    return before, context.channel.failed, "no error"


def another_shape(num_leases: int) -> bool:
    """Neighbours expect as many elements in other shapes than are sent, which messages without elements have, too;
    whether they get those shapes and the sender's values."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header

    rank, world = dist.get_rank(), dist.get_world_size()
    context, right = make_context(4096, num_leases=num_leases), True
    for index, (sent, expected) in enumerate([((8, 4), (4, 2, 4)), ((8, 4), (32,)), ((0, 4), (7, 0, 3))] * 3):
        handles = exchange(
            context, send_next=payload(rank, 0, index, sent, torch.float32), recv_prev=Header(expected, torch.float32)
        )
        arrived = handles["recv_prev"]
        assert arrived.tensor is not None
        shape_before = tuple(arrived.tensor.shape)
        arrived.wait()
        value = payload((rank - 1) % world, 0, index, sent, torch.float32).view(expected)
        right &= shape_before == expected and same_bits(arrived.tensor, value)
    dist.barrier()
    return right


def variable(sizes: list[int], with_network: bool, num_bytes: int) -> bool:
    """Shapes that only the sender knows, some larger than a slot."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header

    rank, world = dist.get_rank(), dist.get_world_size()
    context = make_context(num_bytes, with_network=with_network)
    right = True
    for index, size in enumerate(sizes):
        shape = (size + rank, 1, 3)
        handles = exchange(
            context,
            send_next=payload(rank, 0, index, shape, torch.bfloat16),
            send_prev=payload(rank, 1, index, shape, torch.bfloat16),
            recv_prev=Header((1, 1, 3), torch.bfloat16),
            recv_next=Header((1, 1, 3), torch.bfloat16),
            variable_shapes=True,
        )
        for handle in handles.values():
            handle.wait()
        for name, source, lane in (("recv_prev", (rank - 1) % world, 0), ("recv_next", (rank + 1) % world, 1)):
            expected = payload(source, lane, index, (size + source, 1, 3), torch.bfloat16)
            right &= same_bits(handles[name].tensor, expected)
    dist.barrier()
    return right


def two_nodes(variable_shapes: bool) -> tuple[bool, list[bool]]:
    """Four ranks, two a node: each has one neighbour in reach and one behind the network."""
    rank = dist.get_rank()
    os.environ["NCCL_HOSTID"] = str(rank // 2)
    try:
        from ditron_train.pp.messages import Header

        context = make_context(1 << 12)
        right = True
        for index in range(25):
            right &= swap(context, index, Header((7, 5), torch.float32), variable_shapes)
        reached = [end is not None for end in context.local_senders]
        dist.barrier()
        context.close()
        assert context.closed and context.network is None
        return right, reached
    finally:
        del os.environ["NCCL_HOSTID"]


def reserve_cases() -> list[str]:
    """What the context refuses, and growth between steps."""
    from ditron_train.pp import PipelineContext, exchange
    from ditron_train.pp.messages import Header

    rank, world = dist.get_rank(), dist.get_world_size()
    logged = []
    alone = [dist.new_group([member]) for member in range(world)][rank]
    try:
        PipelineContext(alone, CPU)
    except Exception as error:
        logged.append(f"{type(error).__name__}: {error}")
    context = make_context(100 + rank)
    assert context.slot_bytes == 256
    try:
        exchange(context, send_next=torch.zeros(65))
    except Exception as error:
        logged.append(f"{type(error).__name__}: {error}")
    context.reserve(260)
    handles = exchange(context, send_next=torch.full((65,), float(rank)), recv_prev=Header((65,), torch.float32))
    handles["recv_prev"].wait()
    assert torch.equal(handles["recv_prev"].tensor, torch.full((65,), float((rank - 1) % world)))
    try:
        exchange(context, send_next=torch.zeros(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1))
    except Exception as error:
        logged.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return logged


def reserve_alone() -> str:
    """Only rank 0 wants larger messages."""
    context = make_context(64)
    if dist.get_rank() == 0:
        try:
            context.reserve(10_000)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    else:
        try:
            for _ in range(200):
                time.sleep(0.05)
                context.check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def contexts_of_one_gpu() -> tuple[list[str], int]:
    """The current GPU, by its name with and without an index; returns the devices of the contexts made, and how many
    were given."""
    from unittest import mock

    from ditron_train.pp import context as module

    made: list[str] = []

    class Made:
        closed, network = False, None

        def __init__(self, group: dist.ProcessGroup, device: torch.device, **options: object) -> None:
            made.append(str(device))

    group = dist.new_group(list(range(dist.get_world_size())))
    with mock.patch.object(module, "PipelineContext", Made), mock.patch("torch.cuda.current_device", lambda: 3):
        given = [module.get_pipeline_context(group, torch.device(name)) for name in ("cuda", "cuda:3", "cuda")]
        for key in [key for key, held in module._contexts.items() if isinstance(held, Made)]:
            del module._contexts[key]
    return made, len({id(context) for context in given})


def arena_after_slots_found_no_room() -> tuple[str, bool]:
    """The error of slots that do not fit, and whether another room goes on with the memory of the same group."""
    from ditron_train.pp import get_pipeline_context
    from ditron_train.runtime.errors import ArenaError
    from ditron_train.tp import all_gather, get_tp_context

    beside, rows = get_tp_context(None, CPU), torch.full((4, 16), float(dist.get_rank()))
    before = all_gather(rows, context=beside)
    context = get_pipeline_context(dist.group.WORLD, CPU)
    context.reserve(1024)
    os.environ["DITRON_ARENA_BYTES"] = str(beside.arena.num_bytes)
    try:
        context.reserve(1 << 24)
        words = "no error"
    except ArenaError as error:
        words = str(error)
    finally:
        del os.environ["DITRON_ARENA_BYTES"]
    assert context.closed
    return words, torch.equal(all_gather(rows, context=beside), before)
