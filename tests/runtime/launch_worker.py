"""Launches kernels through the installed Triton's own launcher to a driver that records, and prints what it was given.

Started by ``test_launch.py`` in a process of its own, since a process that interprets kernels cannot launch them. The
one argument names the folder of ``libcuda.so.1``, built of ``recording_driver.c``.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.tools.tensor_descriptor import TensorDescriptor

from ditron_train.runtime import launch as launching
from ditron_train.runtime.launch import KernelLaunch, compiled_together
from ditron_train.runtime.triton_launcher import recorder_of

_BYTES = {"u8": 1, "s8": 1, "u16": 2, "u32": 4, "s32": 4, "f32": 4, "u64": 8, "s64": 8, "f64": 8, "b8": 1}


@triton.jit
def with_descriptors(a_desc, x_ptr, size, b_desc, scale, BLOCK: tl.constexpr):
    rows = a_desc.load([0, 0]) + b_desc.load([0, 0])
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.sum(rows.to(tl.float32), axis=0) * scale, mask=tl.arange(0, BLOCK) < size)


@triton.jit
def without_descriptors(x_ptr, size, y_ptr, scale, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(x_ptr + lanes, tl.load(y_ptr + lanes, mask=lanes < size) * scale, mask=lanes < size)


@triton.jit(do_not_specialize=["size"])
def of_any_size(x_ptr, size, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(x_ptr + lanes, lanes, mask=lanes < size)


class Rows(NamedTuple):
    x: torch.Tensor
    size: int


class Factors(NamedTuple):
    y: torch.Tensor
    inner: tuple[torch.Tensor]


class Tile(NamedTuple):
    size: int
    doubles: bool


@triton.jit
def with_tuples(rows, count, factors, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE.size)
    values = tl.load(factors.y + lanes, mask=lanes < rows.size) * tl.load(factors.inner[0])
    if TILE.doubles:
        values += values
    tl.store(rows.x + lanes, values, mask=lanes < count)


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("num_attributes", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("parameters", (ctypes.c_ubyte * 128) * 64),
    ]


class _Recording:
    """The driver: what its last launch was given."""

    def __init__(self, folder: str) -> None:
        self._library = ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self._library.recording_last.restype = ctypes.POINTER(_Launch)
        self._sizes: list[int] = []

    @property
    def num_launches(self) -> int:
        return self._library.recording_launches()

    def expect(self, ptx: str) -> None:
        """The sizes of parameters are those that the compiled kernel has."""
        found = re.findall(r"\.param[^,()]*?\.(\w+)\s+(?:\.ptr[^,()]*?)?\w+_param_\d+(?:\[(\d+)\])?", ptx)
        self._sizes = [_BYTES[kind] * int(count or 1) for kind, count in found]
        self._library.recording_expect(len(self._sizes), (ctypes.c_uint * len(self._sizes))(*self._sizes))

    def last(self) -> dict[str, Any]:
        seen = self._library.recording_last().contents
        return {
            "grid": list(seen.grid),
            "block": list(seen.block),
            "shared": seen.shared,
            "stream": seen.stream,
            "attributes": seen.num_attributes,
            "function": seen.function,
            "parameters": [bytes(part[:size]).hex() for part, size in zip(seen.parameters, self._sizes)],
        }


def _arguments(name: str) -> tuple:
    x, y = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    if name == "with_descriptors":
        a, b = (TensorDescriptor(t, [64, 64], [64, 1], [16, 64]) for t in (x, y))
        return a, x, 12, b, 2.5
    if name == "with_tuples":
        return Rows(x, 16), 12, Factors(y, (x,))
    return x, 12, y, 2.5


def _seen(name: str, kernel: Any, recording: _Recording) -> dict[str, Any]:
    """The same launch by Triton, by its compiled kernel and repeated."""
    constants = {"TILE": Tile(64, True)} if name == "with_tuples" else {"BLOCK": 64}
    arguments, made = _arguments(name), KernelLaunch(kernel, 131, constants)
    recording.expect("")  # how many parameters it has is not known before it is compiled
    compiled = kernel[(131,)](*arguments, **constants, **made._options)
    recording.expect(compiled.asm["ptx"])
    kernel[(131,)](*arguments, **constants, **made._options)
    by_triton = recording.last()
    made(*arguments)
    launches = recording.num_launches
    made(*arguments, key="key")
    directly = recording.last()
    recorded = recording.num_launches - launches
    known, unknown = made.repeat("key", 6), made.repeat("other", 6)
    call = recorder_of(compiled, 131)((*arguments, *constants.values()))
    return {
        "triton": by_triton,
        "directly": directly,
        "repeated": recording.last(),
        "known": known,
        "unknown": unknown,
        "launches_of_a_recorded_call": recorded,
        "launches": recording.num_launches - launches,
        "keeps_memory": _holds_memory((call.before, call.after)),
        "fp_fusion": compiled.metadata.enable_fp_fusion,
    }


def _holds_memory(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_memory, value))
    return isinstance(value, (torch.Tensor, TensorDescriptor))


def _compiled_by_field(recording: _Recording) -> list[int]:
    """How many kernels there are after each of some launches whose tuples differ."""
    made = KernelLaunch(with_tuples, 131, {"TILE": Tile(64, False)})
    recording.expect("")
    x, counts = torch.zeros(128, dtype=torch.bfloat16), []
    for y, size in ((x, 16), (x[1:], 16), (x[8:], 16), (x, 17)):
        made(Rows(x, size), 12, Factors(y, (x,)))
        counts.append(len(made._compiled))
    return counts


def _kept(recording: _Recording, monkeypatched: Any) -> dict[str, Any]:
    """What is kept for keys: nothing without one, a bounded number, and each device's kernels by themselves."""
    made, arguments = KernelLaunch(without_descriptors, 131, {"BLOCK": 128}), _arguments("without_descriptors")
    recording.expect("")
    made(*arguments)
    made(*arguments)
    without_key = made.repeat(None, 5)
    monkeypatched._MAX_REPEATED, most = 3, 0
    for number in range(10):
        made(*arguments, key=number)
        assert made.repeat(number, 5)
        most = max(most, len(made._repeated))
    compiled = []
    for device in (1, 0, 1):
        monkeypatched._current_device = lambda device=device: device
        made(*arguments)
        compiled.append(len(made._compiled))
    monkeypatched._current_device = lambda: 0
    return {"without_key": without_key, "most": most, "compiled_by_device": compiled}


