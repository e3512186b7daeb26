"""One op at one shape, measured and compared as its `OpSpec` says: Megatron's path, its parts, the peer, the fused
path."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ditron_train.policy import Function, OpSpec, Place, Shape, results
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.profiles import known_rates, machine_of
from ditron_train.tools.arguments import check_sizes, choose_models
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession
from ditron_train.tools.timing import Contender, Timing

_COMPARED = 2  # sets of inputs

_T = TypeVar("_T")


class OpCalls:
    """Calls of one op at one shape, on several sets of random values that are used in turn.

    Attributes:
        spec, shape: Of the op.
        calls: As many as are never found in the L2 cache.
        why_no_row: `OpSpec.why_no_row` of the first one.
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
        count = spec.num_sets or session.num_input_sets(sum(tensor.nbytes for tensor in spec.inputs(first)))
        self.why_no_row = spec.why_no_row(first)
        self.shape = shape
        self.spec, self.calls = spec, [first, *(spec.sample(shape, place, seed) for seed in range(1, count))]
        self.context = spec.context(first)
        self._backward: dict[bool, Callable[[int], list[torch.Tensor]]] = {}

    def _pick(self, of_each: Sequence[_T], index: int) -> _T:
        return of_each[index % len(of_each)]

    def run(self, *, is_fused: bool) -> Callable[[int], list[torch.Tensor]]:
        """Results and gradients of call ``index``."""
        context = self.context if is_fused else None
        return lambda index: results(self.spec, self._pick(self.calls, index), context)

    def backward(self, *, is_fused: bool) -> Callable[[int], list[torch.Tensor]]:
        """Gradients alone: the forward pass of every call has run, and its graph is kept; or as the spec says."""
        if is_fused not in self._backward:
            functions = [self._alone(call, is_fused) for call in self.calls]
            has_graphs = functions[0] is None
            self._backward[is_fused] = self._of_graphs(is_fused) if has_graphs else self._without_graphs(functions)
        return self._backward[is_fused]

    def _alone(self, call: Any, is_fused: bool) -> Function | None:
        return self.spec.fused_backward(call, self.context) if is_fused else self.spec.megatron_backward(call)

    def _without_graphs(self, functions: Sequence[Function | None]) -> Callable[[int], list[torch.Tensor]]:
        inputs = [self.spec.inputs(call) for call in self.calls]

        def run(index: int) -> list[torch.Tensor]:
            function = self._pick(functions, index)
            assert function is not None, "of one call, of all"
            return list(function(*self._pick(inputs, index)))

        return run

    def _of_graphs(self, is_fused: bool) -> Callable[[int], list[torch.Tensor]]:
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

    def both(self) -> dict[str, Callable[[int], list[torch.Tensor]]]:
        """``native`` and ``ditron``, of the measured pass."""
        of_pass = self.backward if self.spec.measured == "backward" else self.run
        return {"native": of_pass(is_fused=False), "ditron": of_pass(is_fused=True)}

    def contenders(self, session: BenchSession, *, with_peers: bool = True) -> dict[str, Contender]:
        """``native``, the parts, the peers that run here, and ``ditron``, of the measured pass."""
        both: dict[str, Contender] = dict(self.both())
        parts = [self.spec.parts(call, self.context) for call in self.calls]
        peers = [self.spec.peers(call, self.context) if with_peers else {} for call in self.calls]
        found = {"native": both["native"]}
        for name in parts[0]:
            if name in ("gemm", "comm"):
                found[name] = lambda index, name=name: self._pick(parts, index)[name]()
        for name in peers[0]:
            peer: Contender = lambda index, name=name: self._pick(peers, index)[name]()  # noqa: E731
            if session.attempt(f"{name} {self.spec.row} {self.spec.measured}", peer):
                found[name] = peer
        return {**found, "ditron": both["ditron"]}

    def equal(self, session: BenchSession) -> bool:
        """Whether every result and gradient has the bits of Megatron's path on every rank."""
        native, fused = self.run(is_fused=False), self.run(is_fused=True)
        if self.spec.megatron_backward(self.calls[0]) is not None:
            native, fused = self.backward(is_fused=False), self.backward(is_fused=True)
        compared = range(min(_COMPARED, len(self.calls)))
        return all([session.equal(fused(index), native(index)) for index in compared])


def parts_of(specs: Iterable[OpSpec[Any, Any]]) -> dict[str, list[OpSpec[Any, Any]]]:
    """Ops with rows of their own by ``--part`` of a benchmark: all backward passes are one part."""
    parts: dict[str, list[OpSpec[Any, Any]]] = {}
    for spec in specs:
        if spec.has_rows and spec.shapes(1, True):
            parts.setdefault("backward" if spec.measured == "backward" else spec.row, []).append(spec)
    return parts


def add_row(session: BenchSession, spec: OpSpec[Any, Any], shape: Shape, **options: Any) -> None:
    """Compares and times one op at one shape, and adds the row (collective); one log line where it is not measured.

    Args:
        options: As of ``_op_row``.
    """
    with spec.surroundings(shape):
        row = _op_row(session, spec, shape, **options)
    if row is not None:
        session.add(row)


