"""The campaign of faults: drawn by seed, each ends on every rank, and what was wrong is seen to be."""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import bodies_faults as bodies  # noqa: E402

from ditron_train.runtime.errors import SettingError  # noqa: E402
from ditron_train.schedule.orders import arrival_order  # noqa: E402
from ditron_train.tools.postmortem.diverge import find_divergence  # noqa: E402
from ditron_train.tools.postmortem.files import Call, Group, RankFile, read_folder  # noqa: E402
from tests.faults import campaign  # noqa: E402
from tests.faults import judge as judge_module  # noqa: E402
from tests.faults.fault import HARMLESS, KINDS, Fault, draw  # noqa: E402
from tests.faults.jobs import MODULES, PATIENCE  # noqa: E402
from tests.faults.judge import Ending, judge  # noqa: E402
from tests.faults.places import Places  # noqa: E402
from tests.support.forked_ranks import ForkedRanks  # noqa: E402
from tests.support.processes import run_workers, run_workers_once  # noqa: E402

ROOT = Path(__file__).parents[2]
JOBS = {name: (2, 3) for name in MODULES}


@pytest.mark.slow
def test_forty_faults(tmp_path: Path) -> None:
    """Of all kinds, where steps are short; what a run of all subpackages found is committed."""
    path = tmp_path / "faults.json"
    words = ("--count", "40", "--seed", "5000", "--at-once", "2", "--results", str(path))
    words += ("--jobs", "tp,sp,pp,probe")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.faults", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=1500, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert content["summary"]["faults"] == 40 and content["summary"]["places"] > 20
    assert content["summary"]["ended"].keys() <= {"raised", "survived"}
    assert all(
        row["kind"] in HARMLESS or row["ended"] == "raised" or row["kind"] == "late" for row in content["faults"]
    )


def test_the_same_seed_is_the_same_fault() -> None:
    assert [draw(seed, JOBS, 1.5, PATIENCE) for seed in range(50)] == [
        draw(seed, JOBS, 1.5, PATIENCE) for seed in range(50)
    ]


def test_every_kind_is_drawn_in_every_job() -> None:
    drawn = collections.Counter((one.job, one.kind) for one in (draw(n, JOBS, 1.5, PATIENCE) for n in range(5000)))
    assert len(drawn) == len(JOBS) * len(KINDS) - 1  # a training skips no call


FAULT = Fault(1, "tp", "step", "SIGKILL", 2, 0, 0.5, 1.0)
FIRED = {"place": "here", "time_s": 0.0}
WORLD = Group("0", (0, 1))
GAVE_UP = {"kind": "PeerTimeoutError", "text": "", "time_ns": 10**9, "group": "0", "missing_rank": 0, "waited_s": 1.0}


def _verdict(tmp_path: Path, fault: Fault = FAULT, survivor: Ending | None = None, **found: object) -> list[str]:
    endings = [
        Ending(0, -9, False, 0.0, None, ""),
        survivor or Ending(1, 1, False, 1.1, None, "PeerTimeoutError: tp on group 0: rank 1 waited"),
    ]
    options = {"is_in_time": True, "orphans": [], "segments": [], "native_timeout_s": 20.0, **found}
    return judge(fault, FIRED, endings, tmp_path, **options).wrong


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, []),
        ({"is_in_time": False}, ["did not end"]),
        ({"orphans": [7]}, ["processes were left"]),
        ({"segments": ["ditron-1-ab"]}, ["shared memory was left"]),
        ({"survivor": Ending(1, 0, False, 1.1, None, "PeerTimeoutError")}, ["ended with 0"]),
        ({"survivor": Ending(1, 1, False, 6.1, None, "PeerTimeoutError")}, ["after 6.1 s, allowed are 6"]),
        ({"survivor": Ending(1, 1, False, 6.5, None, "PeerTimeoutError", 1.0)}, []),  # a second without a core
        ({"survivor": Ending(1, 1, False, 7.1, None, "PeerTimeoutError", 1.0)}, ["after 7.1 s, allowed are 6 and 1"]),
        ({"survivor": Ending(1, 1, False, 1.1, {"equal": False, "calls": 1}, "PeerTimeoutError")}, ["other results"]),
        ({"fault": Fault(1, "tp", "step", "SIGKILL", 2, 1, 0.5, 1.0)}, ["rank 1 is not named"]),
        ({"fault": Fault(1, "tp", "step", "full disk", 2, 1, 0.5, 1.0)}, ["rank 1 is not named"]),
        ({"fault": Fault(1, "tp", "step", "full disk", 2, 0, 0.5, 1.0)}, []),  # which others gave up waiting for
    ],
)
def test_what_is_wrong_is_seen(
    found: dict[str, object], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        RankFile(0, 2, "host", 1, "running", None, (Call(WORLD, 1, 1, True, "sum"),), (WORLD,)),
        RankFile(1, 2, "host", 2, "raised", GAVE_UP, (Call(WORLD, 1, 1, True, "sum"),), (WORLD,)),
    ]
    monkeypatch.setattr("tests.faults.judge.read_folder", lambda folder: files)
    wrong = [one for one in _verdict(tmp_path, **found) if "ended with -9" not in one and "0.0" not in one]
    assert all(word in " ".join(wrong) for word in words) and bool(wrong) == bool(words)


