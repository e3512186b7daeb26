"""The order of a reduce-scatter is read from its values: rings, other reduces, trees, roundings, what varies."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from ditron_train.policy import order as order_module
from ditron_train.policy.decide import decide
from ditron_train.policy.order import ReductionOrder, probe_order
from ditron_train.policy.probe import Observation
from tests.support.processes import run_workers

CPU = torch.device("cpu")


def _gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """This rank's share of what every rank contributes."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return [part[dist.get_rank()] for part in parts]


def _ring_reduce(parts: list[torch.Tensor], order: list[int]) -> torch.Tensor:
    total = parts[order[0]]
    for rank in order[1:]:
        total = total + parts[rank]
    return total


def _reduce_scatter(kind: str):
    calls = []

    def reduce_scatter(out: torch.Tensor, x: torch.Tensor) -> None:
        calls.append(kind)
        parts, world, rank = _gathered(x), dist.get_world_size(), dist.get_rank()
        ring = [(rank + 1 + hop) % world for hop in range(world)]
        if kind == "ring":
            out.copy_(_ring_reduce(parts, ring))
        elif kind == "reversed":
            out.copy_(_ring_reduce(parts, ring[-2::-1] + ring[-1:]))
        elif kind == "ascending":
            out.copy_(_ring_reduce(parts, list(range(world))))
        elif kind == "tree":
            out.copy_((parts[0] + parts[1]) + (parts[2] + parts[3]))
        elif kind == "unrounded":
            out.copy_(_ring_reduce([part.float() for part in parts], ring))
        elif kind == "by place":
            out.copy_(_ring_reduce(parts, ring))
            out[500:] = _ring_reduce(parts, list(range(world)))[500:]
        elif kind == "by call":
            out.copy_(_ring_reduce(parts, ring if len(calls) % 2 else list(range(world))))

    return reduce_scatter


def _reveal(kind: str, dtype: torch.dtype = torch.bfloat16) -> ReductionOrder:
    order_module._ELEMENTS = (1 << 10, 1 << 12)
    return probe_order(_reduce_scatter(kind), group=dist.group.WORLD, device=CPU, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("ring", "ring", None),
        ("reversed", "ring-descending", "along ranks in descending order"),
        ("ascending", "order-0-1-2-3", "in the order 0 1 2 3"),
        ("tree", "tree", "along a tree"),
        ("unrounded", "ring-unrounded", "does not round"),
        ("by place", "varying", "depends on the place"),
        ("by call", "varying", "depends on the place"),
    ],
)
def test_what_is_revealed(kind: str, name: str, words: str | None) -> None:
    found = run_workers(4, _reveal, kind)
    assert run_workers(4, _reveal, kind, torch.float16) == found
    assert found == [found[0]] * 4 and found[0].name == name
    assert (
        found[0].reason is None if words is None else words in found[0].reason and "NCCL_ALGO=Ring" in found[0].reason
    )


def test_two_ranks_have_one_order() -> None:
    assert run_workers(2, _reveal, "ascending") == [ReductionOrder("ring", None)] * 2


def test_an_order_that_is_not_fused_stays_native_unprobed(monkeypatch) -> None:
    module = sys.modules["ditron_train.policy.decide"]

    class Gpu:
        type = "cuda"

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(module, "_decided_by", lambda group: {})
    monkeypatch.setattr(module, "probe", lambda *a, **k: Observation(True, 2.0, 1.0))
    monkeypatch.setattr(module, "reduction_order", lambda *a: order_module._other("tree", "adds along a tree"))
    for mode, used in (("strict", False), ("bits", False), ("fast", True)):
        monkeypatch.setenv("DITRON_POLICY", mode)
        decision = decide("tp op", list, list, group=None, device=Gpu(), sums=torch.bfloat16)
        assert decision.use_ditron is used and ("NCCL_ALGO=Ring" in decision.reason) is not used
    monkeypatch.setenv("DITRON_POLICY", "strict")
    assert decide("sp op", list, list, group=None, device=Gpu()).use_ditron  # nothing is summed there
