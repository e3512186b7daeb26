"""Small calls of every room's ops, for compute-sanitizer: started by ``scripts/sanitizer.sh``, two ranks on one GPU.

    sanitized_ops.py peers      ops of all rooms, forward and backward (RANK and WORLD_SIZE as torchrun sets them)
    sanitized_ops.py alone      kernels of one process: GEMMs and the products of Newton-Schulz

It prints what has run, one line a job.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]
import shared_gpus  # noqa: E402

_ROOMS = ("tp", "sp", "ep", "pp")


def _peers() -> None:
    from ditron_train.tools.faults.jobs import JOBS

    shared_gpus.set_up()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=150)
    store = dist.FileStore(os.environ["DITRON_SANITIZER_STORE"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    for name in sys.argv[2:] or _ROOMS:
        step = JOBS[name](torch.device("cuda", 0))
        first = [tensor.clone() for tensor in step()]
        again = step()
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), name
        print(f"ran {name}", flush=True)


def _alone() -> None:
    from ditron_train.gemm import matmul_nn, matmul_nt, matmul_tn
    from ditron_train.optim.products import addmm, gram, scaled_square

    x = torch.randn(256, 320, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(192, 320, device="cuda", dtype=torch.bfloat16)
    for name, run in {
        "matmul_nt": lambda: matmul_nt(x, weight),
        "matmul_nn": lambda: matmul_nn(x, weight.t().contiguous()),
        "matmul_tn": lambda: matmul_tn(x.t().contiguous(), weight.t().contiguous()),
        "gram": lambda: gram(x),
        "scaled_square": lambda: scaled_square(gram(x), 1.0, 2.0),
        "addmm": lambda: addmm(x, gram(x), x, alpha=1.0, beta=2.0),
    }.items():
        run()
        torch.cuda.synchronize()
        print(f"ran {name}", flush=True)


if __name__ == "__main__":
    torch.cuda.set_device(0)
    _peers() if sys.argv[1] == "peers" else _alone()