def _preloaded(recording: _Recording) -> dict[str, Any]:
    """Kernels that were compiled together are loaded, before anything is launched."""
    kernel = KernelLaunch(without_descriptors, 7, {"BLOCK": 256})
    with compiled_together(torch.device("cpu")):
        kernel.compile(*_arguments("without_descriptors"))
    caches = without_descriptors.device_caches[0]
    compiled = [value for cache in caches if isinstance(cache, dict) for value in cache.values()]
    loaded = [getattr(value, "function", None) for value in compiled if hasattr(value, "metadata")]
    return {"functions": loaded, "launches": recording.num_launches}


def _launched_while_compiling(recording: _Recording) -> dict[str, Any]:
    """A kernel that is launched where others are compiled together runs there, and from then on directly."""
    made, arguments = KernelLaunch(without_descriptors, 7, {"BLOCK": 512}), _arguments("without_descriptors")
    recording.expect("")
    before = recording.num_launches
    with compiled_together(torch.device("cpu")):
        made(*arguments)
    launches = [recording.num_launches - before]
    made(*arguments, key="key")
    repeated = made.repeat("key", 5)
    return {
        "launches": [*launches, recording.num_launches - before],
        "repeated": repeated,
        "known": len(made._compiled),
    }


def _any_sizes(recording: _Recording) -> list[tuple[int, str]]:
    """After launches with several sizes: how many kernels there are, and the size that the driver was given."""
    made, x, found = KernelLaunch(of_any_size, 3, {"BLOCK": 64}), torch.zeros(64, dtype=torch.int32), []
    for size in (12, 16, 1, 37, -5, 1 << 31, -(1 << 31)):
        recording.expect("")
        made(x, size)
        (compiled, _) = made._compiled[(0, *launching._specialization((x, size), made._any_value))]
        recording.expect(compiled.asm["ptx"])
        made(x, size)
        found.append((len(made._compiled), recording.last()["parameters"][1]))
    return found


def _main(folder: str) -> None:
    recording = _Recording(folder)
    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda device: 5
    driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(driver)
    launching._current_device = lambda: 0
    launching._current_stream = lambda: 5
    answer: dict[str, Any] = {"preloaded": _preloaded(recording)}
    for kernel in (with_descriptors, without_descriptors, with_tuples):
        name = kernel.__name__
        answer[name] = _seen(name, kernel, recording)
    answer["while_compiling"] = _launched_while_compiling(recording)
    answer["compiled_by_field"] = _compiled_by_field(recording)
    answer["any_sizes"] = _any_sizes(recording)
    answer["kept"] = _kept(recording, launching)
    print(json.dumps(answer))


if __name__ == "__main__":
    _main(*sys.argv[1:])
