"""``OpContext``: what the ops of one subpackage share on one process group, below what each subpackage adds to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ditron_train.runtime.device import kernel_target, num_sms, with_index
from ditron_train.runtime.flight_recorder import records_of
from ditron_train.runtime.groups import GroupCache, forget_at_exit, unwrapped, world_group
from ditron_train.stream import driver
from ditron_train.stream.call_order import CallOrder
from ditron_train.stream.events import current_handle, event_of, stream_of
from ditron_train.stream.recorder import OpRecorder
from ditron_train.stream.varying_lengths import VaryingLengths
from ditron_train.symm.arena import SymmetricArena, get_arena
from ditron_train.symm.channel import Channel

#: Signatures that a context remembers. Each keeps some 5 KB on the host and 1 KB on the device: sequences of ever new
#: lengths must not fill either. A job routes at most 256 shapes through its ops, a few signatures each.
MAX_KNOWN_SHAPES = 1024

_Made = TypeVar("_Made")


class Aborting:
    """Calls ``OpContext.abort`` for a channel if the body of the ``with`` raises, because memory is missing, a kernel
    does not compile, or the user interrupts. Every op enters one, and ``contextlib`` would take four times as long."""

    __slots__ = ("_channel", "_context")

    def __init__(self, context: OpContext, channel: Channel) -> None:
        self._context, self._channel = context, channel

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._context.abort(self._channel)


class OpContext(VaryingLengths):
    """Arena, channels and communication stream of one group (constructed collectively).

    Ops of one context run one after another, on whichever streams they are called: the context orders them
    (``CallOrder``).

    Args:
        group: The process group (``None``: WORLD).
        device: The device of the activations.
        first_epoch: For tests of the epoch's wrap.

    Attributes:
        comm_stream: The communication stream, of high priority; None on the CPU.
        comm_handle: The driver's handle of the communication stream; 0 on the CPU.
        is_joined: Whether the current stream has waited for the communication stream.
        recorder: Records frequent sequences as graphs and replays them.
        agreed: Calls that all ranks are known to make alike (``stream.agreement``).
        prepared: What ops cache for the shapes they have seen; emptied before a buffer of the arena moves.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, first_epoch: int = 0) -> None:
        super().__init__()
        self.arena: SymmetricArena = get_arena(group, device)
        self.group = self.arena.group
        self.device = self.arena.device
        self.rank = self.arena.rank
        self.world_size = self.arena.world_size
        self.target = kernel_target(self.device)
        self.num_sms = num_sms(self.device)
        self.is_cuda = self.device.type == "cuda"
        if not self.is_cuda:
            forget_at_exit()
        self.comm_stream = torch.cuda.Stream(self.device, priority=-1) if self.is_cuda else None
        self.comm_handle = self.comm_stream.cuda_stream if self.comm_stream is not None else 0
        self._fork_event, self._join_event = _fork_join_events(self.device)
        self._first_epoch = first_epoch
        self._records = records_of(self.arena.group_name, dist.get_process_group_ranks(self.group))
        self._channels: list[Channel] = []
        self._calls = CallOrder(self.device)
        self.is_joined = True
        self.recorder = OpRecorder(self)
        self._scratch: dict[tuple, torch.Tensor] = {}
        self.agreed: set[tuple] = set()
        self.prepared: dict[tuple, Any] = {}
        self.arena.before_freeing(self._forget_prepared)

    def _forget_prepared(self) -> None:
        self.prepared.clear()
        self._scratch.clear()
        self.recorder.sequences.clear()

    def plan(self, make: Callable[..., _Made], *arguments: Hashable) -> _Made:
        """The plan of a call (``stream.plan``): what ``make(self, *arguments)`` returned at the first call with these
        arguments, which is collective. None, which stands for nothing to do, is not cached."""
        key = (make, *arguments)
        plan: Any = self.prepared.get(key)
        if plan is None:
            if self.varies and len(self.prepared) >= MAX_KNOWN_SHAPES and not self.arena.graph_captured:
                self.synchronize()
                self.forget_shapes()
            plan = make(self, *arguments)
            if plan is not None:
                self.prepared[key] = plan
        return plan

    def add_channel(self, name: str, num_signals: int, signature_fields: Sequence[str]) -> Channel:
        """A channel of this context (collective)."""
        channel = Channel(
            self.arena, name, num_signals, signature_fields=signature_fields, first_epoch=self._first_epoch
        )
        self._channels.append(channel)
        return channel

    def enter(self, op: str = "op", *details: Hashable) -> torch.cuda.Stream | None:
        """Start of every op: raises what an earlier op recorded, and makes this stream wait for the last op's.

        Args:
            op: Name for the record of the call (``runtime.flight_recorder``).
            details: Arguments that are the same on all ranks of the group, such as shapes.

        Returns:
            The current stream, None on the CPU.
        """
        self._records.record(op, *details)
        for channel in self._channels:
            channel.check()
        return self._follow()

    def resume(self, started_on: torch.cuda.Stream | None, *used: torch.Tensor) -> None:
        """Called when an op that was started is waited for: makes this stream wait for the last op's, and the next
        op's for this one.

        Args:
            started_on: The stream that the op's ``enter`` returned.
            used: Memory that the op works on. If this stream is another one, the memory's use is recorded on it, since
                the stream that the op was started on does not wait for the op.
        """
        stream = self._follow()
        if stream is not None and stream is not started_on:
            for tensor in used:
                tensor.record_stream(stream)

    def _follow(self) -> torch.cuda.Stream | None:
        stream = self._calls.enter()
        self.recorder.is_capturing = self._calls.is_capturing
        if self._calls.is_capturing:
            self.arena.graph_captured = True
        return stream

    def fork(self) -> torch.cuda.Stream | None:
        """Makes the communication stream wait for the current one, and returns it (None on the CPU)."""
        if self.is_cuda:
            self.is_joined = False
            order_streams(self.device, current_handle(self.device), self._fork_event, self.comm_handle)
        return self.comm_stream

    def join(self) -> None:
        """Makes the current stream wait for the communication stream."""
        if self.is_cuda:
            order_streams(self.device, self.comm_handle, self._join_event, current_handle(self.device))
            self.is_joined = True

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Scratch memory of the arena, at the same address until it has to grow, so that recorded ops find their
        operands there. The next user of the name overwrites it, so write it only after ``enter``. It is collective
        when it grows, with the same shape on all ranks: request it before anything is started.

        Raises:
            ArenaError: There is no room for it; on every rank alike.
        """
        key = (name, tuple(shape), dtype)
        memory = self._scratch.get(key)
        if memory is None:
            if self.varies and self.arena.capacity_bytes(f"scratch.{name}") < math.prod(shape) * dtype.itemsize:
                self.arena.tensor(f"scratch.{name}", (self.rows_with_room(shape[0]), *shape[1:]), dtype)
            memory = self._scratch[key] = self.arena.tensor(f"scratch.{name}", tuple(shape), dtype).local
        return memory

    def aborting(self, channel: Channel) -> Aborting:
        """A context manager that calls ``abort`` if its body raises."""
        return Aborting(self, channel)

    def abort(self, channel: Channel) -> None:
        """Ends an exchange of ``channel`` after ``fork`` if a part of it cannot be enqueued. Streams are joined, and
        the launch counters of both roles are made equal, so that the next call has a new epoch. The host waits for
        nothing, so that no wait hides the error. Peers that did not abort as well wait until their deadline."""
        self.join()
        channel.tickets[1:2].copy_(channel.tickets[:1])

    def leave(self, channel: Channel) -> None:
        """End of every op: on the CPU, where kernels have run by now, raises what they recorded."""
        if not self.is_cuda:
            channel.check()

    def synchronize(self) -> None:
        """Waits for the device and raises what any op of this context recorded."""
        for channel in self._channels:
            channel.synchronize()

    def forget_shapes(self) -> None:
        """Drops what is cached for the shapes seen so far; ranks agree on each again at its next call.

        All ranks call it at the same point between two ops (they count new signatures alike), with the device idle and
        no graph captured: enqueued work, and graphs for ever, may use what is dropped.
        """
        self.agreed.clear()
        self._forget_prepared()
        for channel in self._channels:
            channel.signatures.clear()


def order_streams(device: torch.device, first: int, event: Any, second: int) -> None:
    """Makes stream ``second`` wait for what is enqueued on ``first`` now. ``event``: an event of the GPU to record."""
    if isinstance(event, torch.cuda.Event):
        event.record(stream_of(first, device))
        stream_of(second, device).wait_event(event)
    else:
        driver.event_record(event, first)
        driver.stream_wait_event(second, event)


def _fork_join_events(device: torch.device) -> tuple[Any, Any]:
    """Two events of a GPU: the driver's own if it can be called, which take 1.5 us to record and wait for instead of 5
    (H200)."""
    if device.type != "cuda":
        return None, None
    if torch.version.hip or not driver.has_driver():
        return torch.cuda.Event(), torch.cuda.Event()
    return event_of(device), event_of(device)


_Context = TypeVar("_Context", bound=OpContext)
_contexts: GroupCache[tuple[type, dist.ProcessGroup, torch.device], Any] = GroupCache()


def context_of(
    kind: type[_Context],
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    *,
    first_epoch: int = 0,
) -> _Context:
    """The context of a kind for a group and device, made at the first call, which is collective over the group.

    Args:
        kind: The subpackage's context class.
        group: The process group (``None``: WORLD).
        device: The device of the activations (``None``: the current GPU, or the CPU if there is none).
        first_epoch: The first epoch of a context that is made now: tests and soak runs cross the wrap.
    """
    group = unwrapped(group) if group is not None else world_group()
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = with_index(device)
    context = _contexts.get((kind, group, device))
    if context is None or context.arena.closed:
        with torch.inference_mode(False):  # an evaluation may come before training
            context = _contexts[kind, group, device] = kind(group, device, first_epoch=first_epoch)
    return context
