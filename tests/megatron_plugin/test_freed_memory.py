"""The host waits while much memory was freed that the GPU still uses, counted as PyTorch's allocator does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ditron_train.megatron.shared import freed_memory

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def allocator(monkeypatch):
    """Freed memory in MiB at each look, and after how many looks the stream is idle; returns the looks."""

    def install(freed_mib: list[int], idle_after: int = 99) -> list[int]:
        seen: list[int] = []

        def stats(device: torch.device) -> dict:
            assert device == DEVICE
            seen.append(freed_mib[len(seen)])
            counts = {"active_bytes": (5000 + seen[-1]) << 20, "allocated_bytes": 5000 << 20}
            return {name: {"all": {"current": count}} for name, count in counts.items()}

        monkeypatch.setattr(freed_memory.torch, "empty", lambda *size, **options: None)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
        stream = SimpleNamespace(query=lambda: len(seen) >= idle_after)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(freed_memory, "is_capturing", lambda device: False)
        return seen

    return install


@pytest.mark.parametrize(
    "freed_mib, idle_after, looks",
    [([0], 9, 1), ([256, 0], 9, 1), ([900, 300, 100, 0], 9, 3), ([900, 900, 900], 2, 2)],
)
def test_the_host_waits_while_much_freed_memory_is_in_use(freed_mib, idle_after, looks, allocator):
    seen = allocator(freed_mib, idle_after)
    freed_memory.await_freed_memory(DEVICE)
    assert len(seen) == looks


def test_nothing_is_looked_at_without_a_gpu_or_in_a_capture(allocator, monkeypatch):
    seen = allocator([900])
    freed_memory.await_freed_memory(torch.device("cpu"))
    monkeypatch.setattr(freed_memory, "is_capturing", lambda device: True)
    freed_memory.await_freed_memory(DEVICE)
    assert seen == []


def test_backward_waits_when_the_gradients_of_the_layer_are_added_up(monkeypatch):
    """Of weights whose layer takes the awaiting input: their hooks ran, and the layers before it have not begun."""
    order: list[str] = []
    monkeypatch.setattr(freed_memory, "await_freed_memory", lambda device: order.append("waited"))
    x, first, weight = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    first.register_post_accumulate_grad_hook(lambda tensor: order.append("layer before"))
    weight.register_post_accumulate_grad_hook(lambda tensor: order.append("weight"))
    y = freed_memory.awaiting_freed_memory(x @ first)
    assert torch.equal(y, x @ first)
    (y @ weight).sum().backward()
    assert order == ["weight", "waited", "layer before"]
    assert torch.equal(x.grad, (torch.ones(3, 3) @ weight.t()) @ first.t())
