"""A peer that dies or stays away in the middle of an op of TP, on GPUs: the others raise within deadline + 5 s and
end.

torchrun's agent would end the survivors, so the jobs are made of processes of their own, all at once; rank 0 starts
them.
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
END_S = 50  # to start, to fail and to end, four jobs side by side
JOBS = [
    ("killed", "ag_gemm copy"),
    ("killed", "gemm_rs store"),
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


def _survivors_of_all_jobs(world_size: int) -> list[str]:
    """What is wrong with the outcome of any job; nothing if all is as it should be."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in JOBS]
    jobs = {job: _start(*job, world_size, store.port) for job, store in zip(JOBS, stores)}
    until_s = time.monotonic() + END_S
    wrong = []
    try:
        for (fault, op), processes in jobs.items():
            for rank, process in enumerate(processes[:-1]):
                seen, code, err = _outcome(process, until_s)
                right = (
                    seen.get("error") == "PeerTimeoutError"
                    and seen["missing_rank"] == world_size - 1
                    and f"rank {rank} waited" in seen["text"]
                    and seen["waited_s"] < TIMEOUT_S + 5
                    and code == 0
                )
                if not right:
                    wrong.append(f"{fault} {op}, rank {rank}: {json.dumps(seen)}, ended with {code}; stderr:\n{err}")
            if fault == "killed" and processes[-1].wait(timeout=END_S) != -9:
                wrong.append(f"{fault} {op}: the last rank ended with {processes[-1].returncode}")
    finally:
        for process in (process for processes in jobs.values() for process in processes):
            process.kill()
            process.communicate()
    return wrong


def test_survivors_raise_and_end(device: torch.device) -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            wrong = _survivors_of_all_jobs(min(dist.get_world_size(), torch.cuda.device_count(), 3))
        finally:
            store.set("test_faults/over", "")
        if wrong:
            pytest.fail("\n\n".join(wrong), pytrace=False)
    else:
        store.wait(["test_faults/over"], datetime.timedelta(seconds=2 * END_S))
