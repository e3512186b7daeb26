"""Recorded sequences, with a driver that writes down what it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ditron_train.runtime.errors import DitronError
from ditron_train.stream import driver, recorded
from ditron_train.stream.recorded import RecordedSequences

STREAM = 7


class _Driver:
    """A stream is a list; while one is recorded, what is put onto it goes into the graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: list[str] = []
        self.alive: list[list[str]] = []
        self.num_recorded = 0
        for name in ("record", "launch", "destroy"):
            monkeypatch.setattr(driver, f"graph_{name}", getattr(self, name))

    def record(self, stream: int, enqueue: Callable[[], None]) -> list[str]:
        assert stream == STREAM
        before, self.stream = self.stream, []
        enqueue()
        graph, self.stream = self.stream, before
        self.num_recorded += 1
        self.alive.append(graph)
        return graph

    def launch(self, graph: list[str], stream: int) -> None:
        assert stream == STREAM and graph in self.alive
        self.stream += [f"graph of {operation}" for operation in graph]

    def destroy(self, graph: list[str]) -> None:
        self.alive.remove(graph)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    return _Driver(monkeypatch)


def test_what_comes_often_is_recorded_and_runs_once_each_time(fake: _Driver) -> None:
    sequences = RecordedSequences(STREAM)
    for _ in range(5):
        for key in ("a", "b"):
            sequences.run(key, lambda key=key: fake.stream.append(key))
    sequences.run("c", lambda: fake.stream.append("c"))
    assert fake.stream == ["a", "b"] * 3 + ["graph of a", "graph of b"] * 2 + ["c"]
    assert fake.alive == [["a"], ["b"]]


def test_what_is_forgotten_is_freed_and_recorded_anew(fake: _Driver) -> None:
    sequences = RecordedSequences(STREAM)
    for text in ("old", "new"):
        for _ in range(4):
            sequences.run("key", lambda text=text: fake.stream.append(text))
        sequences.clear()
        assert fake.alive == []
    assert fake.stream == ["old"] * 3 + ["graph of old"] + ["new"] * 3 + ["graph of new"]
    for _ in range(3):
        sequences.run("key", lambda: fake.stream.append("last"))
    assert len(fake.alive) == 1
    del sequences
    assert fake.alive == []


def test_what_is_kept_is_bounded(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_MOST_RECORDED", 2)
    monkeypatch.setattr(recorded, "_MOST_COUNTED", 3)
    sequences = RecordedSequences(STREAM)
    for key in range(40):
        sequences.run(key, lambda: None)
        assert len(sequences._calls) <= 3
    for _ in range(5):
        for key in "abc":
            sequences.run(key, lambda: None)
    assert len(fake.alive) == 2 == len(sequences._recordings)


def test_a_step_of_more_than_is_kept_records_nothing_anew(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """By age alone each would go just before it comes again, and every call would pay for a recording."""
    monkeypatch.setattr(recorded, "_MOST_RECORDED", 8)
    sequences = RecordedSequences(STREAM)
    for _ in range(50):
        for key in range(12):
            sequences.run(key, lambda: fake.stream.append("x"))
    assert fake.num_recorded == 8
    assert fake.stream.count("graph of x") == 8 * (50 - 3)


def test_idle_recordings_make_room(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another phase of the job, oldest first; what runs stays."""
    monkeypatch.setattr(recorded, "_MOST_RECORDED", 3)
    monkeypatch.setattr(recorded, "_IDLE_RUNS", 20)
    sequences = RecordedSequences(STREAM)

    def run(*keys: str) -> list[str]:
        before = len(fake.stream)
        for key in keys:
            sequences.run(key, lambda key=key: fake.stream.append(key))
        return fake.stream[before:]

    for _ in range(4):
        run("old", "older", "kept")
    run("old")
    for _ in range(10):
        run("new", "kept")
    assert fake.alive == [["old"], ["kept"], ["new"]] and sequences._num_runs >= 20
    assert run("new", "kept", "old", "older") == ["graph of new", "graph of kept", "graph of old", "older"]
    for _ in range(10):
        run("older")
    assert fake.alive == [["old"], ["kept"], ["new"]]  # none of them is idle yet


def test_ever_new_sequences_record_now_and_then(fake: _Driver) -> None:
    """Each comes three times and never again: once there are many, a recording is made for every sixteenth call at most."""
    sequences, num_keys = RecordedSequences(STREAM), 10_000
    for key in range(num_keys):
        for _ in range(3):
            sequences.run(key, lambda: None)
    rate = recorded._MOST_RECORDED / recorded._IDLE_RUNS
    assert rate <= 1 / 16 and fake.num_recorded <= recorded._MOST_RECORDED + rate * 3 * num_keys
    assert len(fake.alive) == recorded._MOST_RECORDED


def test_a_gpu_without_room_for_another_graph_goes_on_without(fake: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, asked = RecordedSequences(STREAM), []

    def run(key: str, times: int) -> None:
        for _ in range(times):
            sequences.run(key, lambda: fake.stream.append(key))

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
    assert asked == [STREAM]
