"""What the workers of the arena's tests run, on each rank."""

from __future__ import annotations

import errno
import glob
import os
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError, MismatchError, NotSupportedError, PeerTimeoutError
from ditron_train.symm import Channel, SymmetricArena, close_all_arenas, get_arena, shm_transport
from ditron_train.symm import exchange as exchange_module
from ditron_train.symm.control import CONTROL_TIMEOUT_NS, KIND_MISMATCH, RECORD_EXPECTED, RECORD_KIND, RECORD_STATE
from ditron_train.symm.transport_choice import select_transport

CPU = torch.device("cpu")


def error_of(function) -> str:
    try:
        function()
    except ArenaError as error:
        return str(error)
    return "no error"


def peers_see_writes() -> bool:
    """Each rank writes into every peer's copy at its own place."""
    rank, world = dist.get_rank(), dist.get_world_size()
    arena = get_arena(None, CPU)
    tensor = arena.tensor("test.writes", (world, 8), torch.bfloat16)
    for peer in range(world):
        tensor.peer(peer)[rank].fill_(rank + 1)
    dist.barrier()
    assert tensor.addresses.tolist() == tensor.host_addresses
    assert tensor.addresses[rank] == tensor.local.data_ptr()
    return all(bool((tensor.local[peer] == peer + 1).all()) for peer in range(world))


def grows() -> tuple[int, int]:
    """A buffer keeps its memory while it is large enough, and moves when it grows."""
    arena = get_arena(None, CPU)
    small = arena.tensor("test.growth", (10,), torch.float32)
    again = arena.tensor("test.growth", (5, 2), torch.float32)
    large = arena.tensor("test.growth", (4096,), torch.float32)
    assert again.local.data_ptr() == small.local.data_ptr()
    assert large.local.data_ptr() != small.local.data_ptr()
    assert large.local.numel() == 4096 and not large.local.any()
    return large.segment.num_bytes, arena.num_bytes


def tables_that_graphs_know() -> list[bool]:
    """Whether the table of addresses of a buffer that has moved lives: without a captured graph, and with one, which
    reads it."""
    arena = SymmetricArena(dist.new_group(list(range(dist.get_world_size()))), CPU)
    alive = []
    for captured, size in ((False, 64), (True, 4096), (True, 65536)):
        arena.graph_captured = captured
        table = weakref.ref(arena.tensor("test.moves", (size,), torch.float32).addresses)
        arena.tensor("test.moves", (4 * size,), torch.float32)
        alive.append(table() is not None)
    arena.close()
    return alive


def what_is_held_while_it_grows() -> list[bool]:
    """Whether the memory of a buffer lives when more is taken: of one whose views are dropped, and of one that a graph
    may use."""
    arena = SymmetricArena(dist.new_group(list(range(dist.get_world_size()))), CPU)
    allocate, alive = arena.transport.allocate, []

    class Holder:
        def __init__(self) -> None:
            self.tensor = arena.tensor("test.moves", (16,), torch.float32)
            arena.before_freeing(self.let_go)

        def let_go(self) -> None:
            self.tensor = None

    def watched(*arguments):
        alive.append(segment() is not None)
        return allocate(*arguments)

    for size, captured in ((1024, False), (4096, True)):
        holder, gone = Holder(), Holder()
        del gone
        segment = weakref.ref(arena._segments["test.moves"][0])
        arena.transport.allocate, arena.graph_captured = watched, captured
        arena.tensor("test.moves", (size,), torch.float32)
        arena.transport.allocate = allocate
        assert holder.tensor is None
    holder = Holder()
    arena.close()
    assert holder.tensor is None
    return alive


def overlapping_groups() -> list[float]:
    """Rank 1 of four is in two groups at once; each group has memory of its own, by rank in the group."""
    rank = dist.get_rank()
    groups = {"low": [0, 1], "high": [1, 2, 3]}
    made = {name: dist.new_group(ranks) for name, ranks in groups.items()}
    seen = []
    for name, ranks in groups.items():
        if rank not in ranks:
            continue
        arena = SymmetricArena(made[name], CPU)
        tensor = arena.tensor("test.overlap", (len(ranks),), torch.float32)
        for peer in range(len(ranks)):
            tensor.peer(peer)[ranks.index(rank)] = 10 * len(ranks) + ranks.index(rank)
        dist.barrier(made[name])
        seen += tensor.local.tolist()
        arena.close()
    return seen


