"""Which kernels a GPU takes, by its compute capability."""

from __future__ import annotations

import pytest
import torch

from ditron_train.gemm.configs import choose_config
from ditron_train.runtime import device as device_module
from ditron_train.runtime.errors import NotSupportedError

#: Shared memory that a block may have, KiB (CUDA programming guide, compute capabilities).
SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99, (12, 1): 99}


def _target(monkeypatch, capability):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    return device_module._cuda_target.__wrapped__(0)


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_a_gemm_fits_the_memory_of_every_gpu_of_its_target(monkeypatch, capability):
    target = _target(monkeypatch, capability)
    config = choose_config(8192, 4096, 4096, torch.bfloat16, target, 148)
    assert config.shared_bytes <= SHARED_KIB[capability] << 10


def test_old_gpus_are_refused(monkeypatch):
    with pytest.raises(NotSupportedError, match="7.5 is below 8.0"):
        _target(monkeypatch, (7, 5))
