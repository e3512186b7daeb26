"""``SymmetricArena``: the symmetric memory of one process group, carved by name and grown collectively."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from ditron_train.runtime.device import is_capturing, with_index
from ditron_train.runtime.errors import ArenaError
from ditron_train.runtime.groups import GroupCache, check_member, forget_destroyed_groups, unwrapped, world_group
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.exchange import exchange
from ditron_train.symm.transport import Segment, Transport
from ditron_train.symm.transport_choice import select_transport

_ALIGNMENT_BYTES = 256


class SymmetricTensor:
    """A tensor that exists at the same place in every group rank's memory.

    Attributes:
        segment: The allocation that holds it, which may be larger.
        shape: Of each rank's copy.
        local: This rank's copy, of the shape and dtype that was asked for.
        addresses: int64 tensor ``[world_size]`` on the arena's device: base address of each group rank's copy as seen
            from this rank (0 if it cannot be addressed); kernels index it by *group* rank.
        host_addresses: The same as a list.
    """

    def __init__(self, segment: Segment, shape: tuple[int, ...], dtype: torch.dtype, addresses: torch.Tensor) -> None:
        self.segment = segment
        self.shape = tuple(shape)
        self._dtype = dtype
        self.addresses = addresses
        self.host_addresses = segment.addresses
        self.local = self._view(segment.local)

    def _view(self, storage: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():  # an evaluation may be first; training will write to the same tensor
            with torch.inference_mode(False):
                return self._view(storage)
        num_bytes = math.prod(self.shape) * self._dtype.itemsize
        return storage[:num_bytes].view(self._dtype).view(self.shape)

    def peer(self, rank: int) -> torch.Tensor:
        """Group rank ``rank``'s copy, mapped into this process.

        Raises:
            ArenaError: That rank's memory cannot be addressed from here (another node).
        """
        mapped = self.segment.peers[rank]
        if mapped is None:
            raise ArenaError(f"the memory of group rank {rank} cannot be addressed from this rank")
        return self._view(mapped)


class SymmetricArena:
    """Symmetric memory of one process group.

    Every call that allocates is collective: all ranks of the group call it with the same name, shape and dtype in the
    same order (ops make sure of it by comparing signatures first). Memory that a captured CUDA graph may still use is
    kept until ``close``.

    Args:
        group: The process group; addresses are indexed by rank in it.
        device: Where the memory is; ``cpu`` takes the ``shm`` transport.
        transport: ``torch``, ``nvshmem``, ``shm`` or ``None`` for ``DITRON_TRANSPORT``.

    Raises:
        NotSupportedError: This rank is not in the group.
        ArenaError: On every rank alike: transport not available, peers out of reach, cap or memory exceeded.

    Attributes:
        transport: Where the memory comes from.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, transport: str | None = None) -> None:
        check_member(group)
        self.group = group
        self.device = torch.device(device)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.group_name = getattr(group, "group_name", "") or f"of {self.world_size}"
        self.transport: Transport = select_transport(group, self.device, transport)
        self._segments: dict[str, tuple[Segment, torch.Tensor]] = {}
        self._kept_for_graphs: list[tuple[Segment, torch.Tensor]] = []  # with its table, which kernels know by address
        self.graph_captured = False
        self._let_go: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of symmetric memory that this rank holds for the group."""
        live = sum(segment.num_bytes for segment, _ in self._segments.values())
        return live + sum(segment.num_bytes for segment, _ in self._kept_for_graphs)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        """Returns the buffer ``name`` as a tensor; collective when it is new or must grow.

        A buffer that grows loses its contents and is zero-filled; smaller requests view the same memory.

        Raises:
            ArenaError: The group's cap (``DITRON_ARENA_BYTES``) or the memory does not hold it; on every rank alike.
        """
        if self.closed:
            raise ArenaError("this arena was closed")
        num_bytes = max(math.prod(shape) * dtype.itemsize, 1)
        if self.capacity_bytes(name) < num_bytes:
            self._grow(name, num_bytes)
        segment, addresses = self._segments[name]
        return SymmetricTensor(segment, shape, dtype, addresses)

    def before_freeing(self, let_go: Callable[[], None]) -> None:
        """Calls the method ``let_go``, as long as its object lives, before buffers are freed, at ``close`` and when
        one has to move: whoever holds views drops them, so that memory is free then and an old and a new buffer are
        never held at once."""
        self._let_go.append(weakref.WeakMethod(let_go))

    def capacity_bytes(self, name: str) -> int:
        """Bytes held for buffer ``name``, 0 if there is none yet (no communication)."""
        held = self._segments.get(name)
        return held[0].num_bytes if held else 0

    @torch.inference_mode(False)  # as in ``SymmetricTensor``
    def _grow(self, name: str, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if is_capturing(self.device):
            raise ArenaError(
                f"buffer {name!r} must grow while a CUDA graph is captured: run the op once before capture"
            )
        cap = get_settings().arena_bytes
        size_after = self.num_bytes + num_bytes - (0 if self.graph_captured else self.capacity_bytes(name))
        requests = exchange(self.group, (name, num_bytes, cap, size_after))
        if len(set(request[:2] for request in requests)) > 1:
            raise ArenaError(f"ranks asked for different symmetric buffers: {[request[:2] for request in requests]}")
        for rank, (_, _, rank_cap, rank_size) in enumerate(requests):
            if rank_cap is not None and rank_size > rank_cap:
                raise ArenaError(
                    f"symmetric buffer {name!r} of {num_bytes} bytes brings group {self.group_name} to {rank_size} "
                    f"bytes, above rank {rank}'s cap DITRON_ARENA_BYTES={rank_cap}"
                )
        self._retire(name)
        segment = self.transport.allocate(self.group, self.device, num_bytes)
        addresses = torch.tensor(segment.addresses, dtype=torch.int64, device=self.device)
        self._segments[name] = (segment, addresses)
        if num_bytes >= 2**20:  # flags and counters are not worth a line
            log_once(
                f"arena {self.group_name} {name} {num_bytes}",
                f"symmetric memory of group {self.group_name} ({self.transport.name}): {name} "
                f"{num_bytes / 2**20:.1f} MiB, {self.num_bytes / 2**20:.1f} MiB in all",
            )

    def _retire(self, name: str) -> None:
        """Collective: takes buffer ``name`` out of use once nobody's kernels can touch it."""
        if name not in self._segments:
            return
        self.quiesce()  # if a rank does not come, the buffer stays
        segment, addresses = self._segments.pop(name)
        self._drop_views()
        if self.graph_captured:
            self._kept_for_graphs.append((segment, addresses))
        else:
            segment.free()

    def _drop_views(self) -> None:
        self._let_go = [reference for reference in self._let_go if reference() is not None]
        for reference in self._let_go:
            let_go = reference()
            if let_go is not None:
                let_go()

    def quiesce(self) -> None:
        """Returns once the devices of all ranks are done with what they were given (collective)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        exchange(self.group, None)

    def close(self) -> None:
        """Frees everything; collective, explicit, never from a finaliser. The arena must not be used afterwards.

        It is freed once the devices of all ranks are done with what they were given, so no peer writes into it any
        more.
        """
        if self.closed:
            return
        self.quiesce()
        self._release()

    def abandon(self) -> None:
        """Frees everything without the peers: for a group that has been destroyed, so that nobody uses it any more."""
        if self.closed:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._release()

    def _release(self) -> None:
        self._drop_views()
        for segment, _ in (*self._segments.values(), *self._kept_for_graphs):
            segment.free()
        self._segments.clear()
        self._kept_for_graphs.clear()
        self.closed = True


_arenas: GroupCache[tuple[dist.ProcessGroup, str], SymmetricArena] = GroupCache(SymmetricArena.abandon)


def get_arena(group: dist.ProcessGroup | None, device: torch.device) -> SymmetricArena:
    """The one arena of ``group`` (``None``: WORLD) on ``device``; made at the first call, which is collective."""
    group = unwrapped(group) if group is not None else world_group()
    device = with_index(device)
    key = (group, str(device))
    arena = _arenas.get(key)
    if arena is None or arena.closed:
        forget_destroyed_groups()  # before memory is taken, not only when the arena is put away
        arena = _arenas[key] = SymmetricArena(group, device)
    return arena


def peak_bytes() -> int:
    """Bytes of symmetric memory that this rank holds in all arenas of ``get_arena``.

    On GPUs the driver allocates them, outside of what torch's allocator has reserved.
    """
    return sum(arena.num_bytes for arena in _arenas.values())


def close_all_arenas(*, keeps_captured: bool = False) -> int:
    """Closes every arena that ``get_arena`` made, in the order in which they were first made: a call of every rank of
    their groups, which that order keeps from waiting for each other in a circle, since making them did not.

    Args:
        keeps_captured: Those whose memory a captured CUDA graph may use stay.

    Returns:
        How many stay.
    """
    forget_destroyed_groups()
    for key, arena in list(_arenas.items()):
        if not (keeps_captured and arena.graph_captured):
            arena.close()
            del _arenas[key]
    return len(_arenas)
