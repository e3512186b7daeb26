"""Processes that see one GPU each, as Ray starts them: fused, bit for bit as natively; memory goes back and returns.

Every rank of torchrun starts a process with a ``CUDA_VISIBLE_DEVICES`` of its own; these join a job of their own.
"""

from __future__ import annotations

import os

import pytest
import torch
from child_job import found_by

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

_MIB = 1 << 20


def _found(mode: str) -> dict:
    """What this rank's process says: as a Ray worker has it, without torchrun's variables."""
    local_rank = int(os.environ["LOCAL_RANK"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    device = visible.split(",")[local_rank] if visible else str(local_rank)
    ray = dict(CUDA_VISIBLE_DEVICES=device, LOCAL_RANK="0", LOCAL_WORLD_SIZE=None)
    found = found_by("masked_program.py", DITRON_POLICY="bits", MODE=mode, **ray)
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
    for name in ("awake", "asleep"):  # the first two load kernels; which of torch's segments are free varies a little
        early, late = found[name][2:7], found[name][7:]
        assert min(late) <= min(early) + 2 * _MIB, (name, found[name])
