"""A peer that dies or stays away in the middle of an op, on GPUs: the others raise within deadline + 5 s and end, and
the next job runs.

torchrun's agent would end the survivors, so the jobs are made of processes of their own, side by side; rank 0 starts
them. Ranks may share GPUs.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")

TIMEOUT_S = 5
END_S = 50  # to start, to fail and to end, some jobs side by side
JOBS = [
    ("killed", "ag_gemm copy"),
    ("killed", "gemm_rs store"),
    ("killed", "ep"),
    ("killed", "pp"),
    ("stalled", "ag_gemm push"),
    ("stalled", "gemm_rs copy"),
]
SCRIPT = Path(__file__).parent / "failing_peer.py"


def _start(fault: str, op: str, world_size: int, port: int) -> list[subprocess.Popen]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "PYTEST_"))}
    env.update(DITRON_TIMEOUT_S=str(TIMEOUT_S), DITRON_POSTMORTEM="off", DITRON_TRANSPORT="torch")
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent.parent.parent), env.get("PYTHONPATH", "")])
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(rank), str(world_size), str(port), fault, op],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def _outcome(process: subprocess.Popen, until_s: float) -> tuple[dict, int | None, str]:
    """What a process printed, how it ended (None: not by itself in time), and what it wrote to stderr."""
    try:
        out, err = process.communicate(timeout=max(1.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return json.loads((out.splitlines() or ["{}"])[-1]), None, err
    return json.loads((out.splitlines() or ["{}"])[-1]), process.returncode, err


def _all_wrong(world_size: int, at_once: int) -> list[str]:
    """What is wrong with the outcome of any job; nothing if all is as it should be."""
    wrong = []
    for begin in range(0, len(JOBS), at_once):
        wrong += _wrong_of(JOBS[begin : begin + at_once], world_size)
    return wrong + _wrong_of([("none", "ag_gemm copy"), ("none", "ep")], world_size)


def _wrong_of(jobs: list[tuple[str, str]], world_size: int) -> list[str]:
    """Of some jobs side by side."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in jobs]
    running = {job: _start(*job, world_size, store.port) for job, store in zip(jobs, stores)}
    until_s = time.monotonic() + END_S
    wrong = []
    try:
        for (fault, op), processes in running.items():
            for rank, process in enumerate(processes if fault == "none" else processes[:-1]):
                seen, code, err = _outcome(process, until_s)
                print(f"{fault} {op}, rank {rank}: {json.dumps(seen)}, ended with {code}")
                if code != 0 or not _is_right(fault, op, rank, world_size, seen):
                    wrong.append(f"{fault} {op}, rank {rank}: {json.dumps(seen)}, ended with {code}; stderr:\n{err}")
            if fault == "killed" and processes[-1].wait(timeout=END_S) != -9:
                wrong.append(f"{fault} {op}: the last rank ended with {processes[-1].returncode}")
    finally:
        for process in (process for processes in running.values() for process in processes):
            process.kill()
            process.communicate()
    return wrong


def _is_right(fault: str, op: str, rank: int, world_size: int, seen: dict) -> bool:
    if fault == "none":
        return seen.get("error") == "none"
    return (
        seen.get("error") == "PeerTimeoutError"
        and seen["missing_rank"] == world_size - 1
        and (f"rank {rank} waited" in seen["text"] or op == "pp")  # a failure of a stage is told by all in one's words
        and seen["waited_s"] < TIMEOUT_S + 5
    )


def test_survivors_raise_and_end(device: torch.device, shares_gpus: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    num_jobs_apart = 3  # that wait at the same time for turns on a GPU
    if dist.get_rank() == 0:
        try:
            world_size = 2 if shares_gpus else min(dist.get_world_size(), torch.cuda.device_count(), 3)
            wrong = _all_wrong(world_size, num_jobs_apart if shares_gpus else len(JOBS))
        finally:
            store.set("test_faults/over", "")
        if wrong:
            pytest.fail("\n\n".join(wrong), pytrace=False)
    else:
        store.wait(["test_faults/over"], datetime.timedelta(seconds=4 * END_S))
