"""``KernelChannel``: flags and data moved by small kernels, if peers' memory is mapped but streams cannot signal.

The kernels are a bounded wait, a push by a few programs, a flag, and a wait with its header, for NVSHMEM too.

Who waits for whom: the consumer waits for *data* (a count of fragments) at its own flag, the producer for *credit* (a
count of messages copied out) at its own; each flag is written by the other side alone and only grows. A push's stores
come before its flag: every program ends with a release at system scope on a counter of its own GPU, the last one to
come has so acquired all of them, and its release of the flag at the peer stands for all. The wait acquires at system
scope; what the stream does next begins after it.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.pp.channel import PipelineChannel
from ditron_train.pp.mailbox import Mailbox
from ditron_train.pp.messages import LANE_NAMES, Copy
from ditron_train.runtime.device import is_interpreter, kernel_target
from ditron_train.runtime.launch import COMPILE_OPTIONS
from ditron_train.stream.waits import cyclic_difference
from ditron_train.symm import control as layout
from ditron_train.symm.arena import SymmetricArena
from ditron_train.symm.channel import Channel
from ditron_train.symm.control import KIND_TIMEOUT, RECORD_KIND, RECORD_PEER, RECORD_STATE

MAX_PROGRAMS = 8  # each fills a multiprocessor; stores of eight reach 337 GB/s, of sixteen no more (H200)


NUM_WARPS = 32


BLOCK_WORDS = 16384  # 64 KiB in flight a program


HEADER_LANES = 16


_KIND_MISMATCH = tl.constexpr(layout.KIND_MISMATCH)


_FIRST_AGREED = tl.constexpr(HEADER_LANES - 2)  # behind ``Header.to_words``: its ``agreed_words``


@triton.jit(do_not_specialize=["signal", "epoch", "peer", "chunk"])
def await_kernel(signal, epoch, control_ptr, peer, chunk, TARGET: tl.constexpr):
    """One program: holds the stream until this rank's flag at address ``signal`` is ``epoch`` or later, at most the
    deadline."""
    dl.wait(
        tl.cast(signal, tl.int64).to(tl.pointer_type(tl.int32)),
        tl.cast(epoch, tl.int32),
        control_ptr,
        peer,
        chunk,
        TARGET,
    )


@triton.jit(do_not_specialize=["signal", "epoch", "sent", "expected", "peer", "message", "lane"])
def await_message_kernel(
    signal,
    epoch,
    sent,
    expected,
    seen_ptr,
    control_ptr,
    peer,
    message,
    lane,
    LANES: tl.constexpr,
    TARGET: tl.constexpr,
):
    """``await_kernel``, then compares the header before the message, at address ``sent``, with the one at
    ``expected``: type and number of elements, the last words of both.

    A difference is recorded as a mismatch of ``message``, and both headers are kept in ``seen_ptr`` ``[2, LANES]``;
    after a wait that gave up, its record is kept and the comparison means nothing.
    """
    dl.wait(
        tl.cast(signal, tl.int64).to(tl.pointer_type(tl.int32)),
        tl.cast(epoch, tl.int32),
        control_ptr,
        peer,
        message,
        TARGET,
    )
    lanes = tl.arange(0, LANES)
    theirs = tl.load(tl.cast(sent, tl.int64).to(tl.pointer_type(tl.int64)) + lanes, volatile=True)
    mine = tl.load(tl.cast(expected, tl.int64).to(tl.pointer_type(tl.int64)) + lanes)
    different = tl.sum(((theirs != mine) & (lanes >= _FIRST_AGREED)).to(tl.int32), axis=0)
    if different > 0:
        tl.store(seen_ptr + lanes, theirs)
        tl.store(seen_ptr + LANES + lanes, mine)
        dl.record_failure(control_ptr, _KIND_MISMATCH, peer, message, lane, different)


@triton.jit(do_not_specialize=["signal", "epoch"])
def notify_kernel(signal, epoch, TARGET: tl.constexpr):
    """One program: sets the flag at address ``signal``, a peer's, once the stream has got here."""
    dl.notify(tl.cast(signal, tl.int64).to(tl.pointer_type(tl.int32)), tl.cast(epoch, tl.int32), TARGET)


