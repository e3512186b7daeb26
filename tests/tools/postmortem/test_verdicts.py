"""The rank that is guilty is the one that is named, whatever it did and whoever suffered from it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import bodies_postmortem as bodies  # noqa: E402
from simulated_job import FAULTS, Job  # noqa: E402

from ditron_train.tools.postmortem.diverge import find_divergence  # noqa: E402
from ditron_train.tools.postmortem.files import Call, Group, RankFile, read_folder  # noqa: E402
from tests.support.processes import run_workers_once  # noqa: E402


@pytest.mark.parametrize("seed", range(10 * len(FAULTS)))
def test_the_guilty_rank_is_named(seed: int) -> None:
    job = Job(seed)
    found = find_divergence(job.run())
    assert found is not None, job.fault
    if found.kind == "differs" and len(found.group.ranks) == 2:  # nobody can say which of two is right
        assert job.guilty in found.ranks, (job.fault, found.text)
    else:
        assert found.ranks == (job.guilty,), (job.fault, found.text)


def test_a_rank_that_comes_too_late_is_named(tmp_path: Path) -> None:
    """It makes a call more than those that gave up on it: they are not behind."""
    env = {"DITRON_POSTMORTEM": str(tmp_path), "DITRON_TIMEOUT_S": "2"}
    outcomes = run_workers_once(3, bodies.rank_comes_too_late, 1, 4.0, timeout_s=60, env=env)
    assert all(type(outcome.error).__name__ == "PeerTimeoutError" for outcome in outcomes)
    files = read_folder(tmp_path)
    assert [len(file.calls) for file in files] == [3, 4, 3]
    found = find_divergence(files)
    assert (found.kind, found.ranks) == ("missing", (1,)) and "rank 1 came too late" in found.text


WORLD = Group("0", (0, 1, 2))


def _waiting(rank: int, calls: int, gave_up_s: float, missing: int) -> RankFile:
    made = tuple(Call(WORLD, number, number * 10**9, True, "sum") for number in range(1, calls + 1))
    error = {"kind": "PeerTimeoutError", "text": "", "time_ns": int(gave_up_s * 1e9), "group": "0",
             "missing_rank": missing, "waited_s": 5.0}  # fmt: skip
    return RankFile(rank, 3, "host", 1, "raised", error, made, (WORLD,))


def test_who_was_killed_inside_a_call_is_named_though_a_peer_got_further() -> None:
    """Rank 2 had all that it needed of call 4, rank 0 had not: neither is to blame for what it did not call."""
    dead = RankFile(1, 3, "host", 1, "running", None, _waiting(1, 4, 0, 0).calls, (WORLD,))
    found = find_divergence([_waiting(0, 4, 9.0, 1), dead, _waiting(2, 5, 10.0, 0)])
    assert found.ranks == (1,)


def test_who_waited_for_a_waiting_rank_leads_to_the_dead_one() -> None:
    """Rank 0 waits for rank 2, which waits for rank 1; rank 0 gives up first."""
    dead = RankFile(1, 3, "host", 1, "running", None, _waiting(1, 4, 0, 0).calls, (WORLD,))
    found = find_divergence([_waiting(0, 4, 9.0, 2), dead, _waiting(2, 4, 9.1, 1)])
    assert found.ranks == (1,)


def test_an_error_that_peers_caused_is_no_rank_s_own() -> None:
    error = {"kind": "RuntimeError", "text": "[../third_party/gloo] Connection closed by peer", "time_ns": 1,
             "group": None, "missing_rank": None, "waited_s": None}  # fmt: skip
    calls = _waiting(0, 4, 0, 0).calls
    dead = RankFile(1, 2, "host", 1, "running", None, calls, (WORLD,))
    found = find_divergence([RankFile(0, 2, "host", 1, "raised", error, calls, (WORLD,)), dead])
    assert found.ranks == (1,)


def _told(rank: int, calls: int, text: str, at_s: float) -> RankFile:
    """A rank that was in a collective of torch's, whose words name nobody."""
    error = {"kind": "RuntimeError", "text": text, "time_ns": int(at_s * 1e9), "group": None, "missing_rank": None,
             "waited_s": None}  # fmt: skip
    return RankFile(rank, 3, "host", 1, "raised", error, _waiting(rank, calls, 0, 0).calls, (WORLD,))


@pytest.mark.parametrize(
    "text",
    [
        "Application timeout caused pair closure",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms",
        "Connection closed by peer [127.0.0.1]:4242",
    ],
)
def test_words_of_torch_s_collectives_are_no_rank_s_own(text: str) -> None:
    """A rank that stopped in a step of Muon: both survivors were in torch's broadcasts."""
    stopped = RankFile(1, 3, "host", 1, "running", None, _waiting(1, 3, 0, 0).calls, (WORLD,))
    assert find_divergence([_told(0, 4, text, 24.0), stopped, _told(2, 4, text, 24.1)]).ranks == (1,)


@pytest.mark.parametrize("calls_of_stopped", [3, 4])
def test_who_waited_in_a_collective_of_torch_s_leads_to_the_stopped_one(calls_of_stopped: int) -> None:
    """Rank 0 is in torch's collective of call 4; rank 2 had all that it needed of it, and waits for rank 0 in call 5.
    Rank 1 stopped before its call 4 was recorded, or behind that."""
    stopped = RankFile(1, 3, "host", 1, "running", None, _waiting(1, calls_of_stopped, 0, 0).calls, (WORLD,))
    held_up = _told(0, 4, "[gloo] Timed out waiting 20000ms", 24.0)
    assert find_divergence([held_up, stopped, _waiting(2, 5, 10.0, 0)]).ranks == (1,)


def test_who_waited_in_a_collective_of_torch_s_leads_to_the_late_one() -> None:
    """As above, but rank 1 comes back, makes call 4 after rank 2 has given up, and finds its peers gone."""
    late = _waiting(1, 4, 0, 0)
    calls = (*late.calls[:3], Call(WORLD, 4, 12 * 10**9, True, "sum"))
    error = {**late.error, "kind": "RuntimeError", "text": "Connection closed by peer", "missing_rank": None,
             "time_ns": 13 * 10**9}  # fmt: skip
    late = RankFile(1, 3, "host", 1, "raised", error, calls, (WORLD,))
    held_up = _told(0, 4, "[gloo] Connection closed by peer", 12.5)
    assert find_divergence([held_up, late, _waiting(2, 5, 10.0, 0)]).ranks == (1,)


def test_rounds_of_muon_are_recorded(tmp_path: Path) -> None:
    """So that a rank that stops in a step of Muon is behind the others."""
    env = {"DITRON_POSTMORTEM": str(tmp_path)}
    assert run_workers_once(2, bodies.send_matrices, 3, timeout_s=60, env=env)[0].value == 2  # one of the two has two
    assert [call.text for call in read_folder(tmp_path)[1].calls] == ["muon.send_round 0", "muon.send_round 1"]
