"""What a context keeps for the shapes it has seen is bounded: sequences of ever new lengths fill no memory. Order of
streams."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ditron_train.stream.op_context import OpContext
from tests.support.processes import run_workers

_LIMIT = 7


def _ever_new_shapes(num_shapes: int) -> tuple[bool, list[int]]:
    from ditron_train.stream import agreement
    from ditron_train.tp import ag_gemm, gemm_rs, get_tp_context

    limit, agreement.MAX_KNOWN_SHAPES = agreement.MAX_KNOWN_SHAPES, _LIMIT
    try:
        context = get_tp_context(dist.new_group(list(range(dist.get_world_size()))), torch.device("cpu"))
        world, right, kept = context.world_size, True, [0] * 4
        for number in range(num_shapes):
            rows = 1 + (number * number) % 23  # some come again, before and after they were forgotten
            generator = torch.Generator().manual_seed(number)
            whole = torch.randint(-3, 4, (rows * world, 16), generator=generator).float()
            weight = torch.randint(-3, 4, (8, 16), generator=generator).float()
            mine = slice(context.rank * rows, (context.rank + 1) * rows)
            right &= torch.equal(ag_gemm(whole[mine], weight, context=context), whole @ weight.t())
            right &= torch.equal(gemm_rs(whole, weight, context=context), world * (whole @ weight.t())[mine])
            channels = (context.gather_channel, context.scatter_channel)
            sizes = (
                len(context.agreed),
                len(context.prepared),
                max(len(c.signatures) for c in channels),
                len(context._tables),
            )
            kept = [max(pair) for pair in zip(kept, sizes)]
        context.synchronize()
        context.arena.close()
        return right, kept
    finally:
        agreement.MAX_KNOWN_SHAPES = limit


def test_what_is_kept_for_shapes_is_bounded() -> None:
    for right, (agreed, prepared, signatures, tables) in run_workers(2, _ever_new_shapes, 40):
        assert right
        assert agreed == _LIMIT and signatures <= _LIMIT and prepared <= _LIMIT + 1 and tables <= 3 * _LIMIT


@pytest.mark.parametrize("current", [0, 7], ids=["default_stream", "another"])
def test_events_of_torch_order_the_streams_that_are_meant(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    """Without cuda-bindings. ``ExternalStream`` takes 0, the default stream's handle, for none, and gives one of
    torch's pool."""
    done: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            done.append(f"after {stream}")

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            done.append(f"holds {self.name}")

        def __str__(self) -> str:
            return self.name

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: Stream(f"stream {handle}" if handle else "of the pool")
    )
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("stream 0"))
    monkeypatch.setattr("ditron_train.stream.op_context.current_handle", lambda device: current)
    context = object.__new__(OpContext)
    context.is_cuda, context.device, context.comm_stream, context.comm_handle = (
        True,
        torch.device("cuda", 0),
        Stream("stream 5"),
        5,
    )
    context._fork_event, context._join_event = Event(), Event()
    context.fork()
    context.join()
    assert done == [f"after stream {current}", "holds stream 5", "after stream 5", f"holds stream {current}"]
