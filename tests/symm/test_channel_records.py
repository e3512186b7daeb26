"""Failures that a host and kernels record at the same time, and start signals that cannot be read in time."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from ditron_train.lang import wait
from ditron_train.runtime.errors import DitronError, MismatchError, PeerTimeoutError
from ditron_train.symm import Channel, get_arena
from ditron_train.symm import channel as channel_module
from ditron_train.symm.control import (
    CONTROL_ABORT,
    CONTROL_WORDS,
    KIND_TIMEOUT,
    READY_WORDS,
    RECORD_CHUNK,
    RECORD_EXPECTED,
    RECORD_KIND,
    RECORD_PEER,
    RECORD_SEEN,
    RECORD_STATE,
    RECORD_WORDS,
)
from tests.support.processes import run_workers

CPU = torch.device("cpu")
KERNELS = {RECORD_KIND: KIND_TIMEOUT, RECORD_PEER: 1, RECORD_CHUNK: 11, RECORD_EXPECTED: 12, RECORD_SEEN: 10}
HOSTS = dict(peer=0, chunk=21, expected_epoch=25, seen_epoch=22)


@triton.jit
def _wait_kernel(signal_ptr, control_ptr, TARGET: triton.language.constexpr):
    wait(signal_ptr, 5, control_ptr, 1, 3, TARGET)


def _interleaved(words_before: int, host_records: str) -> list[Any]:
    """What is raised if the host records when a kernel that gave up has written so many words of its record."""
    channel = Channel(get_arena(None, CPU), f"test.records {words_before} {host_records}", 1)
    channel.timeout_s = 1.0
    kernels = list({**KERNELS, RECORD_STATE: 1}.items())  # in the order in which kernels write them
    channel.control[CONTROL_ABORT] = 1
    for word, value in kernels[:words_before]:
        channel._record_view[word] = value
    if host_records == "timeout":
        channel.record_timeout(**HOSTS, turns=4)
    else:
        channel.record_mismatch(25)
    for word, value in kernels[words_before:]:
        channel._record_view[word] = value
    errors = []
    for _ in range(2):
        try:
            channel.check()
        except DitronError as error:
            errors.append(error)
    assert len(errors) == 2 and errors[0] is errors[1] and channel.failed
    (error, _) = errors
    if isinstance(error, PeerTimeoutError):
        return [error.missing_rank, error.chunk, error.expected_epoch, error.seen_epoch, error.timeout_s]
    assert isinstance(error, MismatchError)
    return ["mismatch"]


def _all_interleaved(host_records: str) -> list[list[Any]]:
    return [_interleaved(words_before, host_records) for words_before in range(len(KERNELS) + 2)]


@pytest.mark.parametrize("host_records, hosts", [("timeout", [0, 21, 25, 22, 4.0]), ("mismatch", ["mismatch"])])
def test_a_record_is_the_hosts_or_a_kernels_never_words_of_both(host_records: str, hosts: list[Any]) -> None:
    kernels = [1, 11, 12, 10, 1.0]  # complete before the host looked
    assert run_workers(2, _all_interleaved, host_records) == [[hosts] * (len(KERNELS) + 1) + [kernels]] * 2


def _wait_after_the_host_gave_up() -> tuple[float, list[int], bool]:
    """Seconds that a kernel waits for a flag that nobody sets, after the host has recorded a failure."""
    channel = Channel(get_arena(None, CPU), "test.aborted", 1)
    channel.record_timeout(**HOSTS)
    begun_s = time.monotonic()
    _wait_kernel[(1,)](channel.signals.local, channel.control, TARGET="interpreter")
    waited_s = time.monotonic() - begun_s
    with contextlib.suppress(PeerTimeoutError):
        channel.check()
    return waited_s, channel._record.tolist(), channel.failed


def test_a_hosts_failure_ends_the_waits_of_kernels() -> None:
    for waited_s, kernels_record, failed in run_workers(
        2, _wait_after_the_host_gave_up, env={"DITRON_TIMEOUT_S": "60"}
    ):
        assert waited_s < 30 and kernels_record == [0] * RECORD_WORDS and failed


class _Gpu:
    """A GPU's streams, events and copies: a copy ends when ``finish`` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_capturing, self.calls, self.pending = False, [], []
        self.ends_copies = True
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self)
        for name in ("stream", "device"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())

    def copy(self, source: Any, destination: Any) -> None:
        self.pending.append(lambda content=source.content: setattr(destination, "content", content))
        if self.ends_copies:
            self.finish()

    def finish(self) -> None:
        pending, self.pending = self.pending, []
        for copy in pending:
            copy()

    def record_event(self) -> SimpleNamespace:
        copies = list(self.pending)
        return SimpleNamespace(query=lambda: not any(copy in self.pending for copy in copies))


