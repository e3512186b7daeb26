"""One op at one shape, measured and compared as its `BenchCase` says: native, its parts, the peer, the fused
path."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ditron_train.data.device_profiles import known_rates, machine_of
from ditron_train.policy import Function, fused_results, native_results
from ditron_train.runtime.logs import get_logger
from ditron_train.tools.arguments import add_common_arguments, add_shape_argument, check_sizes, choose_models, refuse
from ditron_train.tools.cases import BenchCase, RunEnvironment, Shape
from ditron_train.tools.catalog import cases_of
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.timing import Contender

_COMPARED = 2  # sets of inputs

_T = TypeVar("_T")


class OpCalls:
    """Calls of one op at one shape, on several sets of random values that are used in turn.

    Attributes:
        case, shape: Of the op.
        calls: As many as are never found in the L2 cache.
        no_row_reason: `BenchCase.no_row_reason` of the first one.
        context: Of the fused path; None if a layer runs natively.
    """

    def __init__(self, session: BenchSession, case: BenchCase[Any, Any], shape: Shape) -> None:
        world: Any = dist.group.WORLD
        environment = RunEnvironment(world, session.device, session.dtype)
        first = case.sample(shape, environment, 0)
        count = case.num_sets or session.num_input_sets(sum(tensor.nbytes for tensor in case.op.inputs(first)))
        self.no_row_reason = case.no_row_reason(first)
        self.shape = shape
        self.case, self.calls = case, [first, *(case.sample(shape, environment, seed) for seed in range(1, count))]
        is_native = case.asks_gate and self.no_row_reason is not None
        self.context = None if is_native else case.op.make_context(first)
        self._backward: dict[bool, Callable[[int], list[torch.Tensor]]] = {}

    def _pick(self, of_each: Sequence[_T], index: int) -> _T:
        return of_each[index % len(of_each)]

    def run(self, *, is_fused: bool) -> Callable[[int], list[torch.Tensor]]:
        """Results and gradients of call ``index``."""
        op = self.case.op
        if is_fused:
            return lambda index: fused_results(op, self._pick(self.calls, index), self.context)
        return lambda index: native_results(op, self._pick(self.calls, index))

    def backward(self, *, is_fused: bool) -> Callable[[int], list[torch.Tensor]]:
        """Gradients alone: the forward pass of every call has run, and its graph is kept; or as the case says."""
        if is_fused not in self._backward:
            functions = [self.case.backward(call, self.context, is_fused=is_fused) for call in self.calls]
            has_graphs = functions[0] is None
            self._backward[is_fused] = self._of_graphs(is_fused) if has_graphs else self._without_graphs(functions)
        return self._backward[is_fused]

    def _without_graphs(self, functions: Sequence[Function | None]) -> Callable[[int], list[torch.Tensor]]:
        inputs = [self.case.op.inputs(call) for call in self.calls]

        def run(index: int) -> list[torch.Tensor]:
            function = self._pick(functions, index)
            assert function is not None, "of one call, of all"
            return list(function(*self._pick(inputs, index)))

        return run

    def _of_graphs(self, is_fused: bool) -> Callable[[int], list[torch.Tensor]]:
        graphs, op = [], self.case.op
        for call in self.calls:
            function = op.fused(call, self.context) if is_fused else op.native(call)
            needed = zip(op.inputs(call), op.needs_grad(call), strict=True)
            leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in needed]
            graphs.append((list(function(*leaves)), [leaf for leaf in leaves if leaf.requires_grad], op.grads(call)))

        def run(index: int) -> list[torch.Tensor]:
            outputs, leaves, grads = self._pick(graphs, index)
            return list(torch.autograd.grad(outputs, leaves, list(grads), retain_graph=True))

        return run

    def both(self) -> dict[str, Callable[[int], list[torch.Tensor]]]:
        """``native`` and ``fused``, of the measured pass."""
        of_pass = self.backward if self.case.measured == "backward" else self.run
        return {"native": of_pass(is_fused=False), "fused": of_pass(is_fused=True)}

    def contenders(self, session: BenchSession, *, with_peers: bool = True) -> dict[str, Contender]:
        """``native``, the parts, the peers that run here, and ``fused``, of the measured pass."""
        both: dict[str, Contender] = dict(self.both())
        parts = [self.case.parts(call, self.context) for call in self.calls]
        peers = [self.case.peers(call, self.context) if with_peers else {} for call in self.calls]
        found = {"native": both["native"]}
        for name in parts[0]:
            if name in ("gemm", "comm"):
                found[name] = lambda index, name=name: self._pick(parts, index)[name]()
        for name in peers[0]:
            peer: Contender = lambda index, name=name: self._pick(peers, index)[name]()  # noqa: E731
            if session.attempt(f"{name} {self.case.row} {self.case.measured}", peer):
                found[name] = peer
        return {**found, "fused": both["fused"]}

    def equal(self, session: BenchSession) -> bool:
        """Whether every result and gradient has the bits of stock Megatron on every rank."""
        native, fused = self.run(is_fused=False), self.run(is_fused=True)
        if self.case.backward(self.calls[0], self.context, is_fused=False) is not None:
            native, fused = self.backward(is_fused=False), self.backward(is_fused=True)
        compared = range(min(_COMPARED, len(self.calls)))
        return all([session.equal(fused(index), native(index)) for index in compared])


def parts_of(cases: Iterable[BenchCase[Any, Any]]) -> dict[str, list[BenchCase[Any, Any]]]:
    """Ops with rows of their own by ``--part`` of a benchmark: all backward passes are one part."""
    parts: dict[str, list[BenchCase[Any, Any]]] = {}
    for case in cases:
        if case.has_rows and case.shapes(1, True):
            parts.setdefault("backward" if case.measured == "backward" else case.row, []).append(case)
    return parts


def add_row(session: BenchSession, case: BenchCase[Any, Any], shape: Shape, *, with_peers: bool = True) -> None:
    """Compares and times one op at one shape, and adds the row (collective); one log line if it is not measured.

    Args:
        with_peers: Whether other implementations are timed, too.

    Raises:
        SettingError: The shape does not divide over the ranks.
    """
    with case.surroundings(shape):
        row = _op_row(session, case, shape, with_peers)
    if row is not None:
        session.add(row)


def _op_row(session: BenchSession, case: BenchCase[Any, Any], shape: Shape, with_peers: bool) -> Row | None:
    calls = OpCalls(session, case, shape)
    if calls.no_row_reason is not None:
        sizes = "x".join(map(str, shape.sizes.values()))
        get_logger("bench").info("%s, %s %s is not measured: %s", shape.model, case.row, sizes, calls.no_row_reason)
        session.num_compared[case.row] += 0
        return None
    equal = calls.equal(session)
    contenders = calls.contenders(session, with_peers=with_peers)
    timings = session.measure(contenders, most=case.most_repetitions(shape, session.world_size))
    times = {name: timing.median_us for name, timing in timings.items()}
    cost = case.cost(calls.calls[0], calls.context)
    limit_us = None
    if cost is not None and session.device.type == "cuda":
        link_gbps = known_rates(machine_of(session.device)).link_gbps
        limit_us = max(times.get("gemm", 0.0), cost.wire_bytes / link_gbps / 1e3)
    peers = [name for name in times if name not in ("native", "gemm", "comm", "fused")]
    for name in peers if len(peers) > 1 else ():
        get_logger("bench").info("%s: %.0f us", name, times[name])
    peer = min(peers, key=times.__getitem__, default=None)
    fields: dict[str, Any] = dict(
        comm_sms=case.comm_sms(calls.calls[0], calls.context),
        gemm_us=times.get("gemm"),
        comm_us=times.get("comm"),
        limit_us=limit_us,
        peer=peer,
        peer_us=None if peer is None else times[peer],
        wire_gbps=None if cost is None else cost.wire_bytes / times["fused"] / 1e3,
        logical_gbps=None if cost is None or cost.logical_bytes is None else cost.logical_bytes / times["fused"] / 1e3,
    )
    fields.update(case.columns(calls.calls[0], calls.context, timings))
    fields = {name: value for name, value in fields.items() if value is not None}
    return session.row(case.row, case.measured, shape.model, dict(shape.sizes), timings, equal, **fields)


def shapes_for(
    case: BenchCase[Any, Any],
    arguments: argparse.Namespace,
    world_size: int,
    on_gpu: bool,
    *,
    models: Sequence[str] = (),
    names_known: bool = False,
) -> list[Shape]:
    """The shapes that ``--shape`` and ``--model`` ask for, or the case's own.

    Args:
        models: Names that ``--model`` takes beside those of the case's shapes.
        names_known: Whether ``--shape`` of published sizes has the published name.

    Raises:
        SettingError: A model is unknown, a size not above 0, or a shape does not divide over the ranks.
    """
    asked_for = getattr(arguments, "shape", None)
    check_sizes("--shape", asked_for)
    published, known = list(case.shapes(world_size, on_gpu)), list(case.shapes(world_size, True))
    names = dict.fromkeys([*models, *(shape.model for shape in (*known, *published))])
    wanted = choose_models(getattr(arguments, "model", None), names)
    if asked_for:
        model_of = {tuple(shape.sizes.values()): shape.model for shape in known if names_known}
        sizes = published[0].sizes
        published = [
            Shape(model_of.get(tuple(one), "custom"), dict(zip(sizes, one, strict=True))) for one in asked_for
        ]
    elif on_gpu:
        published = [shape for shape in published if shape.model in wanted]
    for shape in published:
        refuse(case.unsupported_shape(shape, world_size))
    return published


def planned_rows(
    cases: Sequence[BenchCase[Any, Any]], arguments: argparse.Namespace, session: BenchSession
) -> list[tuple[BenchCase[Any, Any], Shape]]:
    """What ``--shape`` and ``--model`` ask for, shape after shape, of each all ops.

    Raises:
        SettingError: As ``shapes_for``.
    """
    models = [shape.model for case in cases for shape in case.shapes(session.world_size, True)]
    on_gpu = session.device.type == "cuda"
    options: dict[str, Any] = dict(models=models, names_known=True)
    planned = [(case, shapes_for(case, arguments, session.world_size, on_gpu, **options)) for case in cases]
    longest = max((len(shapes) for _, shapes in planned), default=0)
    return [(case, shapes[index]) for index in range(longest) for case, shapes in planned if index < len(shapes)]


def bench_of_ops(package: str, sizes: str, shapes: str = "") -> tuple[Callable[..., None], Callable[..., int]]:
    """``add_arguments`` and ``run`` of the benchmark of a subpackage's ops, measured one by one in Megatron's tensor
    parallel group.

    Args:
        package: As in ``tools.catalog``.
        sizes: What ``--shape`` takes, as its help names it.
        shapes: Of what these are, for that help.
    """

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_common_arguments(parser)
        add_shape_argument(parser, f"{shapes} instead of the table's".strip(), sizes)

    def run(arguments: argparse.Namespace) -> int:
        """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

        Raises:
            SettingError: A size below 1, or an unknown model.
        """
        from ditron_train.tools.bench.megatron_tp import megatron_world

        with bench_session(package, arguments) as session, megatron_world(session):
            for case, shape in planned_rows(cases_of(package), arguments, session):
                add_row(session, case, shape)
                session.save()
            return session.finish()

    return add_arguments, run
