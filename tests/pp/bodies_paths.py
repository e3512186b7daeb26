"""Bodies of the tests of the paths that take no copy engine: those of ``bodies_pp``, with another path under them."""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from typing import Any

import bodies_pp as bodies
import torch
import torch.distributed as dist


class _SharedMemoryPuts:
    """Stands in for NVSHMEM between processes of one machine: the same calls on memory that all of them have
    mapped."""

    def __init__(self, arena: Any) -> None:
        self._arena = arena

    def _there(self, rank: int, address: int) -> int:
        for segment, _ in self._arena._segments.values():
            offset = address - segment.local.data_ptr()
            if 0 <= offset < segment.num_bytes:
                return segment.addresses[rank] + offset
        raise AssertionError("not a symmetric address")

    def put(self, rank, copy, signal, value, stream) -> None:
        assert stream is None and self._there(rank, copy.source)
        ctypes.memmove(self._there(rank, copy.destination), copy.source, copy.num_bytes)
        self.signal(rank, signal, value, stream)

    def signal(self, rank, signal, value, stream) -> None:
        ctypes.c_uint64.from_address(self._there(rank, signal)).value = value


@contextmanager
def _nvshmem_on_cpu():
    from ditron_train.pp import context
    from ditron_train.symm.arena import SymmetricArena

    made: list[Any] = []

    def make_arena(group, device):
        made.append(SymmetricArena(group, device, "shm"))
        return made[-1]

    before = context.make_nvshmem_arena, context.NvshmemPuts
    context.make_nvshmem_arena, context.NvshmemPuts = make_arena, lambda group: _SharedMemoryPuts(made[-1])
    try:
        yield
    finally:
        context.make_nvshmem_arena, context.NvshmemPuts = before


def on_path(path: str, body: str, *arguments: Any) -> Any:
    """The body of that name with ``DITRON_PP_PATH=path``."""
    os.environ["DITRON_PP_PATH"] = path
    try:
        with _nvshmem_on_cpu():
            return (globals().get(body) or getattr(bodies, body))(*arguments)
    finally:
        del os.environ["DITRON_PP_PATH"]


def ends() -> tuple[list[str], bool]:
    """Kinds of this rank's channels, then of its ends, and whether anything is leased."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header

    context = bodies.make_context(256)
    exchange(context, send_next=torch.ones(8), recv_prev=Header((8,), torch.float32))["recv_prev"].wait()
    dist.barrier()
    parts = (context.channel, context._nvshmem_channel, *context.local_senders, *context.local_receivers)
    names = [type(part).__name__ for part in parts]
    return names, any(sender is not None and sender.leased for sender in context.local_senders)


def every_size() -> bool:
    """Sizes and addresses that are not multiples of 16, the smallest, and none."""
    from ditron_train.pp import exchange
    from ditron_train.pp.messages import Header

    rank, world = dist.get_rank(), dist.get_world_size()
    context = bodies.make_context(1 << 18, 2)
    right = True
    for index, (size, offset) in enumerate(
        [(1, 0), (0, 0), (15, 0), (16, 0), (1000, 3), (65_536, 0), (65_551, 0), (70_001, 1)]
    ):
        data = bodies.payload(rank, 0, index, (size + offset,), torch.uint8)[offset:]
        handle = exchange(context, send_next=data, recv_prev=Header((size,), torch.uint8))["recv_prev"]
        handle.wait()
        expected = bodies.payload((rank - 1) % world, 0, index, (size + offset,), torch.uint8)[offset:]
        right &= torch.equal(handle.tensor, expected)
    dist.barrier()
    return right


def flags_of_a_second_context() -> tuple[int, list[int]]:
    """Flags in symmetric memory: messages that came right, and the flags once another context of the group is made."""
    from ditron_train.pp.mailbox import Mailbox

    register, Mailbox._register = Mailbox._register, lambda self, group, device: None
    try:
        right = bodies.ring(10, 2, (33,), torch.float32, False)
        return right, bodies.make_context(64).channel.signals.local.tolist()
    finally:
        Mailbox._register = register


def mixed_nodes(near: str) -> tuple[bool, list[str]]:
    """Four ranks on two nodes: one neighbour by ``near``, the other by NVSHMEM; the channels to them, the next one's
    first."""
    from ditron_train.pp import paths
    from ditron_train.pp.messages import Header

    rank = dist.get_rank()
    os.environ["NCCL_HOSTID"] = str(rank // 2)
    inter_node_path, paths.inter_node_path = paths.inter_node_path, lambda requested, transport: paths.NVSHMEM
    os.environ["DITRON_PP_PATH"] = near
    try:
        with _nvshmem_on_cpu():
            context = bodies.make_context(100)
        header = Header((25,), torch.float32)
        right = True
        for index in range(20):
            if index == 10:
                context.reserve(1000)
                header = Header((125,), torch.float32)
            right &= bodies.swap(context, index, header)
            dist.barrier()
        names = [type(end.channel).__name__ for end in context.local_senders]
        context.close()
        return right and context.closed and context.network is None, names
    finally:
        paths.inter_node_path = inter_node_path
        del os.environ["NCCL_HOSTID"], os.environ["DITRON_PP_PATH"]


def different_paths() -> str:
    """The ranks do not ask for the same path."""
    os.environ["DITRON_PP_PATH"] = ("kernel", "copy")[dist.get_rank() % 2]
    try:
        bodies.make_context(64)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del os.environ["DITRON_PP_PATH"]
    return "no error"
