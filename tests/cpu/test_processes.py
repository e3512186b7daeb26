"""The multi-process harness itself: results, failures, timeouts, dead workers."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import WorkerError, run_workers, run_workers_once


class _CustomError(ValueError):
    pass


def _sum_of_ranks(factor):
    value = torch.tensor([float(dist.get_rank() * factor)])
    dist.all_reduce(value)
    return value, os.environ["TRITON_INTERPRET"], torch.get_num_threads(), os.getpid()


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise _CustomError(f"rank {rank} says no")
    dist.barrier()


def _sleep(seconds):
    time.sleep(seconds)


def _read_env(name):
    return os.environ.get(name)


def _die(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    return dist.get_rank()


def _start_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def _sums_and_gloo_loops(num_groups):
    """What each of some groups adds up, and how many threads of this process poll for gloo."""
    groups = [dist.new_group(backend="gloo") for _ in range(num_groups)]
    sums = []
    for group in groups:
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    tasks = [f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task")]
    return sums, sum(Path(task).read_text().startswith("gloo_tcp_loop") for task in tasks)


def _return_error_type():
    return _CustomError


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_by_rank_and_workers_reused(world_size):
    first = run_workers(world_size, _sum_of_ranks, 10)
    second = run_workers(world_size, _sum_of_ranks, 1)
    total = sum(range(world_size))
    assert [r[0].item() for r in first] == [10.0 * total] * world_size
    assert [r[0].item() for r in second] == [1.0 * total] * world_size
    assert all(r[1:3] == ("1", 1) for r in first)
    assert [r[3] for r in first] == [r[3] for r in second]


def test_first_failing_rank_is_raised_with_its_traceback():
    with pytest.raises(_CustomError, match="rank 1 says no") as caught:
        run_workers(2, _fail_on, 1, timeout_s=60)
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "in _fail_on" in str(caught.value.__cause__)
    assert len(run_workers(2, _sum_of_ranks, 1)) == 2  # the next call gets new workers


def test_timeout_kills_the_workers_and_shows_where_they_were():
    pids = [r[3] for r in run_workers(2, _sum_of_ranks, 1)]
    start = time.monotonic()
    with pytest.raises(WorkerError, match="(?s)did not finish within 1 s.*_sleep"):
        run_workers(2, _sleep, 600, timeout_s=1)
    assert time.monotonic() - start < 300
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_worker_has_started_ends_with_it():
    outcomes = run_workers_once(1, _start_child)
    deadline = time.monotonic() + 20
    while _is_running(outcomes[0].value) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(outcomes[0].value)


def test_all_groups_of_a_worker_share_one_gloo_device():
    assert run_workers(2, _sums_and_gloo_loops, 4) == [([2.0] * 4, 1)] * 2


def test_environment_of_one_call():
    assert run_workers(2, _read_env, "DITRON_TIMEOUT_S", env={"DITRON_TIMEOUT_S": "3"}) == ["3", "3"]
    assert run_workers(2, _read_env, "DITRON_TIMEOUT_S") == [os.environ.get("DITRON_TIMEOUT_S")] * 2


def test_dead_worker_is_reported_and_the_others_finish():
    outcomes = run_workers_once(2, _die, 0)
    assert not outcomes[0].ok and outcomes[0].exit_code == 7
    assert outcomes[1].ok and outcomes[1].value == 1
    with pytest.raises(WorkerError, match="rank 0 exited with code 7"):
        run_workers(2, _die, 0, timeout_s=60)


def test_classes_of_the_test_module_keep_their_identity():
    assert run_workers(2, _return_error_type) == [_CustomError, _CustomError]


def test_a_closure_is_refused():
    with pytest.raises(ValueError, match="module level"):
        run_workers(2, lambda: 1)
