"""One op at one shape, measured and compared as its `OpSpec` says: Megatron's path, its parts, the peer, the fused
path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ditron_train.policy import OpSpec, Place, Shape, results
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession
from ditron_train.tools.timing import Contender

__all__ = ["WIRE_GBPS", "OpCalls", "op_row"]

WIRE_GBPS = 370.0  # what a copy engine moves over NVLink on an H200, the link speed that limits are computed with
_COMPARED = 2  # sets of inputs

_T = TypeVar("_T")


class OpCalls:
    """Calls of one op at one shape, on several sets of random values that are used in turn.

    Attributes:
        spec: Of the op.
        calls: As many as are never found in the L2 cache.
        context: Of the fused path.
    """

    def __init__(
        self,
        session: BenchSession,
        spec: OpSpec[Any, Any],
        shape: Shape,
        *,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        world: Any = dist.group.WORLD
        place = Place(group or world, session.device, dtype or session.dtype)
        first = spec.sample(shape, place, 0)
        count = session.num_input_sets(sum(tensor.nbytes for tensor in spec.inputs(first)))
        self.spec, self.calls = spec, [first, *(spec.sample(shape, place, seed) for seed in range(1, count))]
        self.context = spec.context(first)

    def _pick(self, of_each: Sequence[_T], index: int) -> _T:
        return of_each[index % len(of_each)]

    def run(self, *, is_fused: bool) -> Callable[[int], list[torch.Tensor]]:
        """Results and gradients of call ``index``."""
        context = self.context if is_fused else None
        return lambda index: results(self.spec, self._pick(self.calls, index), context)

    def backward(self, *, is_fused: bool) -> Callable[[int], list[torch.Tensor]]:
        """Gradients alone: the forward pass of every call has run, and its graph is kept."""
        graphs = []
        for call in self.calls:
            function = self.spec.fused(call, self.context) if is_fused else self.spec.megatron(call)
            needed = zip(self.spec.inputs(call), self.spec.needs_grad(call), strict=True)
            leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in needed]
            graphs.append(
                (list(function(*leaves)), [leaf for leaf in leaves if leaf.requires_grad], self.spec.grads(call))
            )

        def run(index: int) -> list[torch.Tensor]:
            outputs, leaves, grads = self._pick(graphs, index)
            return list(torch.autograd.grad(outputs, leaves, list(grads), retain_graph=True))

        return run

    def contenders(self, session: BenchSession) -> dict[str, Contender]:
        """``native``, the parts, the peer where it runs, and ``ditron``, of the measured pass."""
        of_pass = self.backward if self.spec.measured == "backward" else self.run
        parts = [self.spec.parts(call, self.context) for call in self.calls]
        found: dict[str, Contender] = {"native": of_pass(is_fused=False)}
        for name in parts[0]:
            if name in ("gemm", "comm", "peer"):
                found[name] = lambda index, name=name: self._pick(parts, index)[name]()
        found["ditron"] = of_pass(is_fused=True)
        if "peer" in found:
            what = f"{self.spec.peer} {self.spec.row} {self.spec.measured}"
            if session.device.type == "cpu" or not session.attempt(what, found["peer"]):
                del found["peer"]
        return found

    def equal(self, session: BenchSession) -> bool:
        """Whether every result and gradient has the bits of Megatron's path on every rank."""
        native, fused = self.run(is_fused=False), self.run(is_fused=True)
        return all([session.equal(fused(index), native(index)) for index in range(_COMPARED)])


def op_row(
    session: BenchSession,
    spec: OpSpec[Any, Any],
    shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    most: int | None = None,
    more: Callable[[OpCalls], Mapping[str, Any]] = lambda calls: {},
) -> Row:
    """Compares and times one op at one shape (collective).

    Args:
        dtype: Of activations, where it is not the session's.
        most: Repetitions at the most, for what is long.
        more: More fields of the row.

    Raises:
        SettingError: The shape does not divide over the ranks.
    """
    calls = OpCalls(session, spec, shape, dtype=dtype)
    equal = calls.equal(session)
    timings = session.measure(calls.contenders(session), most=most)
    times = {name: timing.median_us for name, timing in timings.items()}
    cost = spec.cost(calls.calls[0], calls.context)
    wire_us = None if cost is None else cost.wire_bytes / WIRE_GBPS / 1e3
    limit_us = None
    if wire_us is not None and session.device.type == "cuda":
        limit_us = max(times.get("gemm", 0.0), wire_us)
    fields: dict[str, Any] = dict(
        dtype=dtype,
        comm_sms=spec.comm_sms(calls.calls[0], calls.context),
        gemm_us=times.get("gemm"),
        comm_us=times.get("comm"),
        limit_us=limit_us,
        peer=spec.peer if "peer" in times else None,
        peer_us=times.get("peer"),
        wire_gbps=None if cost is None else cost.wire_bytes / times["ditron"] / 1e3,
    )
    fields = {name: value for name, value in {**fields, **more(calls)}.items() if value is not None}
    return session.row(spec.row, spec.measured, shape.model, dict(shape.sizes), timings, equal, **fields)
