"""One process of a job in which the last rank fails: started by ``test_faults``, with its own rendezvous.

    failing_peer.py RANK WORLD_SIZE PORT killed|stalled "ag_gemm copy" | "ag_gemm push" | "gemm_rs copy" | "gemm_rs
    store"

PORT is that of a store which outlives the job. The last rank dies, or stays away, while its fifth call waits on the
device; every other prints what it saw as JSON.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import PeerTimeoutError
from ditron_train.tp import GatherPlan, ag_gemm, gemm_rs, get_tp_context

STALL_S = 120.0
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def main() -> None:
    """See above."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    rank, world_size, port = (int(word) for word in sys.argv[1:4])
    fault, op, mode = sys.argv[4], *sys.argv[5].split()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=limit)
    context = get_tp_context(None, device)
    rows = 512 * (1 if op == "ag_gemm" else world_size)
    x = torch.randn(rows, 1024, device=device, dtype=torch.bfloat16)
    weight = torch.randn(2048, 1024, device=device, dtype=torch.bfloat16)
    if op == "ag_gemm":
        run = functools.partial(ag_gemm, x, weight, context=context, plan=GatherPlan(mode))
    else:
        run = functools.partial(gemm_rs, x, weight, context=context, scatter=mode)
    for _ in range(4):  # from then on sends by copy engines are recorded
        run()
    context.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == world_size - 1:
        torch.cuda._sleep(2**40)  # the call is enqueued, the device does not get to it
        run()
        print("{}", flush=True)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STALL_S)  # until it is killed from outside
    begin_s = time.monotonic()
    seen = {"rank": rank, "error": "none", "text": ""}
    try:
        run()
        context.synchronize()
    except PeerTimeoutError as error:
        seen.update(error=type(error).__name__, text=str(error), missing_rank=error.missing_rank)
    print(json.dumps({**seen, "waited_s": time.monotonic() - begin_s}), flush=True)


if __name__ == "__main__":
    main()
