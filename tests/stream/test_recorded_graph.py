"""Recorded sequences, with a driver that writes down what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ditron_train.runtime.errors import DitronError
from ditron_train.stream import driver, op_context, plan, recorder
from ditron_train.stream import recorded_graph as recorded
from ditron_train.stream.op_context import OpContext
from ditron_train.stream.plan import Exchange
from ditron_train.stream.recorded_graph import RecordedSequences
from ditron_train.stream.recorder import OpRecorder

STREAM = 7
ASIDE = 8  # where ops are recorded


class _Driver:
    """A stream is a list; while one is recorded, what is put onto it goes into the graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: list[str] = []
        self.alive: list[list[str]] = []
        self.calls: list[tuple[str, int]] = []
        self.allocations: dict[int, int | None] = {}
        monkeypatch.setattr(driver, "allocation_of", self.allocations.get)
        for name in ("record", "upload", "launch", "destroy"):
            monkeypatch.setattr(driver, f"graph_{name}", getattr(self, name))

    def record(self, stream: int, enqueue: Callable[[], None]) -> list[str]:
        self.calls.append(("record", stream))
        before, self.stream = self.stream, []
        try:
            enqueue()
        finally:
            graph, self.stream = self.stream, before
        self.alive.append(graph)
        return graph

    def upload(self, graph: list[str], stream: int) -> None:
        assert graph in self.alive
        self.calls.append(("upload", stream))

    def launch(self, graph: list[str], stream: int) -> None:
        assert stream == STREAM and graph in self.alive
        self.stream += [f"graph of {operation}" for operation in graph]

    def destroy(self, graph: list[str]) -> None:
        self.alive.remove(graph)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    return _Driver(monkeypatch)


def _run(
    sequences: RecordedSequences,
    key: object,
    enqueue: Callable[[], None],
    captured: int | None = None,
    copied: tuple[int, ...] = (),
) -> bool:
    """As an op does it; whether it was a repetition."""
    if sequences.repeat(key, STREAM, copied):
        return True
    enqueue()
    sequences.remember(key, enqueue, STREAM, copied, captured)
    return False


def test_what_comes_often_is_recorded_and_runs_once_each_time(fake: _Driver) -> None:
    sequences = RecordedSequences()
    for _ in range(5):
        for key in ("a", "b"):
            _run(sequences, key, lambda key=key: fake.stream.append(key))
    _run(sequences, "c", lambda: fake.stream.append("c"))
    assert fake.stream == ["a", "b"] * 3 + ["graph of a", "graph of b"] * 2 + ["c"]
    assert fake.alive == [["a"], ["b"]]
    assert fake.calls == [("record", STREAM), ("upload", STREAM)] * 2


def test_a_recording_made_aside_is_readied_where_it_will_run(fake: _Driver) -> None:
    sequences = RecordedSequences()
    for _ in range(4):
        _run(sequences, "op", lambda: fake.stream.append("op"), ASIDE)
    assert fake.stream == ["op"] * 3 + ["graph of op"]
    assert fake.calls == [("record", ASIDE), ("upload", STREAM)]


def test_what_is_forgotten_is_freed_and_recorded_anew(fake: _Driver) -> None:
    sequences = RecordedSequences()
    for text in ("old", "new"):
        for _ in range(4):
            _run(sequences, "key", lambda text=text: fake.stream.append(text))
        sequences.clear()
        assert fake.alive == []
    assert fake.stream == ["old"] * 3 + ["graph of old"] + ["new"] * 3 + ["graph of new"]
    for _ in range(3):
        _run(sequences, "key", lambda: fake.stream.append("last"))
    assert len(fake.alive) == 1
    del sequences
    assert fake.alive == []


def test_another_allocation_at_the_same_address_is_recorded_anew(fake: _Driver) -> None:
    """The driver binds a graph's copies to the memory that was there; it may crash on launching one whose memory is
    gone."""
    sequences = RecordedSequences()
    for number in (70, 71, 72):
        fake.allocations.update({0x1000: 5, 0x2000: number})
        repeated = [
            _run(
                sequences,
                "copy",
                lambda number=number: fake.stream.append(f"copy of {number}"),
                copied=(0x1000, 0x2000),
            )
            for _ in range(5)
        ]
        assert repeated == [False] * 3 + [True] * 2
        assert fake.alive == [[f"copy of {number}"]]
    assert fake.stream.count("graph of copy of 70") == 2