@triton.jit(do_not_specialize=["destination", "source", "num_bytes", "signal", "epoch"])
def push_kernel(
    destination,
    source,
    num_bytes,
    signal,
    epoch,
    arrived_ptr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Copies ``num_bytes`` from address ``source`` to a peer's ``destination``, then sets the flag at ``signal``
    there.

    Programs share the blocks. ``arrived_ptr`` (int64, zero) counts those that are done and is zero again at the end.
    IS_ALIGNED: both addresses are multiples of 16, so 16 bytes move at a time; else one.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    to_bytes = tl.cast(destination, tl.int64).to(tl.pointer_type(tl.uint8))
    from_bytes = tl.cast(source, tl.int64).to(tl.pointer_type(tl.uint8))
    size = tl.cast(num_bytes, tl.int64)
    if IS_ALIGNED:
        words = tl.multiple_of(size // 16 * 4, 4)
        to_words = tl.multiple_of(to_bytes.to(tl.pointer_type(tl.int32)), 16)
        from_words = tl.multiple_of(from_bytes.to(tl.pointer_type(tl.int32)), 16)
        dl.putmem(to_words, from_words, words, program, programs, BLOCK)
        rest = words * 4 + tl.arange(0, 16)
        inside = rest < tl.where(program == 0, size, 0)
        tl.store(to_bytes + rest, tl.load(from_bytes + rest, mask=inside), mask=inside)
    else:
        dl.putmem(to_bytes, from_bytes, size, program, programs, BLOCK)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr, tl.cast(1, tl.int64), sem="acq_rel", scope="sys")
    if before == programs - 1:
        tl.atomic_xchg(arrived_ptr, tl.cast(0, tl.int64), sem="relaxed", scope="gpu")
        dl.notify(tl.cast(signal, tl.int64).to(tl.pointer_type(tl.int32)), tl.cast(epoch, tl.int32), TARGET)


_BLOCK_BYTES = 4 * BLOCK_WORDS


_WORDS_APART = 32  # counters on cache lines of their own


def launch(
    kernel: Any,
    stream: torch.cuda.Stream | None,
    *arguments: Any,
    num_programs: int = 1,
    num_warps: int = 1,
    **constants: Any,
) -> None:
    """Launches on ``stream``; in the interpreter (None) it is done when the call returns."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        kernel[(num_programs,)](*arguments, **constants, num_warps=num_warps, **COMPILE_OPTIONS)


def await_flag(
    channel: Channel, address: int, epoch: int, *, peer: int, chunk: int, stream: torch.cuda.Stream | None, target: str
) -> None:
    """Holds the stream by a kernel of one program until the flag at ``address`` is ``epoch`` or later; bounded.

    Raises:
        PeerTimeoutError: On the CPU at once; on a GPU at the channel's next ``check``.
    """
    launch(
        await_kernel,
        stream,
        address,
        cyclic_difference(epoch, 0),
        channel.control,
        peer,
        cyclic_difference(chunk, 0),
        TARGET=target,
    )
    if stream is None:
        channel.check()


def current_or_none(channel: Channel) -> torch.cuda.Stream | None:
    """The current stream of a channel's GPU; None on the CPU."""
    device = channel.arena.device
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class KernelChannel(PipelineChannel):
    """A ``PipelineChannel`` whose flags are in symmetric device memory and whose waits, copies and flag writes are
    kernels.

    A wait takes one warp, a push at most ``MAX_PROGRAMS`` multiprocessors; waits have their deadline in the kernel and
    need no watchdog. Headers and failures still go through host memory. With one hardware queue a kernel that waits
    holds up what is enqueued after it, as a stream's wait does: ``endpoints`` says why it cannot deadlock.
    """

    def __init__(self, arena: SymmetricArena, mailbox: Mailbox) -> None:
        super().__init__(arena, mailbox, in_host=False)
        self._target = kernel_target(arena.device)
        self._arrived = torch.zeros((len(LANE_NAMES), _WORDS_APART), dtype=torch.int64, device=arena.device)
        self._load_kernels()
        arena.quiesce()

    def _load_kernels(self) -> None:
        """Loads every kernel now: to load one may wait for all kernels that run, and later one of them may wait for a
        peer."""
        scratch = self._arrived.data_ptr() + 8 * _WORDS_APART - 16
        await_flag(self, scratch, 0, peer=0, chunk=0, stream=current_or_none(self), target=self._target)
        launch(notify_kernel, current_or_none(self), scratch, 0, TARGET=self._target)
        for source in (scratch, scratch + 1):
            self._launch_push(Copy(scratch, source, 0), scratch, 0, 0, current_or_none(self))

    def wait_for(self, index: int, epoch: int, *, peer: int, chunk: int, stream: torch.cuda.Stream | None) -> None:
        address = self.address(self.arena.rank, index)
        await_flag(self, address, epoch, peer=peer, chunk=chunk, stream=stream, target=self._target)

    def notify(self, rank: int, index: int, epoch: int, stream: torch.cuda.Stream | None) -> None:
        launch(notify_kernel, stream, self.address(rank, index), cyclic_difference(epoch, 0), TARGET=self._target)

    def push(self, rank: int, index: int, epoch: int, copy: Copy, stream: torch.cuda.Stream | None) -> None:
        """See ``PipelineChannel``; pushes of one lane must be on one stream (they share a counter)."""
        address, lane = self.address(rank, index), index % len(LANE_NAMES)
        self._launch_push(copy, address, epoch, lane, stream)

    def _launch_push(self, copy: Copy, flag: int, epoch: int, lane: int, stream: torch.cuda.Stream | None) -> None:
        num_programs = 1 if is_interpreter() else max(1, min(MAX_PROGRAMS, -(-copy.num_bytes // _BLOCK_BYTES)))
        launch(
            push_kernel, stream, *copy, flag, cyclic_difference(epoch, 0),
            self._arrived[lane], num_programs=num_programs, num_warps=16 if self._target == "hip" else NUM_WARPS,
            IS_ALIGNED=(copy.destination | copy.source) % 16 == 0, BLOCK=BLOCK_WORDS, TARGET=self._target,
        )  # fmt: skip

    def check(self) -> None:
        """See ``PipelineChannel``; what a kernel of this rank recorded is told to the other ranks of the node
        first."""
        if self._record_view[RECORD_STATE] and not self.mailbox.failure.is_posted:
            words = list(self._record_view)
            assert words[RECORD_KIND] == KIND_TIMEOUT
            peer, chunk, expected, seen = words[RECORD_PEER : RECORD_PEER + 4]
            self._post_timeout(peer, chunk, expected, seen, 1)
        super().check()
