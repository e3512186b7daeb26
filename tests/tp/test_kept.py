"""Gathered inputs that are kept for backward, in the interpreter, against gloo."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import bodies_kept as bodies  # noqa: E402

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
        assert "up to 64 MiB of a rank" in kept and "1.5 MiB the first" in kept
        assert full.startswith("no more inputs are kept for backward: ") and "DITRON_ARENA_BYTES" in full