def test_copies_of_memory_that_the_driver_does_not_know_are_not_recorded(fake: _Driver) -> None:
    sequences = RecordedSequences()
    assert not any(_run(sequences, "copy", lambda: None, copied=(0x1000,)) for _ in range(9))
    assert not fake.alive
    fake.allocations[0x1000] = 1
    assert [_run(sequences, "copy", lambda: None, copied=(0x1000,)) for _ in range(5)] == [False] * 3 + [True] * 2


def test_what_is_kept_is_bounded(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_MOST_RECORDED", 2)
    monkeypatch.setattr(recorded, "_MOST_COUNTED", 3)
    sequences = RecordedSequences()
    for key in range(40):
        _run(sequences, key, lambda: None)
        assert len(sequences._calls) <= 3
    for _ in range(5):
        for key in "abc":
            _run(sequences, key, lambda: None)
    assert len(fake.alive) == 2 == len(sequences._recordings)


def test_a_step_of_more_than_is_kept_records_nothing_anew(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """By age alone each would go just before it comes again, and every call would pay for a recording."""
    monkeypatch.setattr(recorded, "_MOST_RECORDED", 8)
    sequences, repeated = RecordedSequences(), 0
    for _ in range(50):
        for key in range(12):
            repeated += _run(sequences, key, lambda: None)
    assert fake.calls.count(("record", STREAM)) == 8
    assert repeated == 8 * (50 - 3)


def test_idle_recordings_make_room(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another phase of the job, oldest first; what runs stays."""
    monkeypatch.setattr(recorded, "_MOST_RECORDED", 3)
    monkeypatch.setattr(recorded, "_IDLE_RUNS", 20)
    sequences = RecordedSequences()

    def run(*keys: str) -> list[bool]:
        return [_run(sequences, key, lambda key=key: fake.stream.append(key)) for key in keys]

    for _ in range(4):
        run("old", "older", "kept")
    run("old")
    while fake.alive == [["old"], ["older"], ["kept"]]:
        run("new", "kept")
    assert fake.alive == [["old"], ["kept"], ["new"]] and sequences._num_runs >= 20
    assert run("new", "kept", "old", "older") == [True, True, True, False]
    for _ in range(10):
        run("older")
    assert [["old"], ["kept"], ["new"]] == fake.alive  # none of them is idle yet


def test_ever_new_sequences_record_at_most_now_and_then(fake: _Driver) -> None:
    """Each comes three times and never again: what that costs stays as it was, once there are many."""
    sequences = RecordedSequences()
    num_keys = 10_000
    for key in range(num_keys):
        for _ in range(3):
            _run(sequences, key, lambda: None)
    rate = recorded._MOST_RECORDED / recorded._IDLE_RUNS
    assert fake.calls.count(("record", STREAM)) <= recorded._MOST_RECORDED + rate * 3 * num_keys
    assert len(fake.alive) == recorded._MOST_RECORDED


def test_a_gpu_without_room_for_another_graph_goes_on_without(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, asked = RecordedSequences(), []

    def run(key: str, times: int) -> None:
        for _ in range(times):
            _run(sequences, key, lambda: fake.stream.append(key))

    def refuse(stream: int, enqueue: Callable[[], None]) -> None:
        asked.append(stream)
        raise DitronError("out of memory")

    run("kept", 3)
    monkeypatch.setattr(driver, "graph_record", refuse)
    monkeypatch.setattr(recorded, "_IDLE_RUNS", 1)
    run("refused", 5)
    run("another", 5)
    run("kept", 1)
    assert fake.stream == ["kept"] * 3 + ["refused"] * 5 + ["another"] * 5 + ["graph of kept"]
    assert asked == [STREAM] * 2  # once each
    for number in range(2 * recorded._MOST_REFUSED):
        run(f"more {number}", 5)
    run("kept", 1)
    assert fake.stream[-1] == "graph of kept" and len(asked) == recorded._MOST_REFUSED


def test_a_sequence_that_cannot_be_recorded_is_the_only_one(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it is captured nor when it is readied; the others are recorded as before."""
    sequences = RecordedSequences()

    def refuse(*_: object) -> None:
        raise DitronError("not now")

    fake.stream.append("before")  # what is captured begins with an empty list
    for _ in range(5):
        _run(sequences, "cannot be captured", lambda: fake.stream.append("ran") if fake.stream else refuse())
    with monkeypatch.context() as patch:
        patch.setattr(driver, "graph_upload", refuse)
        for _ in range(5):
            assert not _run(sequences, "cannot be readied", lambda: fake.stream.append("readied"))
    assert fake.alive == []
    assert [_run(sequences, "good", lambda: fake.stream.append("good")) for _ in range(5)] == [False] * 3 + [True] * 2
    assert fake.alive == [["good"]] and fake.calls.count(("record", STREAM)) == 3


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_is_broken_off_leaves_no_graph(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """The driver gives a graph at the end of a capture, unless the capture itself was broken."""
    alive, is_capturing = [], []

    def begin(stream: int, mode: object) -> tuple[int]:
        is_capturing.append(stream)
        return (0,)

    def end(stream: int) -> tuple[int, object]:
        is_capturing.remove(stream)
        if not ends:
            return 901, None
        alive.append("graph")
        return 0, "graph"

    def destroy(graph: str) -> tuple[int]:
        alive.remove(graph)
        return (0,)

    mode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    calls = dict(cuStreamBeginCapture=begin, cuStreamEndCapture=end, cuGraphDestroy=destroy, CUstreamCaptureMode=mode)
    monkeypatch.setattr(driver, "_require", lambda: SimpleNamespace(**calls))

    def enqueue() -> None:
        raise RuntimeError("while it is captured")

    with pytest.raises(RuntimeError, match="while it is captured"):
        driver.graph_record(STREAM, enqueue)
    assert not alive and not is_capturing


@pytest.fixture
def context(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpContext]:
    """What orders streams and records, of a context on a GPU; the default stream is the current one."""
    context = object.__new__(OpContext)
    context.is_cuda, context.device, context.comm_stream, context.comm_handle = (
        True,
        torch.device("cuda", 0),
        None,
        STREAM,
    )
    context.is_joined, context.recorder = True, object.__new__(OpRecorder)
    context.recorder._context, context.recorder.sequences = context, RecordedSequences()
    context.recorder.is_enabled, context.recorder.is_capturing = True, False
    context._fork_event = context._join_event = None
    current = [STREAM]
    monkeypatch.setattr(
        op_context,
        "order_streams",
        lambda device, first, event, second: fake.stream.append(f"{first} before {second}"),
    )
    for module in (op_context, recorder):
        monkeypatch.setattr(module, "current_handle", lambda device: current[0])
    monkeypatch.setattr(recorder, "_recording_stream", lambda device: SimpleNamespace(cuda_stream=ASIDE))

    def made_current(stream: SimpleNamespace) -> nullcontext:
        fake.calls.append(("current", stream.cuda_stream))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", made_current)
    yield context
    context.recorder.sequences.clear()


def _exchange(context: OpContext) -> Exchange[OpContext]:
    return Exchange(context, None)  # type: ignore[arg-type]


def _op(context: OpContext, fake: _Driver, key: str) -> bool:
    """A send on the communication stream between fork and join; whether it was a repetition."""

    def enqueue() -> None:
        context.fork()
        context.recorder.run(("send", key), lambda: fake.stream.append(f"send {key}"), ())
        context.join()

    if context.recorder.repeat(key, ()):
        return True
    enqueue()
    context.recorder.remember(key, enqueue, ())
    return False


def test_an_op_is_recorded_aside_with_its_sends_in_it(context: OpContext, fake: _Driver) -> None:
    repeated = [_op(context, fake, "a") for _ in range(4)]
    assert repeated == [False] * 3 + [True]
    order = f"{STREAM} before {STREAM}"
    assert fake.alive == [
        ["send a"],
        [order, "send a", order],
    ]  # its own sends, and the whole op, which names no other graph
    assert fake.calls == [
        ("record", STREAM),
        ("upload", STREAM),
        ("record", ASIDE),
        ("current", ASIDE),
        ("upload", STREAM),
    ]
    assert fake.stream[-3:] == [f"graph of {operation}" for operation in fake.alive[1]]
    assert not context.recorder.is_capturing and context.is_joined


def test_no_op_is_repeated_beside_one_that_has_been_started(context: OpContext, fake: _Driver) -> None:
    """Its part on the communication stream would not be behind what that stream has."""
    for _ in range(4):
        repeated = _op(context, fake, "a")
    assert repeated
    before = list(fake.alive)
    for _ in range(4):
        context.fork()
        assert not _op(context, fake, "a")
        context.join()
    assert fake.alive == before  # nor is it recorded anew
    assert context.recorder.repeat("a", ())


def test_nothing_is_recorded_or_repeated_while_a_graph_is_captured(context: OpContext, fake: _Driver) -> None:
    for key, capturing in (("a", False), ("a", True), ("b", True), ("a", False)):
        context.recorder.is_capturing = capturing
        for _ in range(5):
            repeated = _op(context, fake, key)
        assert repeated is not capturing
    assert len(fake.alive) == 2


def test_an_op_that_cannot_be_recorded_leaves_the_context_as_it_was(context: OpContext, fake: _Driver) -> None:
    """Another library's code may refuse to be captured: the job goes on."""
    tried = []

    def enqueue() -> None:
        context.fork()
        tried.append("a")
        raise RuntimeError("while it is captured")

    for _ in range(5):
        context.recorder.remember("a", enqueue, ())
    assert tried == ["a"] and not context.recorder.is_capturing and context.is_joined and not fake.alive


def test_what_allocates_is_never_recorded(context: OpContext, fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would go on using memory that somebody else has by then."""
    counts = {"allocation": {"all": {"allocated": 0}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: counts)

    def allocate() -> None:
        counts["allocation"]["all"]["allocated"] += 1
        fake.stream.append("allocates")

    exchange = _exchange(context)
    for _ in range(9):
        exchange.replay("a", allocate)
        exchange.replay("b", lambda: fake.stream.append("b"))
    assert fake.calls.count(("record", ASIDE)) == 2 and fake.alive == [["b"]]
    assert fake.stream.count("allocates") == 9


def test_what_does_not_fork_is_repeated_beside_an_op_that_has_been_started(context: OpContext, fake: _Driver) -> None:
    """Products of what arrives: the gather is on its way. Without a key nothing is recorded."""
    context.is_joined = False
    exchange = _exchange(context)
    for _ in range(5):
        exchange.replay("waits and products", lambda: fake.stream.append("product"), forks=False)
        exchange.replay("op", lambda: fake.stream.append("op"))
        exchange.replay(None, lambda: fake.stream.append("any"), forks=False)
    assert fake.stream.count("product") == 3 and fake.stream.count("graph of product") == 2
    assert fake.stream.count("op") == fake.stream.count("any") == 5
    assert not context.is_joined


def test_what_its_key_does_not_name_is_not_recorded(context: OpContext, fake: _Driver) -> None:
    """An operand that is copied first is at another address each time."""
    exchange, was_copied = _exchange(context), [True] * 5 + [False] * 5

    def enqueue() -> bool:
        fake.stream.append("op")
        return not was_copied.pop(0)

    for _ in range(5):
        exchange.replay("a", enqueue)
    assert not fake.alive and fake.stream == ["op"] * 5
    for _ in range(4):
        exchange.replay("a", enqueue)
    assert fake.alive == [["op"]] and fake.stream[-1] == "graph of op"


def test_code_of_others_is_recorded_only_if_its_allocations_are_counted(
    context: OpContext, fake: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "counts_allocations", lambda: False)
    exchange = _exchange(context)
    for _ in range(5):
        exchange.replay("fused", lambda: fake.stream.append("fused"))
        exchange.replay("theirs", lambda: fake.stream.append("theirs"), allocates=True)
    assert fake.alive == [["fused"]] and fake.stream.count("theirs") == 5
