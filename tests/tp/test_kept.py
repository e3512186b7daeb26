"""Gathered inputs that are kept for backward, in the interpreter, against gloo."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import bodies_kept as bodies  # noqa: E402

from ditron_train.tp import kept as kept_module  # noqa: E402
from ditron_train.tp.kept import KeptInputs  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402


def _env(mib: int) -> dict[str, str]:
    return {"DITRON_KEEP_GATHERED": str(mib)}


@pytest.mark.parametrize(
    ("world_size", "mib", "gathers"),
    [
        (2, 0, [6, 8, 8, 2]),
        (2, 3, [4, 4, 4, 1]),  # two places: of every second microbatch
        (4, 6, [2, 0, 0, 1]),
    ],
)
def test_backward_gathers_what_had_no_place(world_size, mib, gathers):
    """An input takes 1.5 MiB; of a layer's first call it is never kept."""
    assert run_workers(world_size, bodies.num_gathers_of_pipelines, env=_env(mib)) == [gathers] * world_size


def test_a_first_call_of_a_shape_keeps_nothing():
    """A captured graph keeps nothing, and launches what that call prepared."""
    arena = SimpleNamespace(
        device=torch.device("cpu"), world_size=2, group_name="0", tensor=lambda *args: SimpleNamespace()
    )
    inputs, weight = KeptInputs(arena, 1 << 30), torch.ones(8, 8, requires_grad=True)
    rows = (4, 4, 12, 4, 12)
    kept = [inputs.reserve(torch.ones(count, 8), weight).place is not None for count in rows]
    assert kept == [False, True, False, True, True]


def _inputs(num_places: int) -> KeptInputs:
    """With room for places of 8 rows of 8 columns."""
    arena = SimpleNamespace(
        device=torch.device("cpu"), world_size=2, group_name="0", tensor=lambda *args: SimpleNamespace()
    )
    return KeptInputs(arena, num_places * 8 * 8 * 4)


def test_ever_new_lengths_do_not_fill_what_ranks_remember(monkeypatch):
    """Each shape at each place is one that ranks agree on; behind the last there is room for, inputs are gathered."""
    monkeypatch.setattr(kept_module, "_MOST_SHAPES", 6)
    inputs, weights = _inputs(4), [torch.ones(8, 8, requires_grad=True) for _ in range(3)]
    for rows in (1, 2, 3, 4):
        for step in range(3):  # the first call of a shape keeps nothing
            kept = [inputs.reserve(torch.ones(rows, 8), weight) for weight in weights]
            held = [one.place is not None for one in kept]
            assert held == [step > 0 and rows < 3] * 3
            for one in kept:
                one.release()
    assert len(inputs._shapes) == 6


def test_places_of_weights_that_are_gone_come_back(monkeypatch):
    """Nobody goes back through what a model that is gone has computed last."""
    monkeypatch.setattr(kept_module, "_MOST_CALLS", 10)
    inputs, x = _inputs(2), torch.ones(4, 8)
    for _ in range(2):
        gone = torch.ones(8, 8, requires_grad=True)
        held = [inputs.reserve(x, gone).place is not None for _ in range(2)]
        assert held == [False, True]
    weight, held = torch.ones(8, 8, requires_grad=True), []
    for _ in range(14):
        kept = inputs.reserve(x, weight)
        held.append(kept.place is not None)
        kept.release()
    first = held.index(True)
    assert 4 < first < 12 and all(held[first:])


def test_weights_that_are_new_at_each_call_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(kept_module, "_MOST_SEEN", 4)
    inputs = _inputs(1)
    for _ in range(20):
        inputs.reserve(torch.ones(4, 8), torch.ones(8, 8, requires_grad=True))
    assert len(inputs._seen) <= 4


def test_dropped_graphs_second_backwards_and_failures():
    run_workers(2, bodies.check_dropped_and_repeated, env=_env(3))


def test_a_place_is_for_others_behind_the_backward_that_reads_it():
    """Its stream is the last one's, also where backward calls no op."""
    for gathered, kept in run_workers(2, bodies.num_entered_by_backward, env=_env(3)):
        assert (gathered, kept) == (2, 1)  # start and wait of the gather; reading


def test_a_rank_that_does_not_keep_what_its_peers_do_is_told():
    run_workers(2, bodies.check_a_rank_that_keeps_alone, env=_env(3))


def test_nothing_is_kept_where_nothing_waits_for_it():
    """What a reentrant checkpoint computes again is followed by its backward: it is kept till then."""
    for found in run_workers(2, bodies.num_kept_where_nothing_waits, env=_env(64)):
        assert found == {
            "no_grad": 0, "frozen": 0, "hooks": 0, "checkpoint False": 0, "gathers False": 1, "checkpoint True": 0,
            "gathers True": 0,
        }  # fmt: skip


def test_memory_that_is_missing_is_no_error():
    env = {**_env(64), "DITRON_ARENA_BYTES": "6M"}
    for kept, full in run_workers(2, bodies.words_of_what_is_kept, env=env):
        assert "up to 64 MiB on each rank" in kept and "the first takes 1.5 MiB" in kept
        assert full.startswith("no more inputs are kept for backward: ") and "DITRON_ARENA_BYTES" in full