def test_calls_of_the_package_are_counted_and_stopped_at() -> None:
    counted, hit = Places(), []
    with counted.watched():
        draw(1, JOBS, 1.0, {})  # tools are not hit
    assert counted.count == 0
    arrival_order(1, 4)  # what is cached is not called again
    with counted.watched():
        arrival_order(1, 4)
        arrival_order(1, 4)
    assert counted.count > 1
    with Places(counted.count, hit.append).watched():
        arrival_order(1, 4)
        arrival_order(1, 4)
    assert len(hit) == 1 and hit[0].startswith("schedule/")
    with Places(10**6, hit.append).watched():
        arrival_order(1, 4)
    assert hit[1] == "behind the last call of this phase"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [(["--count", "0"], "--count"), (["--at-once", "0"], "--at-once"), (["--jobs", "xx"], "--jobs knows")],
)
def test_what_cannot_be_is_refused(words: list[str], refusal: str) -> None:
    parser = argparse.ArgumentParser()
    campaign.add_arguments(parser)
    with pytest.raises(SettingError, match=refusal):
        campaign.run(parser.parse_args(words))


@pytest.mark.parametrize("content", ["", "[]", '{"faults": 3}', '{"faults": [{"seed": "x"}]}', "[" * 100000])
def test_results_that_cannot_be_read_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    parser = argparse.ArgumentParser()
    campaign.add_arguments(parser)
    with pytest.raises(SettingError, match="holds no results of faults"):
        campaign.run(parser.parse_args(["--results", str(tmp_path / "results.json")]))


@pytest.mark.parametrize("room", ["symm", "pp"])
def test_no_shared_memory_is_left_by_a_rank_that_dies_with_it(room: str) -> None:
    outcomes = run_workers_once(2, bodies.dies_with_a_file, room, timeout_s=60, env={"DITRON_TIMEOUT_S": "2"})
    assert outcomes[1].value == []


def test_an_agreement_whose_last_rank_dies_takes_no_second_deadline(tmp_path: Path) -> None:
    env = {"DITRON_TIMEOUT_S": "2", "DITRON_POSTMORTEM": str(tmp_path)}
    begun_s = time.monotonic()
    outcomes = run_workers_once(2, bodies.last_one_dies_before_it_publishes, timeout_s=60, env=env)
    first_s, second_s, missing_rank = outcomes[1].value
    assert first_s < bodies.LEAST_S < second_s + 0.5 and missing_rank == 0
    assert time.monotonic() - begun_s < 30
    found = find_divergence(read_folder(tmp_path))  # no op was called: agreements leave records, too
    assert found is not None and found.ranks == (0,)


def test_a_rank_that_ends_early_is_named_where_the_others_see_a_closed_connection() -> None:
    error = {"kind": "RuntimeError", "text": "[gloo] Connection closed by peer", "time_ns": 1, "group": None,
             "missing_rank": None, "waited_s": None}  # fmt: skip
    calls = (Call(WORLD, 1, 1, True, "sum"),)
    files = [
        RankFile(0, 2, "host", 1, "ended", None, calls, (WORLD,)),
        RankFile(1, 2, "host", 1, "raised", error, calls, (WORLD,)),
    ]
    assert find_divergence(files).ranks == (0,)


def test_a_failed_wait_of_one_channel_ends_the_waits_of_the_others() -> None:
    assert all("counts" in op for op in run_workers(2, bodies.layout_times_out))


def test_a_fork_leaves_the_folders_of_its_parent(tmp_path: Path) -> None:
    """Else a rank that ends would remove what the process that started it still needs."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        ranks = ForkedRanks(1, lambda rank: None, tmp_path, {})
        assert ranks.wait(lambda: ranks.ranks[0].status == 0, time.time() + 60.0)
        assert not ranks.kill() and Path(folder).exists()


def test_results_name_no_folders_of_the_machine() -> None:
    printed = f'File "{campaign.__file__}", File "{json.__file__}"'
    assert judge_module._without_folders(printed) == 'File "tests/faults/campaign.py", File "json/__init__.py"'


def test_time_without_a_core_is_measured(tmp_path: Path) -> None:
    """More processes that compute than there are cores: each waits for its turn."""

    def compute(rank: int) -> None:
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            pass

    cores = len(os.sched_getaffinity(0))
    ranks = ForkedRanks(3 * cores, compute, tmp_path, {})
    assert ranks.wait(lambda: all(one.status is not None for one in ranks.ranks), time.time() + 60.0)
    assert not ranks.kill() and [one.status for one in ranks.ranks] == [0] * 3 * cores
    assert sum(one.queued_s for one in ranks.ranks) > 0.5 * cores
