"""What the workers of NVSHMEM's tests run, with a stand-in for nvshmem4py: memory of this process, no peer in
reach."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import types
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError
from ditron_train.symm import SymmetricArena, start_nvshmem
from ditron_train.symm.nvshmem_transport import NvshmemTransport

CPU = torch.device("cpu")
RESERVE_BYTES = 10 * 4096


class _UniqueId:
    """128 bytes at an address."""

    def __init__(self, content: bytes) -> None:
        self.memory = ctypes.create_string_buffer(content, len(content))
        self.ptr = ctypes.addressof(self.memory)


@contextlib.contextmanager
def stand_in(*, fails: str | None = None) -> Iterator[None]:
    """nvshmem4py as the transport calls it. ``fails``: on rank 1 this function of it raises, or ``import`` does."""
    failing = fails if dist.get_rank() == 1 else None

    def function(name, result):
        def call(*_, **__):
            if name == failing:
                raise RuntimeError(f"{name} does not work here")
            return result

        return call

    uid = _UniqueId(b"\0" * 128 if dist.get_rank() else bytes(range(128)))

    def init(*, uid, **_):
        assert uid.memory.raw == bytes(range(128)), "the first rank's"
        return function("init", None)()

    core = types.SimpleNamespace(
        get_unique_id=function("get_unique_id", uid),
        init=init,
        tensor=function("tensor", torch.full((RESERVE_BYTES,), 7, dtype=torch.uint8)),
    )
    bindings = types.SimpleNamespace(
        ptr=lambda address, pe: 0, uniqueid_dtype=types.SimpleNamespace(itemsize=len(uid.memory))
    )
    package = types.ModuleType("nvshmem")
    package.core, package.bindings = core, bindings
    cuda_core = types.SimpleNamespace(Device=lambda index: types.SimpleNamespace(set_current=lambda: None))
    modules = {"nvshmem": package, "nvshmem.core": core, "nvshmem.bindings": bindings,
               "cuda": types.ModuleType("cuda"), "cuda.core": cuda_core}  # fmt: skip
    if failing == "import":
        modules["nvshmem"] = None
    before = {name: sys.modules.get(name) for name in modules}
    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, lambda device=None: None
    sys.modules.update(modules)
    try:
        yield
    finally:
        torch.cuda.synchronize = synchronize
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})
        NvshmemTransport._instance, NvshmemTransport._unsupported_reason = None, ""


def error_of(group: dist.ProcessGroup | None) -> str:
    try:
        NvshmemTransport.get(dist.group.WORLD if group is None else group, CPU)
    except ArenaError as error:
        return str(error)
    return "no error"


def one_rank_fails(what: str) -> tuple[str, str]:
    """What each rank hears where one cannot, and then in a group of its own; NVSHMEM can be started when it is put
    right."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with stand_in(fails=what):
        words = error_of(None), error_of(alone)
    with stand_in():
        assert error_of(None) == error_of(alone) == "no error"
    return words


def a_part_of_the_job() -> tuple[list[str], float]:
    """What the groups of some ranks hear before NVSHMEM is started and after, each without the others, and how
    soon."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    words, start_s = [], time.monotonic()
    with stand_in():
        if rank < 2:
            words.append(error_of(pair))
        seconds = time.monotonic() - start_s
        start_nvshmem("cpu")
        dist.barrier()
        if rank < 2:
            words.append(error_of(pair))
        start_nvshmem("cpu")
    return words, seconds


def different_reserves() -> str:
    os.environ["DITRON_ARENA_BYTES"] = str(4096 * (1 + dist.get_rank()))
    try:
        with stand_in():
            NvshmemTransport.get(dist.group.WORLD, CPU)
    except ArenaError as error:
        return str(error)
    finally:
        del os.environ["DITRON_ARENA_BYTES"]
    return "no error"


def groups_carve_from_one_reserve() -> tuple[list[list[tuple[int, int]]], str]:
    """Free bytes of this rank after each step: two overlapping groups, buffers that grow, arenas that close."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    pages = []
    with stand_in():
        transport = NvshmemTransport.get(dist.group.WORLD, CPU)
        arenas = {}
        for number, group in enumerate(groups):
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                arenas[number] = _arena(group, transport)
                assert not arenas[number].tensor("test.a", (4096,), torch.uint8).local.any()
            pages.append(_pages(transport))
        words = "no error"
        if 0 in arenas:
            for size in (2, 3, 2, 4):
                arenas[0].tensor("test.a", (4096 * size,), torch.uint8)
                pages.append(_pages(transport))
            try:
                arenas[0].tensor("test.b", (4096 * 8,), torch.uint8)
            except ArenaError as error:
                words = str(error)
            arenas[0].close()
            pages.append(_pages(transport))
    return pages, words


def memory_that_one_rank_copies() -> tuple[str, list[tuple[int, int]]]:
    """What each rank hears where torch copies a peer's memory on rank 1 alone, and its free bytes then."""
    from ditron_train.symm import nvshmem_transport

    mapped = nvshmem_transport.DeviceBytes
    with stand_in():
        transport = NvshmemTransport.get(dist.group.WORLD, CPU)
        if dist.get_rank() == 1:
            sys.modules["nvshmem"].bindings.ptr = lambda address, pe: 4096
            nvshmem_transport.DeviceBytes = lambda address, num_bytes: torch.zeros(num_bytes, dtype=torch.uint8)
        try:
            transport.allocate(dist.group.WORLD, CPU, 4096)
        except ArenaError as error:
            return str(error), _pages(transport)
        finally:
            nvshmem_transport.DeviceBytes = mapped
    return "no error", []


def _arena(group: dist.ProcessGroup, transport: NvshmemTransport) -> SymmetricArena:
    arena = SymmetricArena(group, CPU)
    arena.transport = transport
    return arena


def _pages(transport: NvshmemTransport) -> list[tuple[int, int]]:
    return [(low // 4096, high // 4096) for low, high in transport._reserve.gaps]
