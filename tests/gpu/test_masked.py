"""Processes that see one GPU each, as Ray starts them: fused, bit for bit as natively; memory goes back and returns.

Every rank of torchrun starts a process with a ``CUDA_VISIBLE_DEVICES`` of its own; these join a job of their own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

ROOT = Path(__file__).parent.parent.parent
_LIMIT_S = 400
_MIB = 1 << 20


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def _environment(port: int, mode: str) -> dict[str, str]:
    """Of this rank's process: as a Ray worker has it, without torchrun's variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "TORCH_SYMM"))}
    local_rank = int(env["LOCAL_RANK"])
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    env |= dict(
        CUDA_VISIBLE_DEVICES=visible.split(",")[local_rank] if visible else str(local_rank),
        RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        NCCL_ALGO="Ring",
        NCCL_NVLS_ENABLE="0",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        DITRON_POLICY="bits",
        MODE=mode,
        PYTHONPATH=os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]),
    )
    del env["LOCAL_WORLD_SIZE"]
    return env


def _found(mode: str) -> dict:
    """What this rank's process says."""
    port = [_free_port() if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(port, src=0)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("masked_program.py"))]
    done = subprocess.run(command, env=_environment(port[0], mode), capture_output=True, text=True, timeout=_LIMIT_S)
    dist.barrier()
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["devices"] == 1, "the process sees one GPU"
    return found


@pytest.mark.parametrize("mode", ["tp", "gpt"])
def test_bits_of_native(device, own_gpus, mode):
    found = _found(mode)
    assert found["fused"] > 0 and found["differing"] == []
    assert found["repeated"] > found["all"] // 2, "native itself does not repeat"


def test_release_and_wake(device, own_gpus):
    found = _found("release")
    assert found["fused"] > 0 and len(set(found["losses"])) == 1
    assert found["asleep"][0] < found["awake"][0] - found["held"] // 2, "nothing was given back"
    for name in ("awake", "asleep"):  # the first ones load kernels
        first, *others = found[name][2:]
        assert max(others) <= first + 2 * _MIB, (name, found[name])
