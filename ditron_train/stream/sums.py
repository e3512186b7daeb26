"""``SumExchange``: what exchanges of partial sums by copy engines share, whichever subpackage's memory they use."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ditron_train.lang.start import gather_start_kernel
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.stream.events import current_handle
from ditron_train.stream.op_context import OpContext
from ditron_train.stream.plan import Exchange
from ditron_train.symm.channel import Channel, ChannelPointers

REDUCE_BLOCK = 4096  # elements that a program adds up at once

_Context = TypeVar("_Context", bound=OpContext)


class SumExchange(Exchange[_Context]):
    """What exchanges of partial sums by copy engines share: start signals before the sends, and a kernel after them
    that adds up.

    Args:
        context: The context whose streams are used.
        channel: Channel of the exchange: start signals draw from its ticket slot 0, the sum from slot 1.
        pointers: The channel as kernels take it.
        epochs: Words whose epoch copy engines copy onto the peers' flags.
    """

    def __init__(self, context: _Context, channel: Channel, pointers: ChannelPointers, epochs: torch.Tensor) -> None:
        super().__init__(context, channel)
        self._pointers, self._epochs = pointers, epochs
        constants = {"WORLD_SIZE": context.world_size, "BLOCK": 128, "TARGET": context.target}
        self._start = context.launch(gather_start_kernel, 1, constants, num_warps=1)

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

    def _signal_start(self) -> None:
        context = self.context
        if not self._start.repeat("start", context.comm_handle):
            arguments = (self._epochs, self._epochs.numel(), self._pointers)
            self._start(*arguments, stream=context.comm_stream, key="start")

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
