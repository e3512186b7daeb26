"""Jobs of their own that tests start: every rank of torchrun starts one process, and these join."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent
_LIMIT_S = 400


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def found_by(program: str, **environment: str | None) -> dict:
    """What this rank's process of a program in this folder says: the last line that it prints, as JSON (collective).

    Args:
        program: Name of the file.
        environment: Variables in addition to torchrun's, and to those under which stock Megatron repeats itself;
            None removes one.
    """
    port = [_free_port() if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(port, src=0)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "TORCH_SYMM"))}
    env |= dict(
        RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port[0]),
        NCCL_ALGO="Ring",
        NCCL_NVLS_ENABLE="0",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        PYTHONPATH=os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]),
    )
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(program))]
    env = {name: value for name, value in (env | environment).items() if value is not None}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_LIMIT_S)
    dist.barrier()
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
