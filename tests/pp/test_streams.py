"""Messages that are taken, or waited for, on several streams; streams here write down what is put onto them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ditron_train.pp import endpoints as lanes
from ditron_train.pp import network, nvshmem_channel
from ditron_train.pp.endpoints import Receiver, Sender
from ditron_train.pp.kernel_channel import HEADER_LANES
from ditron_train.pp.messages import Header
from ditron_train.pp.network import NetworkWork
from ditron_train.pp.nvshmem_channel import NvshmemChannel
from ditron_train.pp.nvshmem_endpoints import NvshmemReceiver

CPU = torch.device("cpu")


class _Events:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self, stream: str) -> SimpleNamespace:
        return SimpleNamespace(hold=lambda other: self._log.append(f"{other} waits for {stream}"))


def test_messages_of_the_ring_are_copied_out_in_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A credit counts all that were copied out: with the second copy before the first the sender would overwrite the
    first."""
    log: list[str] = []
    channel = SimpleNamespace(
        arena=SimpleNamespace(device=CPU, rank=0),
        wait_for=lambda *_, **__: None,
        notify=lambda peer, index, credit, stream: log.append(f"credit {credit} on {stream}"),
    )
    receiver = Receiver(channel, SimpleNamespace(leases=(0, 0), in_ring=lambda *_: 0, num_bytes=64, count=9), 0, 1)
    receiver._stream, receiver._events = "side", _Events(log)
    receiver._header_of, receiver.verify = lambda message: Header((4,), torch.uint8), lambda: None
    monkeypatch.setattr(lanes, "copy_bytes", lambda *_: None)
    for stream in "aabb":
        monkeypatch.setattr(lanes, "current_stream", lambda device, stream=stream: stream)
        receiver.take(receiver.post(Header((4,), torch.uint8)))
    assert log == ["credit 1 on a", "credit 2 on a", "b waits for a", "credit 3 on b", "credit 4 on b"]


@pytest.mark.parametrize("kind", [Receiver, NvshmemReceiver])
def test_a_message_that_finds_no_memory_is_still_the_next_one(
    monkeypatch: pytest.MonkeyPatch, kind: type[Receiver]
) -> None:
    """Taken again, or by who takes the one behind it: with it forgotten, that one would get its bytes."""
    channel = SimpleNamespace(
        arena=SimpleNamespace(device=CPU, rank=0),
        wait_for=lambda *_, **__: None,
        wait_for_message=lambda *_, **__: None,
        notify=lambda *_: None,
    )
    slots = SimpleNamespace(leases=(0, 0), in_ring=lambda rank, lane, message: 4096 + message, num_bytes=64, count=9)
    receiver, header, empty = kind(channel, slots, 0, 1), Header((4,), torch.uint8), torch.empty
    monkeypatch.setattr(receiver, "_header_of", lambda message: header)
    monkeypatch.setattr(receiver, "verify", lambda: None)
    copied: list[tuple[int, int]] = []
    monkeypatch.setattr(lanes, "copy_bytes", lambda target, source, *_: copied.append((target, source)))
    posted = [receiver.post(header) for _ in range(2)]

    def without_memory(*arguments: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as here, pytest.raises(torch.OutOfMemoryError):
        here.setattr(torch, "empty", without_memory)
        receiver.take(posted[0])
    assert torch.empty is empty
    second, first = receiver.take(posted[1]), receiver.take(posted[0])
    assert copied == [(first.data_ptr(), 4096), (second.data_ptr(), 4097)]


@pytest.mark.parametrize("kind", [Receiver, NvshmemReceiver])
def test_a_message_does_not_wait_for_those_behind_it(monkeypatch: pytest.MonkeyPatch, kind: type[Receiver]) -> None:
    """What was received ahead is used behind its own arrival, not behind what the stream was given since."""
    enqueued: list[int] = []
    held: list[int] = []

    def wait_for(*_: object, chunk: int = -1, message: int = -1, **__: object) -> None:
        enqueued.append(max(chunk, message))

    def record(stream: str) -> SimpleNamespace:
        newest = enqueued[-1] if enqueued else -1
        return SimpleNamespace(hold=lambda other: held.append(newest) if other == "main" else None)

    channel = SimpleNamespace(
        arena=SimpleNamespace(device=CPU, rank=0), wait_for=wait_for, wait_for_message=wait_for, notify=lambda *_: None
    )
    receiver = kind(channel, SimpleNamespace(leases=(0, 0), in_ring=lambda *_: 0, num_bytes=64, count=2), 0, 1)
    receiver._stream, receiver._events = "side", SimpleNamespace(record=record)
    monkeypatch.setattr(receiver, "_header_of", lambda message: Header((4,), torch.uint8))
    monkeypatch.setattr(receiver, "verify", lambda: None)
    monkeypatch.setattr(lanes, "copy_bytes", lambda *_: None)
    monkeypatch.setattr(lanes, "current_stream", lambda device: "main")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    posted = [receiver.post(Header((4,), torch.uint8)) for _ in range(3)]
    for incoming in posted:
        receiver.take(incoming)
    assert enqueued == [0, 1, 2] and held[:2] == [0, 1]


def test_a_header_in_use_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device reads it when its stream gets there, while the host may be some messages ahead."""
    monkeypatch.setattr(nvshmem_channel, "_MAX_HEADERS", 4)
    channel = NvshmemChannel.__new__(NvshmemChannel)
    channel._headers, channel._rows = torch.zeros((4, HEADER_LANES), dtype=torch.int64), {}
    often = Header((100,), torch.float32)
    for size in range(10):
        address = channel.header_address(often)
        channel.header_address(Header((size,), torch.float32))
        row = (address - channel._headers.data_ptr()) // (8 * HEADER_LANES)
        assert Header.from_words(channel._headers[row].tolist()) == often
    assert len(channel._rows) == 4


class _Tensor:
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.used_on: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.used_on.append(stream)


def test_a_batch_that_is_waited_for_elsewhere_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that it was allocated on, which only its allocator knows, does not wait, and would have it again."""
    current = ["a"]
    monkeypatch.setattr(network, "current_stream", lambda device: current[0])
    one, another = _Tensor(), _Tensor()
    works = [NetworkWork([], [one]), NetworkWork([], [another])]
    works[0].wait()
    current[0] = "b"
    works[1].wait()
    assert (one.used_on, another.used_on) == (["a"], ["b"])


def test_a_batch_that_one_stream_has_waited_for_is_waited_for_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes a later batch lets an old one go, and waits for it then; what that one received is used
    elsewhere."""
    log: list[str] = []
    streams = [SimpleNamespace(name=name, wait_stream=lambda other: log.append(other.name)) for name in "ab"]
    work = NetworkWork([SimpleNamespace(wait=lambda: log.append("arrived"))], [_Tensor()])
    for current in (streams[0], streams[1], streams[0]):
        monkeypatch.setattr(network, "current_stream", lambda device, current=current: current)
        work.wait()
    assert log == ["arrived", "a"]


def test_memory_of_messages_that_are_kept_no_longer_is_known_to_be_in_use() -> None:
    """The stream that sent one waits for its copy then; the one that it was allocated on would have it again."""
    log: list[str] = []
    channel = SimpleNamespace(arena=SimpleNamespace(device=CPU))
    sender = Sender(channel, SimpleNamespace(leases=(0, 0)), 0, 1)
    sender._events = _Events(log)
    tensors = [_Tensor() for _ in range(4)]
    for tensor in tensors:
        sender._hold(tensor, "side", "a")
    assert log == ["a waits for side"] * 2
    assert [tensor.used_on for tensor in tensors] == [["a"], ["a"], [], []]
