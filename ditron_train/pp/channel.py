"""``PipelineChannel``: the flags of a pipeline group's messages, and failures that one rank records and all raise."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ditron_train.pp.mailbox import Mailbox
from ditron_train.pp.messages import LANE_NAMES, Copy
from ditron_train.runtime.errors import DitronError, MismatchError, PeerTimeoutError
from ditron_train.runtime.flight_recorder import note_error
from ditron_train.stream import stream_notify, stream_wait
from ditron_train.stream.copies import copy_bytes
from ditron_train.stream.waits import cyclic_difference
from ditron_train.symm.arena import SymmetricArena
from ditron_train.symm.channel import Channel

FAULT_TIMEOUT, FAULT_MISMATCH = 1, 2
_POLLS_BEFORE_SLEEP = 300


def turns_of_stages(num_stages: int) -> int:
    """How many deadlines a host waits if stages compile one after another, in forward and in backward."""
    return 2 * num_stages


class PipelineChannel(Channel):
    """The flags and the failure record of a pipeline group's messages; a failure of one rank is raised by all.

    Flags are in the mailbox if streams can reach it, else in symmetric device memory.

    Attributes:
        flags_in_host: Whether they are in the mailbox; ``in_host=False`` keeps them out of it.
        turns: As of a ``Channel``; one, unless ``begin_step`` says more.
    """

    def __init__(self, arena: SymmetricArena, mailbox: Mailbox, *, in_host: bool = True) -> None:
        super().__init__(arena, "pp", 2 * len(LANE_NAMES))
        self.mailbox = mailbox
        self.flags_in_host = in_host and mailbox.has_flags
        if not self.flags_in_host:
            self.signals.local.zero_()  # a context of this group before may have left them set
            arena.quiesce()
        self._raised: DitronError | None = None
        self._with_gradients: set[bool] = set()  # of the steps with messages of the newest size

    def begin_step(self, num_stages: int, is_new: bool) -> None:
        """Has hosts and streams wait for longer in a step with messages of a new size: forward and backward come
        through all stages, each of which may compile before it sends. The first step without gradients, or with them,
        has kernels of its own, so it counts as new, too. An evaluation's calls wait for nothing between them: stages
        may be calls apart, so they wait for longer until a step with gradients."""
        if is_new:
            self._with_gradients.clear()
        is_first = torch.is_grad_enabled() not in self._with_gradients
        self._with_gradients.add(torch.is_grad_enabled())
        if is_first:
            self.turns = turns_of_stages(num_stages)
        elif torch.is_grad_enabled():
            self.turns = 1

    @property
    def host_timeout_s(self) -> float:
        """Deadline of what hosts wait for."""
        return self.turns * self.timeout_s

    def address(self, rank: int, index: int) -> int:
        """Address of flag ``index`` of ``rank`` for this rank's streams."""
        if self.flags_in_host:
            return self.mailbox.flag_address(rank, index)
        return self.signals.host_addresses[rank] + 4 * index

    def wait_for(self, index: int, epoch: int, *, peer: int, chunk: int, stream: torch.cuda.Stream | None) -> None:
        """Holds the stream (CPU: the caller) until this rank's flag is ``epoch`` or later; bounded.

        If the host sees that it is, nothing is enqueued: what the flag signals is complete, so whatever is
        enqueued from now on finds it complete.
        """
        if self.is_set(index, epoch):
            return
        own = self.arena.rank
        host_address = self.mailbox.flag_host_address(own, index) if self.flags_in_host else None
        stream_wait(
            self, self.address(own, index), epoch, peer=peer, chunk=chunk, stream=stream, host_address=host_address
        )

    def is_set(self, index: int, epoch: int) -> bool:
        """Whether this rank's flag is known to the host to be ``epoch`` or later (no CUDA call)."""
        if not self.flags_in_host:
            return False
        return cyclic_difference(self.mailbox.flag_value(self.arena.rank, index), epoch) >= 0

    def notify(self, rank: int, index: int, epoch: int, stream: torch.cuda.Stream | None) -> None:
        """Sets flag ``index`` of ``rank`` once the stream has got there."""
        stream_notify(self, self.address(rank, index), epoch, stream)

    def push(self, rank: int, index: int, epoch: int, copy: Copy, stream: torch.cuda.Stream | None) -> None:
        """Copies bytes to an address of ``rank``'s memory, then sets its flag ``index``."""
        if copy.num_bytes:
            copy_bytes(*copy, stream)
        self.notify(rank, index, epoch, stream)

    def record_timeout(self, *, peer: int, chunk: int, expected_epoch: int, seen_epoch: int, turns: int = 1) -> None:
        """See ``Channel``; tells the other ranks of the node, unless one of them has failed before."""
        if self.mailbox.failure.is_posted:
            return
        self._post_timeout(peer, chunk, expected_epoch, seen_epoch, turns)
        super().record_timeout(
            peer=peer, chunk=chunk, expected_epoch=expected_epoch, seen_epoch=seen_epoch, turns=turns
        )

    def _post_timeout(self, peer: int, chunk: int, expected_epoch: int, seen_epoch: int, turns: int) -> None:
        """Names the rank that is really missing: all after it wait, and each may be the first to give up."""
        missing = self.mailbox.headers.missing_behind(peer)
        if missing not in (peer, self.arena.rank):
            peer, chunk = missing, -1
        self.mailbox.failure.post([FAULT_TIMEOUT, self.arena.rank, peer, chunk, expected_epoch, seen_epoch, turns])

    @property
    def failed(self) -> bool:
        """Whether this rank or another one has recorded a failure (host memory only)."""
        return super().failed or self.mailbox.failure.is_posted

    def fail_mismatch(self, text: str) -> None:
        """Records on all ranks of the node that neighbours disagree, and raises it here."""
        self.mailbox.failure.post([FAULT_MISMATCH, self.arena.rank], text)
        self.check()

    def check(self) -> None:
        """Raises what this or another rank of the node has recorded, in the same words on all of them.

        Raises:
            PeerTimeoutError: A wait passed its deadline.
            MismatchError: Neighbours disagree on a message.
        """
        if self._raised is None and self.mailbox.failure.is_posted:
            self._raised = self._error_of_all()
            note_error(self._raised, self.arena.group_name)
        if self._raised is not None:
            raise self._raised
        super().check()

    def _error_of_all(self) -> DitronError:
        (kind, reporter, *fields), text = self.mailbox.failure.read()
        if kind == FAULT_MISMATCH:
            return MismatchError(text)
        peer, chunk, expected, seen, turns = fields
        return PeerTimeoutError(
            op=self.op_name,
            group=self.arena.group_name,
            waiting_rank=reporter,
            missing_rank=peer,
            chunk=chunk,
            expected_epoch=expected,
            seen_epoch=seen,
            timeout_s=turns * self.timeout_s,
        )

    def wait_on_host(self, ready: Callable[[], bool], *, peer: int, chunk: int) -> None:
        """Blocks the host until ``ready()``, at most ``host_timeout_s``; for what only hosts exchange.

        Raises:
            PeerTimeoutError: It did not become so in time.
        """
        turns = self.turns
        deadline_s = time.monotonic() + turns * self.timeout_s
        polls = 0
        while not ready():
            self.check()
            if time.monotonic() > deadline_s:
                self.record_timeout(peer=peer, chunk=chunk, expected_epoch=chunk + 1, seen_epoch=chunk, turns=turns)
                self.check()
            polls += 1
            time.sleep(0.0 if polls < _POLLS_BEFORE_SLEEP else 0.0001)
