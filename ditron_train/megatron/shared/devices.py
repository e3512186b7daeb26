"""The device that Megatron's code means by the current one, and where kernels run."""

from __future__ import annotations

import torch

from ditron_train.runtime.device import is_interpreter, kernel_target
from ditron_train.runtime.errors import NotSupportedError


def current_device() -> torch.device:
    """The current GPU; the CPU if megatron-core was made to run there (``ditron_train.cpu.megatron_shim``)."""
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)


def unsupported_reason_on_device(device: torch.device) -> str | None:
    """Why the kernels of this package do not run on a device, or None."""
    if device.type == "cpu":
        return None if is_interpreter() else "the tensors are on the CPU and Triton's interpreter is off"
    try:
        kernel_target(device)
    except NotSupportedError as error:
        return str(error)
    return None


def unsupported_reason_fp8_on_device(device: torch.device) -> str | None:
    """Why the kernels for FP8 operands do not, or None."""
    reason = unsupported_reason_on_device(device)
    if reason is None and device.type != "cpu" and kernel_target(device) != "sm_90":
        return f"products of FP8 are covered on Hopper, not on {kernel_target(device)}"
    return reason
