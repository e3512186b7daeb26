"""One process of a job in which the last rank fails: started by ``test_faults``, with its own rendezvous.

    failing_peer.py RANK WORLD_SIZE PORT killed|stalled|none OP

PORT is that of a store which outlives the job. OP: "ag_gemm copy", "ag_gemm push", "gemm_rs copy", "gemm_rs store";
"ep", a dispatch and its combine; "pp", messages to both sides. The last rank dies, or stays away, while its fifth call
waits on the device; every other prints what it saw as JSON. With ``none`` nothing happens.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import PeerTimeoutError
from ditron_train.tools.gpu_of_rank import share_gpus
from ditron_train.tp import GatherPlan, ag_gemm, gemm_rs, get_tp_context
from tests.faults.jobs import JOBS

STALL_S = 120.0
_UNTIL_DEATH_S = 1.0
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def main() -> None:
    """Runs the script."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    rank, world_size, port = (int(word) for word in sys.argv[1:4])
    fault, op = sys.argv[4:6]
    backend = share_gpus(rank, world_size)
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    run = _step_of(op, torch.device("cuda", torch.cuda.current_device()))
    for _ in range(4):  # from then on sends by copy engines are recorded
        run()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == world_size - 1 and fault != "none":
        torch.cuda._sleep(2**40)  # what is enqueued behind it does not begin
        if fault == "killed":
            threading.Timer(_UNTIL_DEATH_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
        print("{}", flush=True)
        run()  # waits for the device
        time.sleep(STALL_S)
    begin_s = time.monotonic()
    seen = {"rank": rank, "error": "none", "text": ""}
    try:
        run()
    except PeerTimeoutError as error:
        seen.update(error=type(error).__name__, text=str(error), missing_rank=error.missing_rank)
    print(json.dumps({**seen, "waited_s": time.monotonic() - begin_s}), flush=True)


def _step_of(op: str, device: torch.device) -> Callable[[], object]:
    """One call, behind which the device is done."""
    if op in JOBS:
        return JOBS[op](device)
    name, mode = op.split()
    context = get_tp_context(None, device)
    rows = 512 * (1 if name == "ag_gemm" else dist.get_world_size())
    x = torch.randn(rows, 1024, device=device, dtype=torch.bfloat16)
    weight = torch.randn(2048, 1024, device=device, dtype=torch.bfloat16)

    def run() -> None:
        if name == "ag_gemm":
            ag_gemm(x, weight, context=context, plan=GatherPlan(mode))
        else:
            gemm_rs(x, weight, context=context, scatter=mode)
        context.synchronize()

    return run


if __name__ == "__main__":
    main()