def late_writes_and_close_all() -> tuple[list[float], bool, float]:
    """Rank 1, late, writes to its peers just before it closes: what a peer's memory holds once its own call has
    returned."""
    rank, lists = dist.get_rank(), [[0, 1], [1, 2], [0, 1, 2]]
    groups = [dist.new_group(ranks) for ranks in lists]
    close_all_arenas()
    arenas = {number: get_arena(groups[number], CPU) for number, ranks in enumerate(lists) if rank in ranks}
    tensors = {number: arena.tensor("test.late", (1,), torch.float32) for number, arena in arenas.items()}
    kept = [tensor.local for tensor in tensors.values()]
    dist.barrier()
    start_s = time.monotonic()
    if rank == 1:
        time.sleep(0.5)
        for number, tensor in tensors.items():
            for peer in range(len(lists[number])):
                tensor.peer(peer).fill_(number + 1)
    close_all_arenas()
    return [float(local) for local in kept], all(arena.closed for arena in arenas.values()), time.monotonic() - start_s


def above_the_cap() -> tuple[str, str]:
    """One rank has a cap: every rank raises the same words, and the arena goes on working."""
    if dist.get_rank() == 1:
        os.environ["DITRON_ARENA_BYTES"] = "64K"
    try:
        arena = SymmetricArena(dist.new_group(list(range(dist.get_world_size()))), CPU)
        words = error_of(lambda: arena.tensor("test.cap", (1 << 20,), torch.float32))
        arena.tensor("test.cap", (16,), torch.float32)
        arena.close()
        return words, error_of(lambda: arena.tensor("test.cap", (16,), torch.float32))
    finally:
        os.environ.pop("DITRON_ARENA_BYTES", None)


def different_requests() -> str:
    """Ranks that ask for different buffers."""
    arena = SymmetricArena(dist.new_group(list(range(dist.get_world_size()))), CPU)
    return error_of(lambda: arena.tensor("test.request", (100 * (dist.get_rank() + 1),), torch.float32))


def wrong_transport() -> str:
    return error_of(lambda: SymmetricArena(dist.group.WORLD, CPU, "torch"))


def a_peer_does_not_come_while_a_buffer_grows() -> tuple[str, int, list[float]]:
    """What the first rank hears, what the buffer holds then, and both ranks' sums once it has grown."""
    arena = SymmetricArena(dist.new_group(list(range(dist.get_world_size()))), CPU)
    arena.tensor("test.stays", (64,), torch.float32).local.fill_(3)
    words, least = "", exchange_module._LEAST_TIMEOUT_S
    quiesce, exchange_module._LEAST_TIMEOUT_S = arena.quiesce, 1.0
    os.environ["DITRON_TIMEOUT_S"] = "1"

    def without_the_other() -> None:
        if dist.get_rank() == 1:
            fields = dict.fromkeys(("missing_rank", "chunk", "expected_epoch", "seen_epoch", "timeout_s"), 0)
            raise PeerTimeoutError(op="test", group="", waiting_rank=1, **fields)
        quiesce()

    arena.quiesce = without_the_other
    try:
        arena.tensor("test.stays", (128,), torch.float32)
    except PeerTimeoutError as error:
        words = f"rank {error.missing_rank} is missing"
    finally:
        del os.environ["DITRON_TIMEOUT_S"]
        exchange_module._LEAST_TIMEOUT_S = least
    kept = arena.capacity_bytes("test.stays"), arena.tensor("test.stays", (64,), torch.float32).local.unique().tolist()
    arena.close = lambda: None  # its ranks are out of step
    return words, *kept


def unknown_transport() -> str:
    return error_of(lambda: SymmetricArena(dist.group.WORLD, CPU, "shmem"))


def longest_deadline() -> int:
    os.environ["DITRON_TIMEOUT_S"] = "1e30"
    try:
        return int(Channel(get_arena(None, CPU), "test.patient", 1).control[CONTROL_TIMEOUT_NS])
    finally:
        del os.environ["DITRON_TIMEOUT_S"]


def different_transports() -> str:
    """One rank's environment names another transport."""
    if dist.get_rank() == 1:
        os.environ["DITRON_TRANSPORT"] = "nvshmem"
    try:
        return error_of(lambda: SymmetricArena(dist.group.WORLD, CPU))
    finally:
        os.environ.pop("DITRON_TRANSPORT", None)


