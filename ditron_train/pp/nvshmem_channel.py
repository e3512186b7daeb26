"""What ``nvshmem_endpoints`` use: NVSHMEM memory of a pipeline group, puts with a signal, flags and headers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from ditron_train.pp.kernel_channel import HEADER_LANES, await_flag, await_message_kernel, current_or_none, launch
from ditron_train.pp.messages import LANE_NAMES, Copy, Header, disagreement
from ditron_train.runtime.device import kernel_target
from ditron_train.stream.waits import cyclic_difference
from ditron_train.symm.arena import SymmetricArena
from ditron_train.symm.channel import Channel
from ditron_train.symm.control import RECORD_CHUNK, RECORD_PEER

_NAME = "pp/nvshmem_slots"
SLOT_HEADER_BYTES = 256  # room for the header, and the data behind it aligned
HEADER_BYTES = 8 * HEADER_LANES
_SCRATCH = 2 * len(LANE_NAMES)  # flags behind those of the lanes, which stay 0
_MAX_HEADERS = 4096  # distinct ones; a row is used again that many new shapes later


def make_nvshmem_arena(group: dist.ProcessGroup, device: torch.device) -> SymmetricArena:
    """NVSHMEM memory of a group, on whichever nodes its ranks are (collective).

    Raises:
        ArenaError: nvshmem4py is missing or does not start; on every rank alike.
    """
    return SymmetricArena(group, device, "nvshmem")


class Puts(Protocol):
    """What moves data: to the same place in group rank ``rank``'s memory as a symmetric address of this rank."""

    def put(self, rank: int, copy: Copy, signal: int, value: int, stream: torch.cuda.Stream | None) -> None:
        """Copies, then sets the 64-bit signal; the source may be written again once the stream is past it."""
        ...

    def signal(self, rank: int, signal: int, value: int, stream: torch.cuda.Stream | None) -> None:
        """Sets the signal once the stream has got there."""
        ...


