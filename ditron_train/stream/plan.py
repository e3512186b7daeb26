"""Plans: an op is prepared once for a call signature, then a call only enqueues.

``OpContext.plan`` makes a plan at the first call with a signature and finds it again at the later ones. Here is what
all plans share: which calls are replayed as a recorded graph (``Exchange.replay``), and what happens if a part of an
exchange cannot be enqueued (``Exchange.aborting``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.stream.op_context import Aborting, OpContext
from ditron_train.stream.recorded_graph import counts_allocations
from ditron_train.symm.channel import Channel

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
