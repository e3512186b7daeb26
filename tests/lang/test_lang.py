"""The primitives inside kernels, interpreted on 2 and 4 processes over shared memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import bodies_lang as bodies  # noqa: E402
import kernels_lang  # noqa: E402

from tests.support.processes import run_workers, run_workers_once  # noqa: E402


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_all_gather_made_of_primitives(world_size, dtype):
    assert run_workers(world_size, bodies.all_gather, 700, dtype, 0, 6) == [[6] * world_size] * world_size


def test_epochs_wrap():
    flags = run_workers(2, bodies.all_gather, 64, "float32", 2**31 - 3, 6)
    assert flags == [[-(2**31) + 3] * 2] * 2


def test_different_signatures_are_one_error_on_every_rank():
    words = run_workers(2, bodies.different_signatures)
    assert words[0] == words[1]
    assert words[0].startswith("MismatchError: lang.mismatch")
    assert "rank 0: elements=0; rank 1: elements=1" in words[0]


def test_a_wait_ends_at_the_deadline_and_says_whom_it_waited_for():
    outcomes = run_workers_once(2, bodies.absent_peer, env={"DITRON_TIMEOUT_S": "0.5"})
    name, fields = outcomes[0].value
    assert name == "PeerTimeoutError"
    assert fields["op"] == "lang.absent" and fields["waiting_rank"] == 0 and fields["chunk"] == 7
    assert (fields["expected_epoch"], fields["seen_epoch"], fields["missing_rank"]) == (1, 0, 0)


def test_a_wait_takes_its_deadline_and_later_ones_nothing():
    """Whoever gives up sets the channel's abort word, so that a failed call ends after one deadline, not after one a
    wait."""
    first, *others = run_workers_once(2, bodies.waits_without_a_peer, 4, env={"DITRON_TIMEOUT_S": "2"})[0].value
    assert first[0] >= 2.0 and first[1] < 4.0 and sum(without_lateness_s for _, without_lateness_s in others) < 2.0


def test_puts_gets_and_signals():
    assert run_workers(2, bodies.shared_memory_calls) == [True, True]


def test_the_interpreter_has_one_thread():
    out = torch.full((1,), 7, dtype=torch.int32)
    kernels_lang.threads[(1,)](out, torch.zeros(1, dtype=torch.int32), TARGET="interpreter")
    assert out.item() == 0
