"""``Mailbox``: host memory that the ranks of one node share: flags (its own), message headers (``Headers``), values
(``Values``) and the record of a failure (``Failure``).

Headers are written by the sender's host when it enqueues a message, so the receiver's host can compare what was sent
with what it expects, or learn a shape, without a device sync. Flags are 32-bit words that streams write and wait for;
stored in host memory that every process has registered with CUDA, they can also be read and released by a host without
any CUDA call, whatever the device's queues are blocked on.

Python has no fences, and hosts with Arm's cores make stores visible in any order. So nothing here relies on an order:

* A value of a board, a header and a failure carry a tag or a checksum of all their words and of their number. Until
  each of these words is visible, the reader finds that they do not fit and looks again.
* What is one aligned word is visible as a whole: flags, acknowledgements, how often a slot has come back. The last
  says no more than which value of a flag to wait for. An acknowledgement is stored by who has checked the headers, and
  who reads it stores the next ones: no core makes a store visible before the loads that decide about it.
* What ``await_header`` notes is only read when a missing rank is named, a deadline later.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
import zlib
from array import array
from collections.abc import Callable

import torch
import torch.distributed as dist

from ditron_train.stream import driver
from ditron_train.symm.exchange import exchange, on_all_ranks
from ditron_train.symm.shm_transport import FOLDER, discard_file, map_file

MAX_LEASES = 32  # slots to lease, in each direction
FLAGS = 4 + 2 * MAX_LEASES  # data and credit of two directions, and one for each slot to lease
HEADER_WORDS = 16  # int64 words; the first is the sequence number, the last a checksum
HEADER_DEPTH = 1024  # headers that a sender may be ahead of its receiver's host

_LINE_BYTES = 64  # words that different processes poll are on cache lines of their own
_AGREED, _ANNOUNCED = 0, 1  # boards of a line: two values with their tags each, of even generations and of odd ones
_BOARD_WORDS = 4
_FAULT_BYTES = 4096
_FAULT_WORDS = 9
_FAULT_POSTED = 1 << 32  # in the first word, with the checksum of all the others
_FAULT_READ_S = 1.0
_OFFSET_AGREE = FLAGS * _LINE_BYTES
_OFFSET_READ = _OFFSET_AGREE + _LINE_BYTES
_OFFSET_AWAITED = _OFFSET_READ + 2 * _LINE_BYTES
_OFFSET_RETURNED = _OFFSET_AWAITED + _LINE_BYTES
_OFFSET_HEADERS = _OFFSET_RETURNED + 2 * MAX_LEASES * 8
_ROW_BYTES = -(-(_OFFSET_HEADERS + 2 * HEADER_DEPTH * HEADER_WORDS * 8) // 4096) * 4096


_kept: list[mmap.mmap] = []


class Mailbox:
    """One row of words a rank, in a file of shared memory that is unlinked as soon as all have mapped it.

    Args:
        group: Process group whose ranks all are on this node (collective).
        device: Where the streams run that use the flags; for CUDA the memory is registered with the driver.

    Attributes:
        int64, bytes: All of the memory.
        headers, values, failure: What it holds besides the flags.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._memory = self._map(group)
        self._words = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.bytes = memoryview(self._memory)
        self.int64 = self.bytes.cast("q")
        self._host_base = self._words.data_ptr()
        self._device_base = self._register(group, device)
        self.headers, self.values = Headers(self), Values(self)
        self.failure = Failure(self, self._claim_path)

    def _map(self, group: dist.ProcessGroup) -> mmap.mmap:
        path = os.path.join(FOLDER, f"ditron-pp-{os.getpid()}-{secrets.token_hex(8)}")
        num_bytes = _FAULT_BYTES + self.world_size * _ROW_BYTES
        path_of_first = exchange(group, path)[0]
        self._claim_path = f"{path_of_first}-fault"

        def reserve() -> mmap.mmap | None:
            return map_file(path_of_first, num_bytes, create=True) if self.rank == 0 else None

        def share() -> mmap.mmap:
            return own if own is not None else map_file(path_of_first, num_bytes, create=False)

        try:
            own = on_all_ranks(group, f"reserving {num_bytes} bytes in {FOLDER}", reserve, (OSError,))
            return on_all_ranks(group, "mapping a mailbox", share, (OSError,))
        finally:
            discard_file(path_of_first)  # by every rank: the first may have died

    def _register(self, group: dist.ProcessGroup, device: torch.device) -> int | None:
        """Address of the memory for the device's streams; None if the driver of any rank refuses to register it."""
        if device.type != "cuda":
            return self._host_base
        _kept.append(self._memory)  # what is registered must stay mapped
        with torch.cuda.device(device):
            address = driver.register_host_memory(self._host_base, self._words.numel())
        return address if all(exchange(group, address is not None)) else None

    @property
    def has_flags(self) -> bool:
        """Whether streams can use the flags."""
        return self._device_base is not None

    def _flag_offset(self, rank: int, index: int) -> int:
        return _FAULT_BYTES + rank * _ROW_BYTES + index * _LINE_BYTES

    def flag_address(self, rank: int, index: int) -> int:
        """Address of a flag of ``rank``'s row as this process's streams see it."""
        assert self._device_base is not None
        return self._device_base + self._flag_offset(rank, index)

    def flag_host_address(self, rank: int, index: int) -> int:
        """Address of the same flag for this process's host code."""
        return self._host_base + self._flag_offset(rank, index)

    def flag_value(self, rank: int, index: int) -> int:
        """What a flag holds now."""
        return ctypes.c_int32.from_address(self.flag_host_address(rank, index)).value

    def set_flag(self, rank: int, index: int, value: int) -> None:
        """Sets a flag from the host, if no stream has anything to do with it."""
        ctypes.c_int32.from_address(self.flag_host_address(rank, index)).value = value

    def word(self, rank: int, offset: int) -> int:
        """Where in ``int64`` the word at ``offset`` of ``rank``'s row is."""
        return (_FAULT_BYTES + rank * _ROW_BYTES + offset) // 8