class NvshmemPuts:
    """``Puts`` by NVSHMEM's host calls on a stream. Its addresses are symmetric: those of this rank name the
    peer's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        import nvshmem.bindings

        self._nvshmem: Any = nvshmem.bindings
        self._set = int(nvshmem.bindings.Signal_op.SIGNAL_SET)
        self._pes = [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]

    def put(self, rank: int, copy: Copy, signal: int, value: int, stream: torch.cuda.Stream | None) -> None:
        """See ``Puts``."""
        assert stream is not None
        self._nvshmem.putmem_signal_on_stream(*copy, signal, value, self._set, self._pes[rank], stream.cuda_stream)

    def signal(self, rank: int, signal: int, value: int, stream: torch.cuda.Stream | None) -> None:
        """See ``Puts``."""
        assert stream is not None
        self._nvshmem.signal_op_on_stream(signal, value, self._set, self._pes[rank], stream.cuda_stream)


class NvshmemSlots:
    """Rings of slots, each a header and a message, and one staging buffer a lane (``count``, ``leases``: see
    ``Slots``)."""

    leases = (0, 0)

    def __init__(self, arena: SymmetricArena, count: int) -> None:
        self._arena, self.count, self.num_bytes = arena, count, 0

    def reserve(self, num_bytes: int) -> None:
        """Collective: makes every slot hold ``num_bytes``; no message may be in transit."""
        self.num_bytes = -(-num_bytes // 256) * 256
        rows = len(LANE_NAMES) * (self.count + 1)
        tensor = self._arena.tensor(_NAME, (rows, SLOT_HEADER_BYTES + self.num_bytes), torch.uint8)
        self._base = tensor.local.data_ptr()

    def _data(self, row: int) -> int:
        return self._base + row * (SLOT_HEADER_BYTES + self.num_bytes) + SLOT_HEADER_BYTES

    def in_ring(self, rank: int, lane: int, message: int) -> int:
        """Symmetric address of where the data of the ring's message ``message`` goes, in whichever rank's memory."""
        return self._data(lane * self.count + message % self.count)

    def staging(self, lane: int) -> int:
        """Where data of a lane is put from."""
        return self._data(len(LANE_NAMES) * self.count + lane)


class NvshmemChannel(Channel):
    """Flags of a pipeline group that reaches across nodes (64-bit words of which kernels compare the lower half)."""

    def __init__(self, arena: SymmetricArena, puts: Puts) -> None:
        super().__init__(arena, "pp", 2 * (_SCRATCH + 2), by_address=False)
        self._puts = puts
        self._target = kernel_target(arena.device)
        on_gpu = arena.device.type == "cuda"
        self._headers = torch.zeros((_MAX_HEADERS, HEADER_LANES), dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._rows: dict[tuple[int, ...], int] = {}
        self._seen = torch.zeros((2, HEADER_LANES), dtype=torch.int64, device=arena.device)
        self._load_kernels()
        arena.quiesce()

    def _load_kernels(self) -> None:
        """As ``KernelChannel`` does; NVSHMEM's calls, which may launch kernels of their own, to both neighbours
        too."""
        stream, rank = current_or_none(self), self.arena.rank
        self.wait_for(_SCRATCH, 0, peer=rank, chunk=0, stream=stream)
        nothing = Header((), torch.float32)
        sent = self.header_address(nothing)
        self.wait_for_message(_SCRATCH, 0, sent, nothing, peer=rank, message=0, lane=0, stream=stream)
        for peer in {(rank + 1) % self.arena.world_size, (rank - 1) % self.arena.world_size}:
            self.push(peer, _SCRATCH, 0, Copy(self._address(_SCRATCH + 1), self._address(_SCRATCH + 1), 8), stream)
            self.notify(peer, _SCRATCH, 0, stream)

    def _address(self, index: int) -> int:
        return self.signals.local.data_ptr() + 8 * index

    def header_address(self, header: Header) -> int:
        """Host address, which the device can read, of a header's words."""
        words = tuple(header.to_words())
        row = self._rows.pop(words, None)
        if row is None:
            row = len(self._rows)
            if row == _MAX_HEADERS:
                # The least recently used goes: its last use was enqueued thousands of messages ago.
                row = self._rows.pop(next(iter(self._rows)))
            self._headers[row] = torch.tensor([*words, *header.agreed_words()], device="cpu")
        self._rows[words] = row  # behind all others, which were not used since
        return self._headers.data_ptr() + row * HEADER_BYTES

    def wait_for(self, index: int, epoch: int, *, peer: int, chunk: int, stream: torch.cuda.Stream | None) -> None:
        await_flag(self, self._address(index), epoch, peer=peer, chunk=chunk, stream=stream, target=self._target)

    def wait_for_message(
        self,
        index: int,
        epoch: int,
        sent: int,
        expected: Header,
        *,
        peer: int,
        message: int,
        lane: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """``wait_for``, then compares the header at address ``sent`` with the expected one, on the device."""
        launch(
            await_message_kernel,
            stream,
            self._address(index),
            cyclic_difference(epoch, 0),
            sent,
            self.header_address(expected),
            self._seen,
            self.control,
            peer,
            cyclic_difference(message, 0),
            lane,
            LANES=HEADER_LANES,
            TARGET=self._target,
        )
        if stream is None:
            self.check()

    def notify(self, rank: int, index: int, epoch: int, stream: torch.cuda.Stream | None) -> None:
        self._puts.signal(rank, self._address(index), epoch & 0xFFFFFFFF, stream)

    def push(self, rank: int, index: int, epoch: int, copy: Copy, stream: torch.cuda.Stream | None) -> None:
        """See ``PipelineChannel.push``; both addresses are symmetric ones of this rank."""
        self._puts.put(rank, copy, self._address(index), epoch & 0xFFFFFFFF, stream)

    def describe_mismatch(self, lane: int) -> str:
        sent, expected = (str(Header.from_words(words)) for words in self._seen.cpu().tolist())
        peer, message = (self._record_view[word] for word in (RECORD_PEER, RECORD_CHUNK))
        return disagreement(self.arena.group_name, lane, message, (peer, sent), (self.arena.rank, expected))
