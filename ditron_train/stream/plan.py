"""Plans: an op is prepared once for a call signature, then a call only enqueues.

``OpContext.plan`` makes a plan at the first call with a signature and finds it again at the later ones. Here is what
all plans share: which calls are replayed as a recorded graph (``Exchange.replay``), and what happens if a part of an
exchange cannot be enqueued (``Exchange.aborting``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from ditron_train.lang.start import gather_start_kernel
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.stream.events import current_handle
from ditron_train.stream.op_context import Aborting, OpContext
from ditron_train.stream.recorded_graph import counts_allocations
from ditron_train.symm.channel import Channel, ChannelPointers

#: Types of partial sums: each addition is in fp32 and rounded to the type.
SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REDUCE_BLOCK = 4096  # elements that a program adds up at once

_Context = TypeVar("_Context", bound=OpContext)
_Exchange = TypeVar("_Exchange", bound="Exchange[Any]")


class Exchange(Generic[_Context]):
    """What a group exchanges through one channel, prepared for one call signature (constructed collectively).

    It owns the kernel launches, and the lists of copies, of all calls with this signature.

    Args:
        context: The context whose buffers and streams are used.
        channel: The channel of the signals.

    Attributes:
        aborting: A context manager that calls ``abort`` if its body raises.
    """

    def __init__(self, context: _Context, channel: Channel) -> None:
        self.context, self.channel = context, channel
        self.aborting = Aborting(context, channel)

    def abort(self) -> None:
        """Ends the exchange if something fails after its start. The host waits for nothing, so that no wait hides the
        error; the next exchange has a new epoch."""
        self.context.abort(self.channel)

    def fork(self, enqueue: Callable[[], None], key: Hashable | None = None, copied: Sequence[int] = ()) -> None:
        """``OpContext.fork``, then ``enqueue``, which begins the exchange on the communication stream; ``abort`` if it
        raises.

        Args:
            enqueue, copied: As of ``OpRecorder.run``.
            key: As of ``OpRecorder.run``; None: nothing is recorded.
        """
        self.context.fork()
        with self.aborting:
            if key is None:
                enqueue()
            else:
                self.context.recorder.run(key, enqueue, copied)

    def replay(
        self,
        key: Hashable | None,
        enqueue: Callable[[], object],
        copied: Sequence[int] = (),
        *,
        forks: bool = True,
        allocates: bool = False,
    ) -> None:
        """Runs what ``enqueue`` puts onto the current stream; if it comes often with the same ``key``, it is recorded
        and replayed.

        Args:
            key: Determines everything that ``enqueue`` does; None: nothing is recorded.
            enqueue: As for ``OpRecorder.remember``. It returns False if ``key`` does not determine everything that it
                did this time: then nothing is recorded.
            copied: As for ``stream.recorded_graph.RecordedSequences.repeat``.
            forks: Whether ``enqueue`` uses the communication stream as well.
            allocates: Whether ``enqueue`` runs a caller's code, which may allocate GPU memory: then it is recorded
            only
                if allocations can be detected.
        """
        context = self.context
        if key is None or (allocates and not counts_allocations()):
            enqueue()
        elif not context.recorder.repeat(key, copied, forks=forks) and enqueue() is not False:
            context.recorder.remember(key, enqueue, copied)


class CopyExchange(Exchange[_Context]):
    """An exchange by copy engines: start signals before the sends.

    Args:
        context: The context whose streams are used.
        channel: Channel of the exchange: start signals draw from its ticket slot 0, what waits from slot 1.
        pointers: The channel as kernels take it.
        epochs: Words whose epoch copy engines copy onto the peers' flags.
    """

    def __init__(self, context: _Context, channel: Channel, pointers: ChannelPointers, epochs: torch.Tensor) -> None:
        super().__init__(context, channel)
        self.pointers, self._epochs = pointers, epochs
        constants = {"WORLD_SIZE": context.world_size, "BLOCK": 128, "TARGET": context.target}
        self._start = context.launch(gather_start_kernel, 1, constants, num_warps=1)

    def _signal_start(self, num_flags: int = 0) -> None:
        """Enqueues the start signals on the communication stream. ``num_flags``: words that get the epoch, 0: all."""
        context = self.context
        if not self._start.repeat("start", context.comm_handle):
            arguments = (self._epochs, num_flags or self._epochs.numel(), self.pointers)
            self._start(*arguments, stream=context.comm_stream, key="start")


class SumExchange(CopyExchange[_Context]):
    """What exchanges of partial sums by copy engines share: a kernel after the sends that adds up."""

    def _launch_of_sum(self, kernel: Any, constants: dict[str, Any]) -> KernelLaunch:
        context = self.context
        world = {"BLOCK": REDUCE_BLOCK, "WORLD_SIZE": context.world_size, "TARGET": context.target}
        num_programs = 2 * context.num_sms if context.is_cuda else 1
        return context.launch(kernel, num_programs, {**constants, **world}, num_warps=8)

    def begin(self) -> None:
        """Enqueues the start signals after what the current stream has; ``send`` follows, inside ``aborting``."""
        self.fork(self._signal_start)

    def send(self, partial: torch.Tensor, position: int, rows: slice, *, signals: bool) -> None:
        """Sends ``rows`` of the partial, those of receiver or chunk number ``position``, after what the communication
        stream has; it ``signals`` after the last of them."""
        raise NotImplementedError

    def finish(self, partial: torch.Tensor, out: torch.Tensor, *, beside: bool = False) -> None:
        """Writes the sum over ranks to ``out``, contiguous, once all partial sums have arrived.

        ``beside``: on the communication stream, as soon as this rank's sends are done, concurrent with what was
        enqueued on the current stream since ``start`` (``partial`` must be complete by then).
        """
        context, ring_reduce = self.context, self._ring_reduce
        key = (partial.data_ptr(), out.data_ptr())
        with self.aborting:
            if not ring_reduce.repeat(key, context.comm_handle if beside else current_handle(context.device)):
                ring_reduce(
                    *self._reduce_arguments(partial, out), stream=context.comm_stream if beside else None, key=key
                )
        context.join()
        context.leave(self.channel)

    _ring_reduce: KernelLaunch

    def _reduce_arguments(self, partial: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        """Arguments of the kernel ``_ring_reduce``."""
        raise NotImplementedError


class Plan(Exchange[_Context]):
    """An op prepared for one call signature (constructed collectively): an exchange that runs as a whole.

    Args:
        context: The context whose buffers and streams are used.
        channel: The channel of the signals.
        is_recorded: Whether the op is so short that a training step may be CPU-bound there. It is then replayed as a
            whole once its operands and results have been at the same addresses a few times, with the same strides.
    """

    def __init__(self, context: _Context, channel: Channel, *, is_recorded: bool = False) -> None:
        super().__init__(context, channel)
        self._is_recorded = is_recorded

    def run(self, *tensors: Any, **options: Any) -> Any:
        """Enqueues the op on the current stream."""
        raise NotImplementedError


@outside_compile
class Pending(Generic[_Exchange]):
    """An exchange that has been started. It is ended by one call (``wait``, ``consume`` or ``abort``) before the next
    op of its context, possibly on another stream.

    Args:
        exchange: The exchange that was started.
        started_on: The stream that ``OpContext.enter`` returned.
        used: Memory that the exchange works on; kept until the stream has passed the exchange.
    """

    def __init__(self, exchange: _Exchange, started_on: torch.cuda.Stream | None, *used: torch.Tensor) -> None:
        self._exchange, self._started_on, self._used = exchange, started_on, used

    def _resume(self) -> None:
        """Makes the current stream wait for the last op's, and the next op's for this one."""
        self._exchange.context.resume(self._started_on, *self._used)

    def abort(self) -> None:
        """Ends the exchange, without its result, if something fails before it was waited for. The data still arrives,
        before that of the next exchange."""
        self._resume()
        self._exchange.abort()