class Headers:
    """Headers of messages: the sender writes into the receiver's row, the receiver says how many it has read."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def _header(self, rank: int, lane: int, sequence: int) -> int:
        slot = lane * HEADER_DEPTH + sequence % HEADER_DEPTH
        return self._mailbox.word(rank, _OFFSET_HEADERS + slot * HEADER_WORDS * 8)

    def has_room(self, rank: int, lane: int, sequence: int) -> bool:
        """Whether header ``sequence`` (from 1) may be written to ``rank`` without losing one that it has not read."""
        return (
            sequence - self._mailbox.int64[self._mailbox.word(rank, _OFFSET_READ + lane * _LINE_BYTES)] <= HEADER_DEPTH
        )

    def write_header(self, rank: int, lane: int, sequence: int, words: list[int]) -> None:
        """Publishes the header of message ``sequence`` to ``rank``; the checksum hides a header of which only a part
        is visible. It depends on the places of words, since the last message may have had the same words elsewhere."""
        assert len(words) == HEADER_WORDS - 2
        place = self._header(rank, lane, sequence)
        self._mailbox.int64[place] = 0
        self._mailbox.int64[place + 1 : place + HEADER_WORDS] = array(
            "q", [*words, zlib.crc32(array("q", [sequence, *words]))]
        )
        self._mailbox.int64[place] = sequence

    def read_header(self, lane: int, sequence: int) -> list[int] | None:
        """Header of message ``sequence`` to this rank, or None if it has not been written yet."""
        place = self._header(self._mailbox.rank, lane, sequence)
        if self._mailbox.int64[place] != sequence:
            return None
        words = self._mailbox.int64[place : place + HEADER_WORDS].tolist()
        if words[0] != sequence or words[-1] != zlib.crc32(array("q", words[:-1])):
            return None
        return words[1:-1]

    def acknowledge(self, lane: int, sequence: int) -> None:
        """Lets senders reuse the headers up to ``sequence``."""
        self._mailbox.int64[self._mailbox.word(self._mailbox.rank, _OFFSET_READ + lane * _LINE_BYTES)] = sequence

    def await_header(self, peer: int, lane: int, sequence: int) -> None:
        """Says that this rank's host waits for header ``sequence``, which ``peer`` is to write."""
        place = self._mailbox.word(self._mailbox.rank, _OFFSET_AWAITED)
        self._mailbox.int64[place : place + 3] = array("q", [peer, lane, sequence])

    def missing_behind(self, peer: int) -> int:
        """Follows the ranks that wait for each other's headers, from ``peer`` on, to the first that waits for none;
        ``peer`` if they wait in a circle."""
        found = peer
        for _ in range(self._mailbox.world_size):
            place = self._mailbox.word(found, _OFFSET_AWAITED)
            awaited, lane, sequence = self._mailbox.int64[place : place + 3].tolist()
            # It has come; or none was waited for.
            if self._mailbox.int64[self._header(found, lane, sequence)] >= sequence:
                return found
            found = awaited
        return peer

    def returned(self, rank: int, lane: int) -> memoryview:
        """How often each slot to lease of ``rank``'s lane has come back, ``[MAX_LEASES]``, to read and to write.

        The flag that the receiver's stream sets when its last use is over is enqueued before the host counts here.
        """
        place = self._mailbox.word(rank, _OFFSET_RETURNED + lane * MAX_LEASES * 8)
        return self._mailbox.int64[place : place + MAX_LEASES]


