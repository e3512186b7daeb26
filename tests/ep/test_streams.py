"""Which ops of expert parallelism are ordered among each other, and what may be sent ahead; on streams see
``tests/gpu``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from ditron_train.ep import (
    EPContext,
    EPHandle,
    PendingLayout,
    begin_layout,
    combine,
    dispatch,
    dispatch_ahead,
    get_ep_context,
    min_rows_before,
)
from ditron_train.ep.combine import begin_combine
from ditron_train.ep.gemm_combine import gemm_combine
from tests.support.processes import run_workers

_TOKENS, _HIDDEN = 6, 16


class _Order:
    """Counts calls; the last one was ``here`` or on another stream."""

    def __init__(self, here: bool = True) -> None:
        self.calls, self._here, self.is_capturing = 0, here, False

    def enter(self) -> None:
        self.calls += 1

    def is_here(self) -> bool:
        return self._here


def _begin(context: EPContext, seed: int = 0) -> PendingLayout:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    probs = torch.rand(_TOKENS, context.shape.num_experts, generator=generator)
    routed = torch.zeros(probs.shape, dtype=torch.bool).scatter_(1, probs.topk(2).indices, True)
    return begin_layout(routed, probs * routed, _HIDDEN, torch.float32, context)


def _ops(context: EPContext, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Each may use what those before it made."""
    made = SimpleNamespace()
    weights = [torch.ones(_HIDDEN, _HIDDEN) for _ in range(context.shape.experts_per_rank)]

    def keep(name: str, value: object) -> None:
        setattr(made, name, value)

    def begin_to_combine() -> None:
        made.combine = begin_combine(made.rows, made.layout, context, order="ascending")

    return {
        "begin_layout": lambda: keep("pending", _begin(context)),
        "min_rows_before": lambda: min_rows_before(context),
        "dispatch_ahead": lambda: dispatch_ahead(x, made.pending),
        "finish": lambda: keep("layout", made.pending.finish()),
        "dispatch": lambda: keep("rows", dispatch(x, made.layout, context)[0]),
        "combine": lambda: combine(made.rows, made.layout, context, order="ascending"),
        "begin_combine": begin_to_combine,
        "finish_combine": lambda: made.combine.finish(),
        "gemm_combine": lambda: gemm_combine(made.rows, made.layout, context, weights, order="ascending"),
    }


def _entered() -> dict[str, tuple[int, int]]:
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 4, 2)
    assert get_ep_context(dist.group.WORLD, torch.device("cpu"), 2, 1).moves is context.moves
    _begin(context).finish()  # makes the buffers
    kept, moves, counts = (context._calls, context.counts), _Order(), _Order()
    context._calls, context.counts, entered = moves, counts, {}
    try:
        for name, op in _ops(context, torch.ones(_TOKENS, _HIDDEN)).items():
            before = moves.calls, counts.calls
            op()
            entered[name] = (moves.calls - before[0], counts.calls - before[1])
    finally:
        context._calls, context.counts = kept
    return entered


def test_every_op_is_ordered_with_those_that_use_its_buffers() -> None:
    rows, counts, neither = (1, 0), (0, 1), (0, 0)
    for entered in run_workers(2, _entered):
        assert {name for name in entered if entered[name] == counts} == {"begin_layout", "min_rows_before"}
        assert {name for name in entered if entered[name] == neither} == {"finish"}
        assert all(entered[name] == rows for name in entered if "combine" in name or "dispatch" in name)


def _sent_ahead(moves_between: int, here: bool) -> tuple[bool, bool]:
    """Whether tokens travelled ahead, and whether their rows are right."""
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 4, 2)
    x = torch.full((_TOKENS, _HIDDEN), 3.0 + dist.get_rank())
    before = _begin(context).finish()
    expected = _dispatched(x, _begin(context, 1).finish(), context)
    kept, context._calls = context._calls, _Order(here)
    try:
        pending = _begin(context, 1)
    finally:
        context._calls = kept
    for _ in range(moves_between):
        dispatch(-x, before, context)
    dispatch_ahead(x, pending)
    layout = pending.finish()
    ahead = layout.ahead is not None
    return ahead, torch.equal(_dispatched(x, layout, context), expected)


