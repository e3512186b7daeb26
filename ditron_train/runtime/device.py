"""Facts about the device that kernels and hosts need."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Iterator
from functools import cache

import torch

from ditron_train.runtime.errors import NotSupportedError

#: Of ``kernel_target``: GPUs with TMA and tensor cores that take operands from shared memory.
HOPPER_AND_NEWER = ("sm_90", "sm_100")
_SM_CLOCK = 1  # NVML_CLOCK_SM


@cache
def is_interpreter() -> bool:
    """Whether Triton kernels are interpreted on the CPU (``TRITON_INTERPRET=1`` when the kernels were imported)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def is_capturing(device: torch.device) -> bool:
    """Whether what is enqueued now goes into a CUDA graph. Replays see the addresses of now and none of the host's
    work."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def replays_compiled_graphs(device: torch.device) -> bool:
    """Whether ``torch.compile(mode="reduce-overhead")`` has made CUDA graphs on ``device``, which has an index: what
    one of them returned is overwritten by a later replay, whoever still holds it."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # loaded by the first of them
    return trees is not None and device.type == "cuda" and trees.get_manager(device.index, False) is not None


def with_index(device: torch.device | str) -> torch.device:
    """The device; of CUDA without an index, the current GPU: what is kept for a device is found by the one that is
    meant."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


_assumed: list[str] = []


@contextlib.contextmanager
def assuming_gpu(target: str) -> Iterator[None]:
    """Inside, GPUs count as ones of this ``kernel_target``: questions about a job can be asked if there is none."""
    _assumed.append(target)
    try:
        yield
    finally:
        _assumed.pop()


@cache
def _cuda_target(index: int) -> str:
    if torch.version.hip:
        return "hip"
    major, minor = torch.cuda.get_device_capability(index)
    if major == 12:  # as little shared memory as 8.6 has, and its instructions
        return "sm_80"
    if major >= 10:
        return "sm_100"
    if major == 9:
        return "sm_90"
    if major == 8:
        return "sm_80"
    raise NotSupportedError(f"compute capability {major}.{minor} is below 8.0")


def kernel_target(device: torch.device) -> str:
    """Returns what kernels take as their constexpr ``TARGET``.

    One of ``interpreter``, ``sm_80``, ``sm_90``, ``sm_100``, ``hip``. It is an explicit argument since
    ``tl.target_info`` needs a driver and would drop fences silently if a kernel is only compiled.

    Raises:
        NotSupportedError: A CPU device while Triton is not in interpreter mode, or a GPU that is too old.
    """
    device = with_index(device)
    if device.type == "cuda":
        return _assumed[-1] if _assumed else _cuda_target(device.index)
    if device.type == "cpu" and is_interpreter():
        return "interpreter"
    if device.type == "cpu":
        raise NotSupportedError(
            "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before ditron_train is imported"
        )
    raise NotSupportedError(f"no kernels for device type {device.type!r}")


@cache
def _cuda_num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_sms(device: torch.device) -> int:
    """Number of multiprocessors; 1 in the interpreter, where the programs of a grid run one after another."""
    device = with_index(device)
    return _cuda_num_sms(device.index) if device.type == "cuda" else 1


@cache
def device_name(device: torch.device) -> str:
    """Returns the GPU's name, such as ``NVIDIA H200``, or ``CPU x86_64``."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


@cache
def _nvml(index: int) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The driver's library and its handle of torch's device; None if there is no such library, or it does not know
    it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, uuid = ctypes.c_void_p(), f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    return library, handle


def _told_by_driver(function: str, answer: ctypes.c_uint | ctypes.c_ulonglong, *options: int) -> int | None:
    found = _nvml(torch.cuda.current_device()) if torch.cuda.is_available() else None
    if found is None:
        return None
    library, handle = found
    return None if getattr(library, function)(handle, *options, ctypes.byref(answer)) else answer.value


def sm_clock_mhz() -> int | None:
    """The clock of the current device's multiprocessors in MHz at this moment; None if nothing tells it."""
    return _told_by_driver("nvmlDeviceGetClockInfo", ctypes.c_uint(), _SM_CLOCK)


def energy_mj() -> int | None:
    """What the current device has taken since its driver was loaded, in millijoules; None if nothing tells it."""
    return _told_by_driver("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
