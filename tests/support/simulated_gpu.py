"""Lets tensor parallelism take its GPU paths on a CPU, to write down what it would enqueue there.

Inside ``simulated_gpu`` a ``TPContext`` counts as one of a GPU with a driver: it chooses tiles and ways of moving data
for that GPU, orders streams by events, sends by copy engines and records what comes often as CUDA graphs. Kernels,
commands of streams and graphs are only written down: results mean nothing, and no rank waits for another but on the
host. Memory that is allocated in a call is what the call before it got there, as torch's allocator has it in a loop of
training steps.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ditron_train.data.device_profiles import Machine
from ditron_train.runtime import device as device_module
from ditron_train.stream import driver, events
from ditron_train.stream import recorder as recorder_module
from tests.support.call_recorder import CallRecorder

H200 = Machine("NVIDIA H200", "sm_90", 132)
_CURRENT, _COMMUNICATION, _RECORDING = (
    SimpleNamespace(cuda_stream=number, name=name) for number, name in enumerate(("current", "comm", "recording"))
)
_STREAMS = (_CURRENT, _COMMUNICATION, _RECORDING)


class _Driver:
    """Writes down what ``stream.driver`` is asked for."""

    def __init__(self, recorder: CallRecorder) -> None:
        self._recorder = recorder
        self._num_graphs = 0
        self.current = _CURRENT

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before = self.current
        self.current = before if stream is None else stream
        try:
            yield
        finally:
            self.current = before

    def _add(self, words: str, stream: int) -> None:
        self._recorder.add(f"{words} on {_STREAMS[stream].name}")

    def memcpy_async(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        place = self._recorder.place
        self._add(f"copy {place(destination)} <- {place(source)} {num_bytes}", stream)

    def memcpys_async(self, copies: Any, stream: int) -> None:
        for copy in copies:
            self.memcpy_async(*copy, stream)

    def memcpy_2d_async(
        self, destination: int, pitch: int, source: int, source_pitch: int, num_bytes: int, count: int, stream: int
    ) -> None:
        place = self._recorder.place
        pieces = [place(destination + index * pitch) for index in range(count)]
        self._add(f"copy 2d {' '.join(pieces)} <- {place(source)} every {source_pitch} {num_bytes}", stream)

    def stream_memory_ops(self, stream: int, operations: Any) -> None:
        self._add("; ".join(f"{kind} {self._recorder.place(address)}" for kind, address, _ in operations), stream)

    def event_record(self, event: Any, stream: int) -> None:
        self._add(f"event {event}", stream)

    def stream_wait_event(self, stream: int, event: Any) -> None:
        self._add(f"wait for event {event}", stream)

    def graph_record(self, stream: int, enqueue: Callable[[], object]) -> int:
        self._num_graphs += 1
        self._add(f"graph {self._num_graphs} begins", stream)
        enqueue()
        self._add(f"graph {self._num_graphs} ends", stream)
        return self._num_graphs

    def graph_launch(self, graph: int, stream: int) -> None:
        self._add(f"graph {graph} launched", stream)

    def graph_upload(self, graph: int, stream: int) -> None:
        self._add(f"graph {graph} uploaded", stream)

    def graph_destroy(self, graph: int) -> None:
        self._recorder.add(f"graph {graph} destroyed")

    def allocation_of(self, address: int) -> int:
        return 1


def _everywhere(stack: contextlib.ExitStack, function: Any, replacement: Any) -> None:
    """Replaces a function wherever the package has imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ditron_train.") and vars(module).get(function.__name__) is function:
            stack.enter_context(mock.patch.object(module, function.__name__, replacement))


def simulate(stack: contextlib.ExitStack, recorder: CallRecorder, context: Any, machine: Machine = H200) -> None:
    """Until ``stack`` closes: ``context``, a new ``TPContext`` of the CPU, is one of ``machine``."""
    fake = _Driver(recorder)
    for name in (name for name in vars(_Driver) if not name.startswith("_") and name != "on_stream"):
        stack.enter_context(mock.patch.object(driver, name, getattr(fake, name)))
    _everywhere(stack, driver.has_driver, lambda: True)
    _everywhere(stack, device_module.kernel_target, lambda device: machine.target)
    _everywhere(stack, device_module.num_sms, lambda device: machine.num_sms)
    _everywhere(stack, events.current_handle, lambda device: fake.current.cuda_stream)
    stack.enter_context(mock.patch.object(recorder_module, "_recording_stream", lambda device: _RECORDING))
    stack.enter_context(mock.patch.object(torch.cuda, "stream", fake.on_stream))
    stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
    context.is_cuda, context.target, context.num_sms, context.machine = True, machine.target, machine.num_sms, machine
    context.comm_stream, context.comm_handle = _COMMUNICATION, _COMMUNICATION.cuda_stream
    context._fork_event, context._join_event, context.recorder.is_enabled = "fork", "join", True
    context._calls = SimpleNamespace(enter=lambda: _CURRENT, is_capturing=False, is_here=lambda: True)
    stack.callback(context._forget_prepared)  # graphs go while there is a driver for them
    recorder.simulate(lambda: f" on {fake.current.name}")
