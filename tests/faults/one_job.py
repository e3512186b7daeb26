"""Runs one job with one fault: its ranks are forked here, watched to their ends, and judged."""

from __future__ import annotations

import gc
import json
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.symm.shm_transport import FOLDER
from ditron_train.tools.gpu_of_rank import share_gpus
from tests.faults.disks import mount_disks
from tests.faults.fault import Fault, strike
from tests.faults.jobs import JOBS, QUICKSTART, run_quickstart
from tests.faults.judge import Ending, Outcome, judge
from tests.faults.places import Places
from tests.support.forked_ranks import ForkedRanks

NATIVE_TIMEOUT_S = 20.0  # of torch's own collectives, which hold a survivor where a rank stops in stock Megatron
_STEPS = 4  # the first is the phase ``start``
_FAULTY_STEP = 2
_OF_QUICKSTART = 0.5  # of the calls of its first rank: others make fewer, and how often a rank polls differs
_HOLD_CYCLES = 400_000_000  # some 0.2 s of a GPU
_START_S = 120.0  # until the fault, on a busy machine
_END_S = 150.0  # after it: bounds a hang; what a wait may take is judged rank by rank


def run_one(fault: Fault, start_calls: int, folder: Path, device_type: str) -> Outcome:
    """Runs the job of ``fault`` in ``folder``, which is empty.

    Args:
        fault: What is to go wrong.
        start_calls: Function calls of the job's phase ``start``, as a run without a fault counted them.
        folder: Of records, logs and reports.
        device_type: ``cpu`` or ``cuda``.
    """
    records = folder / "records"
    records.mkdir()
    has_disks = device_type == "cpu" and mount_disks(records)
    before = set(os.listdir(FOLDER))
    environment = {
        "DITRON_POSTMORTEM": str(records),
        "DITRON_TIMEOUT_S": f"{fault.timeout_s:g}",
        "DITRON_POLICY": "bits",
        "DITRON_FAULTS_STORE": str(folder / "store"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    if device_type == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # its watchdog would write for a minute before it ends a rank
    ranks = ForkedRanks(fault.world_size, partial(_live, fault, start_calls, folder, device_type), folder, environment)
    try:
        is_in_time, queued_s = _watch(fault, ranks, folder)
    finally:
        is_alive = [one.status is None for one in ranks.ranks]
        orphans = ranks.kill()
    pids = {str(one.pid) for one in ranks.ranks}
    segments = [name for name in set(os.listdir(FOLDER)) - before if _is_of(name, pids, has_disks)]
    for name in segments:
        os.unlink(os.path.join(FOLDER, name))
    fired = _read(folder / "fired.json")
    endings = [
        Ending(one.rank, one.status, is_alive[one.rank],
               None if fired is None or one.ended_s is None else one.ended_s - fired["time_s"],
               _read(folder / f"report{one.rank}.json"), one.printed(), one.queued_s - queued_s[one.rank])
        for one in ranks.ranks
    ]  # fmt: skip
    return judge(
        fault,
        fired,
        endings,
        records,
        is_in_time=is_in_time,
        orphans=orphans,
        segments=segments,
        native_timeout_s=NATIVE_TIMEOUT_S,
    )


def _is_of(name: str, pids: set[str], has_disks: bool) -> bool:
    """Whether a file of shared memory was made by this job."""
    if not name.startswith("ditron-"):
        return False
    return has_disks or name.removeprefix("ditron-").removeprefix("pp-").split("-")[0] in pids


def _watch(fault: Fault, ranks: ForkedRanks, folder: Path) -> tuple[bool, list[float]]:
    """Waits for the ends of all ranks but one that is stopped: whether they come, and how long each had been queued
    for a core when the fault came."""
    fired = folder / "fired.json"
    awaited = [one for one in ranks.ranks if fault.kind != "SIGSTOP" or one.rank != fault.rank]

    def has_ended() -> bool:
        return all(one.status is not None for one in awaited)

    has_begun = ranks.wait(lambda: has_ended() or fired.exists(), time.time() + _START_S)
    ranks.look_at_queues()
    queued_s = [one.queued_s for one in ranks.ranks]
    until_s = time.time() + _END_S + (3.0 * fault.timeout_s if fault.kind == "late" else 0.0)
    return has_begun and ranks.wait(has_ended, until_s), queued_s


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # it died before, or in the middle
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    partial_path = path.with_suffix(".partial")
    partial_path.write_text(json.dumps(content))
    os.replace(partial_path, path)


def _live(fault: Fault, start_calls: int, folder: Path, device_type: str, rank: int) -> None:
    """What a rank does."""
    gc.disable()  # finalizers would run at any time: the same seed hits the same place

    def fire(place: str) -> None:
        _write(folder / "fired.json", {"place": place, "time_s": time.time()})
        strike(fault)

    is_guilty = rank == fault.rank and fault.kind != "none"
    at_start = Places(1 + int(fault.at * start_calls) if is_guilty and fault.phase == "start" else None, fire)
    if fault.job == QUICKSTART:
        at_start = Places(1 + int(_OF_QUICKSTART * fault.at * start_calls) if is_guilty else None, fire)
        with at_start.watched(after="records_of"):  # before that no ranks of this package have met
            run_quickstart(folder, timedelta(seconds=NATIVE_TIMEOUT_S))
        _write(folder / f"report{rank}.json", {"equal": True, "calls": at_start.count})
        return
    device = _join(folder, device_type, rank, fault.world_size)
    with at_start.watched() if rank == fault.rank else nullcontext():
        step = JOBS[fault.job](device)
        first = [tensor.clone() for tensor in step()]
    equal, step_calls = True, 0
    for number in range(1, _STEPS):
        places = Places()
        if is_guilty and number == _FAULTY_STEP and fault.phase == "step":
            if fault.kind == "skipped call":
                _write(folder / "fired.json", {"place": "between two steps", "time_s": time.time()})
                continue
            places = Places(1 + int(fault.at * step_calls), fire)
            if device.type == "cuda":  # the op is enqueued and has not begun when the fault comes
                torch.cuda._sleep(_HOLD_CYCLES)
        with places.watched() if rank == fault.rank else nullcontext():
            found = step()
        step_calls = places.count
        equal &= all(torch.equal(one, other) for one, other in zip(found, first, strict=True))
    _write(folder / f"report{rank}.json", {"equal": equal, "calls": at_start.count})


def _join(folder: Path, device_type: str, rank: int, world_size: int) -> torch.device:
    """The job's group; this rank's device."""
    store = dist.FileStore(str(folder / "store"), world_size)
    options: dict[str, Any] = dict(store=store, rank=rank, world_size=world_size)
    if device_type == "cuda":
        backend = share_gpus(rank, world_size)
        dist.init_process_group(backend, timeout=timedelta(seconds=NATIVE_TIMEOUT_S), **options)
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=NATIVE_TIMEOUT_S), **options)
    # A rank that dies while another one still connects to it is gloo's failure, before this package is called. The
    # store is a file: a rank that has left this wait may die, and the others leave it, too.
    store.set(f"joined{rank}", "")
    store.wait([f"joined{other}" for other in range(world_size)])
    return torch.device("cpu")
