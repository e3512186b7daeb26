"""Who waits for whom where calls come on several streams: streams here only write down what they wait for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.stream import call_order
from ditron_train.stream.call_order import CallOrder
from ditron_train.stream.op_context import OpContext

GPU = torch.device("cuda", 1)


class _Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_captured = False
        self.waited_for: list[str] = []

    def wait_stream(self, other: _Stream) -> None:
        assert other.is_captured == self.is_captured, "the driver refuses it"
        self.waited_for.append(other.name)


class _Tensor:
    def __init__(self) -> None:
        self.used_on: list[_Stream] = []

    def record_stream(self, stream: _Stream) -> None:
        self.used_on.append(stream)


class _Gpu:
    """Three streams, one of them current."""

    def __init__(self) -> None:
        self.number = GPU.index
        self.a, self.b, self.c = (_Stream(name) for name in "abc")
        self.current = self.a

    def call(self, order: CallOrder, stream: _Stream) -> list[str]:
        """A call on ``stream``; what that waited for."""
        self.current = stream
        assert order.enter() is stream and order.is_capturing == stream.is_captured
        waited_for, stream.waited_for = stream.waited_for, []
        return waited_for


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    gpu = _Gpu()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: gpu.number, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: ord(gpu.current.name), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: gpu.current.is_captured, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.number)
    monkeypatch.setattr(call_order, "current_stream", lambda device: gpu.current)
    monkeypatch.setattr(call_order, "_is_captured", lambda stream: stream.is_captured)
    return gpu


def test_only_a_call_on_another_stream_waits(gpu: _Gpu) -> None:
    order = CallOrder(GPU)
    streams = [gpu.a, gpu.a, gpu.b, gpu.b, gpu.a, gpu.c]
    assert [gpu.call(order, stream) for stream in streams] == [[], [], ["a"], [], ["b"], ["a"]]


def test_where_the_last_call_was(gpu: _Gpu) -> None:
    order = CallOrder(GPU)
    assert order.is_here()
    gpu.call(order, gpu.b)
    assert order.is_here()
    gpu.current = gpu.a
    assert not order.is_here()


def test_captured_calls_are_ordered_apart(gpu: _Gpu) -> None:
    order = CallOrder(GPU)
    assert gpu.call(order, gpu.a) == []
    gpu.b.is_captured = gpu.c.is_captured = True
    assert gpu.call(order, gpu.b) == [] and gpu.call(order, gpu.c) == ["b"]
    gpu.b.is_captured = gpu.c.is_captured = False
    assert gpu.call(order, gpu.c) == ["a"], "behind the last call outside of the capture"
    gpu.b.is_captured = True
    assert gpu.call(order, gpu.b) == [], "another capture, of which the last one's stream is no part"
    gpu.b.is_captured = False
    assert gpu.call(order, gpu.b) == ["c"]


def test_another_current_gpu_is_refused(gpu: _Gpu) -> None:
    order, gpu.number = CallOrder(GPU), 0
    with pytest.raises(
        NotSupportedError, match=r"the current GPU is cuda:0, the op's is cuda:1: call torch.cuda.set_device\(1\)"
    ):
        order.enter()


def test_nothing_on_the_cpu() -> None:
    order = CallOrder(torch.device("cpu"))
    assert order.enter() is None and order.is_here() and not order.is_capturing


def test_waiting_elsewhere_than_where_it_was_started(gpu: _Gpu) -> None:
    """The stream that waits is behind the start, the next op behind the one that waited, and memory is kept for that
    one."""
    context = object.__new__(OpContext)
    context._calls, context._channels, context._records = CallOrder(GPU), [], SimpleNamespace(record=lambda *_: None)
    context.recorder = SimpleNamespace(is_capturing=False)
    started_on, same, other = context.enter("start"), _Tensor(), _Tensor()
    context.resume(started_on, same)
    gpu.current = gpu.b
    context.resume(started_on, other)
    assert same.used_on == [] and other.used_on == [gpu.b] and gpu.b.waited_for == ["a"]
    gpu.current = gpu.a
    context.enter("next")
    assert gpu.a.waited_for == ["b"]