class Values:
    """A value of every rank, agreed on with a deadline, or announced by each and read later."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._generations = [0, 0]  # of what is agreed on, and of what is announced

    def _put(self, board: int, value: int) -> None:
        self._generations[board] += 1
        place = self._entry(board, self._mailbox.rank)
        self._mailbox.int64[place] = value
        self._mailbox.int64[place + 1] = value ^ self._generations[board]

    def _value_of(self, board: int, rank: int) -> int | None:
        """None until both words are visible: an old value fits the new tag only if it is equal to the new one."""
        place = self._entry(board, rank)
        value = self._mailbox.int64[place]
        return value if value ^ self._mailbox.int64[place + 1] == self._generations[board] else None

    def _entry(self, board: int, rank: int) -> int:
        """A rank that is one call ahead must not overwrite what others still read."""
        return self._mailbox.word(rank, _OFFSET_AGREE) + board * _BOARD_WORDS + 2 * (self._generations[board] % 2)

    def announce(self, value: int) -> None:
        """Announces a value to all ranks, which are to read it (``announced``) before they announce the next one; no
        wait."""
        self._put(_ANNOUNCED, value)

    def announced(self, rank: int) -> int | None:
        """What ``rank`` announced when it had announced as many values as this rank has by now; None: it has not
        yet."""
        return self._value_of(_ANNOUNCED, rank)

    def agree(self, value: int, timeout_s: float, on_poll: Callable[[], None]) -> list[int | None]:
        """Collective: the ``value`` of every rank; None for those that did not come within ``timeout_s``."""
        self._put(_AGREED, value)
        deadline_s = time.monotonic() + timeout_s
        values: list[int | None] = [None] * self._mailbox.world_size
        while any(entry is None for entry in values):
            for rank in range(self._mailbox.world_size):
                if values[rank] is None:
                    values[rank] = self._value_of(_AGREED, rank)
            if time.monotonic() > deadline_s:
                break
            on_poll()
            time.sleep(0.0002)
        return values


class Failure:
    """One failure for all ranks: the first that is written wins.

    Args:
        mailbox: Whose first bytes hold it.
        claim_path: Of a file that one rank alone creates.
    """

    def __init__(self, mailbox: Mailbox, claim_path: str) -> None:
        self._mailbox, self._claim_path = mailbox, claim_path

    def post(self, fields: list[int], text: str = "") -> None:
        """Makes a failure known to all ranks of the node: ``_FAULT_WORDS - 2`` numbers and a text.

        Ranks often fail at the same moment; who creates the claim file writes, and the others wait for what was
        written.
        """
        words = self._mailbox.int64
        try:
            os.close(os.open(self._claim_path, os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            deadline_s = time.monotonic() + 1.0
            while words[0] == 0 and time.monotonic() < deadline_s:
                time.sleep(0.001)
            return
        except OSError:  # the folder is read-only or full by now: of two that write at once the last one is heard
            pass
        try:
            if words[0] == 0:
                encoded = text.encode()[: _FAULT_BYTES - 8 * _FAULT_WORDS]
                begin = 8 * _FAULT_WORDS
                self._mailbox.bytes[begin : begin + len(encoded)] = encoded
                words[2 : 2 + len(fields)] = array("q", fields)
                words[1] = len(encoded)
                words[0] = _FAULT_POSTED | zlib.crc32(self._mailbox.bytes[8:_FAULT_BYTES])
        finally:
            discard_file(self._claim_path)

    @property
    def is_posted(self) -> bool:
        """Whether any rank of the node posted a failure."""
        return self._mailbox.int64[0] != 0

    def read(self) -> tuple[list[int], str]:
        """The posted failure: its numbers and its text, once all of it is visible (of two that were written at once,
        after a second)."""
        deadline_s = time.monotonic() + _FAULT_READ_S
        while True:
            content = bytes(self._mailbox.bytes[:_FAULT_BYTES])
            words = array("q", content[: 8 * _FAULT_WORDS])
            if words[0] == _FAULT_POSTED | zlib.crc32(content[8:]) or time.monotonic() > deadline_s:
                break
            time.sleep(0.001)
        text = content[8 * _FAULT_WORDS :][: words[1]].decode(errors="replace")
        return words[2:].tolist(), text
