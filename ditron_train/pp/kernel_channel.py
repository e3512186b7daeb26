"""``KernelChannel``: flags and data moved by small kernels, where peers' memory is mapped but streams cannot
signal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ditron_train.pp.channel import PipelineChannel
from ditron_train.pp.kernels import BLOCK_WORDS, MAX_PROGRAMS, NUM_WARPS, await_kernel, notify_kernel, push_kernel
from ditron_train.pp.mailbox import Mailbox
from ditron_train.pp.messages import LANE_NAMES, Copy
from ditron_train.runtime.device import is_interpreter, kernel_target
from ditron_train.runtime.launch import COMPILE_OPTIONS
from ditron_train.stream.waits import cyclic_difference
from ditron_train.symm.arena import SymmetricArena
from ditron_train.symm.channel import Channel
from ditron_train.symm.control import KIND_TIMEOUT, RECORD_KIND, RECORD_PEER, RECORD_STATE

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
    """A ``PipelineChannel`` whose flags lie in symmetric device memory and whose waits, copies and flag writes are
    kernels.

    A wait takes one warp, a push at most ``MAX_PROGRAMS`` multiprocessors; waits have their deadline in the kernel and
    need no watchdog. Headers and failures still go through host memory. With one hardware queue a kernel that waits
    holds up what is enqueued after it, as a stream's wait does: ``endpoints`` says why nothing can stand still.
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
        if self._record_view[RECORD_STATE] and not self.mailbox.failed:
            words = [int(word) for word in self._record_words]
            assert words[RECORD_KIND] == KIND_TIMEOUT
            peer, chunk, expected, seen = words[RECORD_PEER : RECORD_PEER + 4]
            self._post_timeout(peer, chunk, expected, seen, 1)
        super().check()