class _Memory:
    def __init__(self, gpu: _Gpu, content: list[list[int]]) -> None:
        self.gpu, self.content, self.device = gpu, content, torch.device("cuda")

    def copy_(self, source: _Memory, non_blocking: bool) -> None:
        assert non_blocking
        self.gpu.copy(source, self)

    def __len__(self) -> int:
        return len(self.content)

    def tolist(self) -> list[list[int]]:
        return [list(row) for row in self.content]


def _signals(epoch: int, *values: int) -> list[list[int]]:
    return [[epoch, value, *[0] * (READY_WORDS - 2)] for value in values]


EMPTY, FIRST, SECOND = _signals(0, 0, 0), _signals(1, 7, 8), _signals(2, 7, 7)


def _channel_on(gpu: _Gpu) -> Any:
    channel: Any = object.__new__(Channel)
    channel.arena = SimpleNamespace(world_size=2)
    buffers: Any = [_Memory(gpu, SECOND), _Memory(gpu, FIRST)]
    channel._reader = channel_module._StartSignals(buffers, _Memory(gpu, EMPTY))
    return channel


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    return _Gpu(monkeypatch)


def test_start_signals_that_are_not_read_are_zeros(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never those of an earlier call, neither past the deadline nor in a capture, nor what lands afterwards."""
    monkeypatch.setattr(channel_module, "_READY_READ_S", 0.02)
    channel = _channel_on(gpu)
    assert channel.start_signals(1) == FIRST
    gpu.is_capturing = True
    assert channel.start_signals(2) == EMPTY
    gpu.is_capturing, gpu.ends_copies = False, False
    assert channel.start_signals(2) == EMPTY
    assert channel.start_signals(1) == EMPTY and len(gpu.pending) == 1  # the copy of the other epoch may still come
    gpu.ends_copies = True
    gpu.finish()
    assert channel.start_signals(1) == FIRST
    assert channel.start_signals(2) == SECOND


@pytest.mark.parametrize("is_capturing", [False, True])
def test_on_a_gpu_the_abort_word_is_set_aside(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch, is_capturing: bool) -> None:
    """By a copy that the host does not wait for, however long it takes; not while a graph is captured."""
    threads: list[Any] = []

    class _Thread:
        def __init__(self, *, target: Any, name: str, daemon: bool) -> None:
            assert daemon
            self.target = target

        def start(self) -> None:
            threads.append(self.target)

    monkeypatch.setattr(channel_module.threading, "Thread", _Thread)
    gpu.is_capturing = is_capturing
    channel: Any = object.__new__(Channel)
    channel.arena = SimpleNamespace(device=torch.device("cuda"))
    channel._host_record, channel._record_view = None, [0] * RECORD_WORDS
    channel._abort_word = torch.ones(1, dtype=torch.int64)
    channel.control = torch.zeros(CONTROL_WORDS, dtype=torch.int64)
    held = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: held.append((tensor, stream)))
    channel.record_timeout(**HOSTS)
    channel.record_mismatch(3)  # the first one wins
    assert channel.failed and channel._host_record[RECORD_CHUNK] == 21
    assert len(threads) == (not is_capturing) and not channel.control.any()
    for target in threads:
        target()
    expected = torch.zeros(CONTROL_WORDS, dtype=torch.int64)
    expected[CONTROL_ABORT] = not is_capturing
    assert torch.equal(channel.control, expected)
    assert [tensor is channel.control and stream is gpu for tensor, stream in held] == [True] * len(threads)
