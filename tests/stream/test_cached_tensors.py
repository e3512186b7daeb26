"""A tensor that is kept is used behind what made it, on whichever stream; streams here write down what is asked of
them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ditron_train.stream import cached_tensors as kept
from ditron_train.stream.cached_tensors import CachedTensor


class _Stream:
    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self._done = name, done

    def record_event(self) -> str:
        return f"what {self.name} has"

    def wait_event(self, event: str) -> None:
        self._done.append(f"{self.name} waits for {event}")


def test_another_stream_waits_for_what_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    first, second, capturing = _Stream("the first", done), _Stream("the second", done), []
    current = [first]
    monkeypatch.setattr(kept, "current_stream", lambda device: current[0])
    monkeypatch.setattr(kept, "is_capturing", lambda device: bool(capturing))
    device = torch.device("cuda", 0)
    tensor = SimpleNamespace(device=device, record_stream=lambda stream: done.append(f"used on {stream.name}"))
    one = CachedTensor(tensor)
    assert one.get() is tensor and not done
    current[0] = second
    assert one.get() is tensor and done == ["the second waits for what the first has", "used on the second"]
    capturing.append(True)  # a capture may not wait for what is outside of it
    assert one.get() is tensor and len(done) == 2


def test_on_the_cpu_it_is_there() -> None:
    tensor = torch.zeros(1)
    assert CachedTensor(tensor).get() is tensor