def memory_is_full(what: str) -> tuple[str, str]:
    """One rank cannot reserve, or not map; every rank raises the same words, and memory is there for the next
    request."""
    arena = SymmetricArena(dist.new_group(list(range(dist.get_world_size()))), CPU)
    right = shm_transport.map_file

    def full(path: str, num_bytes: int, create: bool):
        if create == (what == "reserve"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return right(path, num_bytes, create)

    if dist.get_rank() == 1:
        shm_transport.map_file = full
    try:
        words = error_of(lambda: arena.tensor("test.full", (16,), torch.float32))
    finally:
        shm_transport.map_file = right
    arena.tensor("test.full", (16,), torch.float32)
    arena.close()
    return words, ", ".join(os.path.basename(path) for path in glob.glob(f"/dev/shm/ditron-{os.getpid()}-*"))


def torch_between_nodes() -> str:
    """Of two ranks that are two nodes, asked for the transport of one."""
    world = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:  # this process runs other tests' workers, too
        patch.setenv("GROUP_RANK", str(dist.get_rank()))
        return error_of(lambda: select_transport(world, torch.device("cuda"), "torch"))


def peers_out_of_reach() -> tuple[str, str]:
    """Memory that only its own rank can address, as between nodes without NVSHMEM."""
    arena = SymmetricArena(dist.new_group(list(range(dist.get_world_size()))), CPU)
    rank, allocate = arena.rank, arena.transport.allocate

    def alone(group, device, num_bytes):
        segment = allocate(group, device, num_bytes)
        segment.peers = [peer if at == rank else None for at, peer in enumerate(segment.peers)]
        segment.addresses = [address if at == rank else 0 for at, address in enumerate(segment.addresses)]
        return segment

    arena.transport.allocate = alone
    tensor = arena.tensor("test.alone", (16,), torch.float32)
    assert tensor.peer(rank) is not None
    words = error_of(lambda: tensor.peer(1 - rank))
    try:
        Channel(arena, "test.alone", 4)
    except NotSupportedError as error:
        return words, str(error)
    finally:
        arena.close()
    return words, "no error"


def signals_grow_with_the_epoch() -> list[int]:
    """Flags that are added after a wrap must not be ahead of the epoch."""
    channel = Channel(get_arena(None, CPU), "test.signals", 4, first_epoch=2**31 + 5)
    channel.reserve_signals(4000)
    return channel.signals.local.unique().tolist()


def flags_where_more_find_no_room() -> tuple[str, bool, list[int]]:
    """The error, whether the arena still holds the flags that the channel uses, and what they are."""
    arena = get_arena(None, CPU)
    channel, allocate = Channel(arena, "test.no_room", 4, first_epoch=6), arena.transport.allocate

    def full(group, device, num_bytes):
        if num_bytes > 16_000:
            raise ArenaError("no room")
        return allocate(group, device, num_bytes)

    arena.transport.allocate = full
    try:
        words = error_of(lambda: channel.reserve_signals(4000))
    finally:
        arena.transport.allocate = allocate
    held = arena._segments["test.no_room/signals"][0]
    return words, channel.signals.segment is held, channel.signals.local.tolist()


def flags_after_another_channel() -> list[int]:
    """What a channel finds where one of the same name was before; this rank's flags had been set by then."""
    arena = get_arena(None, CPU)
    Channel(arena, "test.again", 4).signals.local.fill_(7)
    return Channel(arena, "test.again", 4).signals.local.tolist()


def who_is_missing(recorded: int) -> tuple[int, int, int, int]:
    """What the error names when a wait for rank ``recorded``'s rows ran out, and of three ranks the last never began
    its call."""
    channel = Channel(get_arena(None, CPU), f"test.missing{recorded}", 1)
    epoch = 2**31 + 3  # past the wrap
    for rank in range(3):
        channel.ready.local[epoch & 1, rank, 0] = epoch - 2**32 - (2 if rank == 2 else 0)
    channel.record_timeout(peer=recorded, chunk=5, expected_epoch=epoch - 2**32, seen_epoch=epoch - 2**32 - 1)
    try:
        channel.check()
    except PeerTimeoutError as error:
        return error.missing_rank, error.chunk, error.seen_epoch - error.expected_epoch, error.waiting_rank
    raise AssertionError("no error")


def words_of_a_mismatch() -> str:
    """The error of three ranks that differ, read as soon as rank 0's signal is there: the last one's comes 0.3 s
    later."""
    channel = Channel(get_arena(None, CPU), "test.mismatch", 1, signature_fields=("elements",))
    epoch = 7
    signals = channel.ready.local[epoch & 1]

    def arrive(ranks) -> None:
        for rank in ranks:
            signals[rank, 1] = 10 + rank
            signals[rank, 0] = epoch

    arrive(range(2))
    late = threading.Timer(0.3, arrive, [[2]])
    late.start()
    words = {RECORD_KIND: KIND_MISMATCH, RECORD_EXPECTED: epoch, RECORD_STATE: 1}
    for word, value in words.items():
        channel._record_view[word] = value
    try:
        channel.check()
    except MismatchError as error:
        return str(error)
    finally:
        late.join()
    raise AssertionError("no error")
