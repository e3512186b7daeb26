"""What hundreds of ranks cost on the host: processes of this machine around one store that run what a job's ranks do.

python scripts/host_scale.py 8 32 128 512

For each number of ranks one line of JSON: seconds until all are connected (``connect_s``; torch's own, with what this
machine takes to look up names), until all have met (``meet_s``), one agreement (``agree_s``), the
store's own time for it (``agree_store_s``), making groups of 8 (``group_s``), and a rank that does not come: from the
deadline to the last error (``late_s``), and the part of a second that the store works while all wait (``wait_load``).
Hundreds of processes share this machine's cores; the store's time is what they would share in a job, too.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist  # noqa: E402

from ditron_train.runtime.errors import PeerTimeoutError  # noqa: E402
from ditron_train.runtime.flight_recorder import records_of  # noqa: E402
from ditron_train.symm.transport import node_of_process  # noqa: E402

_EXCHANGES, _GROUP, _TIMEOUT_S = 20, 8, 8.0
_module: Any = importlib.import_module("ditron_train.symm.exchange")


def _serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _live(rank: int, world_size: int, port: int, gate: Any, pipe: Any) -> None:
    """One rank: what it measured, in the order of the gate's openings."""
    os.environ["DITRON_TIMEOUT_S"], _module._LEAST_TIMEOUT_S = "300", 0.0
    waits = timedelta(seconds=300)
    times: dict[str, tuple[float, float]] = {}

    def timed(name: str, step: Any) -> Any:
        gate.wait()
        begun_s = time.monotonic()
        found = step()
        times[name] = (begun_s, time.monotonic())
        gate.wait()
        return found

    def connect() -> Any:
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=waits)

    def meet() -> Any:
        records_of("world", range(world_size))
        rendezvous = _module._Rendezvous(dist.PrefixStore("world", store), rank, list(range(world_size)), "world")
        rendezvous.exchange(node_of_process())
        return rendezvous

    def agree() -> None:
        for number in range(_EXCHANGES):
            rendezvous.exchange(f"{number:064d}")

    def groups() -> None:
        first = rank // _GROUP * _GROUP
        ranks = list(range(first, min(first + _GROUP, world_size)))
        one = _module._Rendezvous(dist.PrefixStore(f"group {first}", store), rank - first, ranks, "group")
        for _ in range(4):  # a name, a segment's path twice, whether all have mapped it
            one.exchange("ditron-12345-0123456789abcdef")

    def miss() -> int:
        if rank == world_size // 2:
            return rank
        try:
            rendezvous.exchange("late")
        except PeerTimeoutError as error:
            return error.missing_rank
        return -1

    store = timed("connect", connect)
    rendezvous = timed("meet", meet)
    timed("agree", agree)
    timed("group", groups)
    os.environ["DITRON_TIMEOUT_S"] = str(_TIMEOUT_S)
    missing = timed("miss", miss)
    pipe.send((times, missing, time.process_time()))


def measure(world_size: int) -> dict[str, Any]:
    """One line."""
    context = get_context("fork")
    mine, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    gate, port, pipes, ranks = context.Barrier(world_size + 1), mine.recv(), [], []
    for rank in range(world_size):
        fused, rank_end = context.Pipe()
        ranks.append(context.Process(target=_live, args=(rank, world_size, port, gate, rank_end), daemon=True))
        ranks[-1].start()
        pipes.append(fused)
    store_s = {}
    for name in ("connect", "meet", "agree", "group", "miss"):
        gate.wait()
        before = _cpu_s(server.pid or 0)
        if name == "miss":
            time.sleep(_TIMEOUT_S / 2)  # by then all wait
            middle, begun_s = _cpu_s(server.pid or 0), time.monotonic()
            time.sleep(_TIMEOUT_S / 4)
            store_s["wait"] = (_cpu_s(server.pid or 0) - middle) / (time.monotonic() - begun_s)
        gate.wait()
        store_s[name] = _cpu_s(server.pid or 0) - before
    found = [pipe.recv() for pipe in pipes]
    for one in ranks:
        one.join()
    server.terminate()
    assert all(missing == world_size // 2 for _, missing, _ in found)

    def wall_s(name: str) -> float:
        return max(times[name][1] for times, _, _ in found) - min(times[name][0] for times, _, _ in found)

    return {
        "ranks": world_size,
        "connect_s": round(wall_s("connect"), 3),
        "meet_s": round(wall_s("meet"), 3),
        "meet_store_s": round(store_s["meet"], 3),
        "agree_s": round(wall_s("agree") / _EXCHANGES, 4),
        "agree_store_s": round(store_s["agree"] / _EXCHANGES, 4),
        "group_s": round(wall_s("group"), 3),
        "group_store_s": round(store_s["group"], 3),
        "late_s": round(wall_s("miss") - _TIMEOUT_S, 3),
        "wait_load": round(store_s["wait"], 3),
        "rank_cpu_s": round(sum(cpu for *_, cpu in found) / world_size, 3),
    }


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for size in map(int, sys.argv[1:] or ("8", "32", "128")):
        print(json.dumps(measure(size)), flush=True)