def _dispatched(x: torch.Tensor, layout: EPHandle, context: EPContext) -> torch.Tensor:
    return dispatch(x, layout, context)[0]


def test_nothing_is_sent_ahead_of_a_dispatch_whose_epoch_is_not_known() -> None:
    """The layout holds that of the next one when the counts were exchanged."""
    for moves_between, here in ((0, True), (1, True), (0, False)):
        expected = (moves_between == 0 and here, True)
        assert run_workers(2, _sent_ahead, moves_between, here) == [expected] * 2


def _what_ends_with_an_error() -> list[tuple[str, int]]:
    """In turn: the tables that the host sizes, and the rows. How often the side stream was waited for by then."""
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 2 * dist.get_world_size(), 2)
    x, seen, empty = torch.ones(_TOKENS, _HIDDEN), [], torch.empty
    joined: list[str] = []
    context.rejoin = lambda: joined.append("joined")

    def without_memory(*arguments: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    def seen_of(name: str, call: Callable[[], object]) -> None:
        joined.clear()
        torch.empty = without_memory
        try:
            call()
        except torch.OutOfMemoryError:
            seen.append((name, len(joined)))
        finally:
            torch.empty = empty

    dispatch(x, _begin(context).finish(), context)  # there are buffers now
    for name in ("finish", "dispatch"):
        pending = _begin(context)
        dispatch_ahead(x, pending)
        if name == "finish":
            seen_of(name, pending.finish)
            pending = _begin(context)
            dispatch_ahead(x, pending)
        layout = pending.finish()
        assert layout.ahead is not None
        if name == "dispatch":
            seen_of(name, lambda: dispatch(x, layout, context))  # noqa: B023
        dispatch(x, layout, context)
    return seen


def test_what_is_sent_ahead_does_not_outlive_its_memory_where_there_is_none_for_more() -> None:
    """Who catches the error lets go of the layout, and the current stream would have its memory again under the side
    stream."""
    assert run_workers(2, _what_ends_with_an_error) == [[("finish", 1), ("dispatch", 1)]] * 2


class _Refused(RuntimeError):
    """Stands for ``torch.OutOfMemoryError``."""


def _refused() -> list[tuple[str, bool]]:
    """What forks beside the current stream and is refused: whether the streams are joined. The calls that follow are
    right."""
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 4, 2)
    x = torch.full((_TOKENS, _HIDDEN), 3.0 + dist.get_rank())
    expected = _dispatched(x, _begin(context, 1).finish(), context)
    state, seen = SimpleNamespace(is_forked=False), []

    def note(is_forked: bool) -> Callable[[], None]:
        return lambda: setattr(state, "is_forked", is_forked)

    def refuse(*_: object, **__: object) -> Callable[..., None]:
        def launch(*_: object, stream: object) -> None:
            raise _Refused

        return launch

    def refused(name: str, call: Callable[[], object]) -> None:
        patches = {"fork": note(True), "join": note(False), "rejoin": note(False)}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(context, **patches))
            for op in ("dispatch", "combine"):  # the package's attributes are the functions
                stack.enter_context(mock.patch.object(sys.modules[f"ditron_train.ep.{op}"], "launch", refuse))
            with contextlib.suppress(_Refused):
                call()
                raise AssertionError("it was not refused")
        seen.append((name, state.is_forked))

    pending = _begin(context, 1)
    refused("dispatch_ahead", lambda: dispatch_ahead(x, pending))
    layout = pending.finish()
    rows = _dispatched(x, layout, context)
    assert torch.equal(rows, expected)
    summed = combine(rows, layout, context, order="ascending")[0]
    refused("begin_combine", lambda: begin_combine(rows, layout, context, order="ascending"))
    assert torch.equal(combine(rows, layout, context, order="ascending")[0], summed)
    return seen


def test_what_is_refused_beside_the_current_stream_leaves_no_fork() -> None:
    assert run_workers(2, _refused) == [[("dispatch_ahead", False), ("begin_combine", False)]] * 2