def _op_row(
    session: BenchSession,
    spec: OpSpec[Any, Any],
    shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    with_peers: bool = True,
    more: Callable[[OpCalls, Mapping[str, Timing]], Mapping[str, Any]] = lambda calls, timings: {},
) -> Row | None:
    """Compares and times one op at one shape in its surroundings (collective); None where it is not measured.

    Args:
        dtype: Of activations, where it is not the session's.
        with_peers: Whether other implementations are timed, too.
        more: More fields of the row.

    Raises:
        SettingError: The shape does not divide over the ranks.
    """
    calls = OpCalls(session, spec, shape, dtype=dtype)
    if calls.why_no_row is not None:
        sizes = "x".join(map(str, shape.sizes.values()))
        get_logger("bench").info("%s, %s %s is not measured: %s", shape.model, spec.row, sizes, calls.why_no_row)
        session.num_compared[spec.row] += 0
        return None
    assert calls.context is not None, "native would be compared with native"
    equal = calls.equal(session)
    contenders = calls.contenders(session, with_peers=with_peers)
    timings = session.measure(contenders, most=spec.most_repetitions(shape, session.world_size))
    times = {name: timing.median_us for name, timing in timings.items()}
    cost = spec.cost(calls.calls[0], calls.context)
    limit_us = None
    if cost is not None and session.device.type == "cuda":
        link_gbps = known_rates(machine_of(session.device)).link_gbps
        limit_us = max(times.get("gemm", 0.0), cost.wire_bytes / link_gbps / 1e3)
    peers = [name for name in times if name not in ("native", "gemm", "comm", "ditron")]
    for name in peers if len(peers) > 1 else ():
        get_logger("bench").info("%s: %.0f us", name, times[name])
    peer = min(peers, key=times.__getitem__, default=None)
    fields: dict[str, Any] = dict(
        dtype=dtype,
        comm_sms=spec.comm_sms(calls.calls[0], calls.context),
        gemm_us=times.get("gemm"),
        comm_us=times.get("comm"),
        limit_us=limit_us,
        peer=peer,
        peer_us=None if peer is None else times[peer],
        wire_gbps=None if cost is None else cost.wire_bytes / times["ditron"] / 1e3,
        logical_gbps=None
        if cost is None or cost.logical_bytes is None
        else cost.logical_bytes / times["ditron"] / 1e3,
    )
    fields.update({**spec.columns(calls.calls[0], calls.context, times), **more(calls, timings)})
    fields = {name: value for name, value in fields.items() if value is not None}
    return session.row(spec.row, spec.measured, shape.model, dict(shape.sizes), timings, equal, **fields)


def shapes_for(
    spec: OpSpec[Any, Any],
    arguments: argparse.Namespace,
    world_size: int,
    on_gpu: bool,
    *,
    models: Sequence[str] = (),
    names_known: bool = False,
) -> list[Shape]:
    """The shapes that ``--shape`` and ``--model`` ask for, or the spec's own.

    Args:
        models: Names that ``--model`` takes beside those of the spec's shapes.
        names_known: Whether ``--shape`` of published sizes has the published name.

    Raises:
        SettingError: A model is unknown, a size not above 0, or a shape does not divide over the ranks.
    """
    asked_for = getattr(arguments, "shape", None)
    check_sizes("--shape", asked_for)
    published, known = list(spec.shapes(world_size, on_gpu)), list(spec.shapes(world_size, True))
    names = dict.fromkeys([*models, *(shape.model for shape in (*known, *published))])
    wanted = choose_models([name for name in getattr(arguments, "model", None) or () if name], names)
    if asked_for:
        model_of = {tuple(shape.sizes.values()): shape.model for shape in known if names_known}
        sizes = published[0].sizes
        published = [
            Shape(model_of.get(tuple(one), "custom"), dict(zip(sizes, one, strict=True))) for one in asked_for
        ]
    elif on_gpu:
        published = [shape for shape in published if shape.model in wanted]
    for shape in published:
        why = spec.why_not_shape(shape, world_size)
        if why is not None:
            raise SettingError(why)
    return published


def planned_rows(
    specs: Sequence[OpSpec[Any, Any]], arguments: argparse.Namespace, session: BenchSession
) -> list[tuple[OpSpec[Any, Any], Shape]]:
    """What ``--shape`` and ``--model`` ask for, shape after shape, of each all ops.

    Raises:
        SettingError: As ``shapes_for``.
    """
    models = [shape.model for spec in specs for shape in spec.shapes(session.world_size, True)]
    on_gpu = session.device.type == "cuda"
    options: dict[str, Any] = dict(models=models, names_known=True)
    planned = [(spec, shapes_for(spec, arguments, session.world_size, on_gpu, **options)) for spec in specs]
    longest = max((len(shapes) for _, shapes in planned), default=0)
    return [(spec, shapes[index]) for index in range(longest) for spec, shapes in planned if index < len(shapes)]
