"""The device that Megatron's code means by the current one."""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """The current GPU; the CPU where megatron-core was made to run there (``testing.megatron_cpu``)."""
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)
