"""``KernelLaunch.repeat``: the driver is given what Triton itself gives it, for the arguments that the key stands
for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from ditron_train.runtime import launch as launching
from ditron_train.runtime.launch import KernelLaunch


@triton.jit
def _kernel(a_desc, x_ptr, size, b_desc, BLOCK: tl.constexpr):
    tl.store(x_ptr, size)


_SIGNATURE = {
    "a": "tensordesc<bf16[16, 64]>",
    "x": "*bf16",
    "size": "i32",
    "b": "tensordesc<bf16[16, 64]>",
    "BLOCK": "constexpr",
}


def _compiled(calls: list[tuple], *, scratch_bytes: int = 0) -> Any:
    run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
    run.global_scratch_size = run.profile_scratch_size = scratch_bytes
    run.global_scratch_align = run.profile_scratch_align = 1
    metas = [{"number": 0}, None]  # None: a descriptor that the kernel reads through pointers
    run.launch = nvidia.wrap_handle_tensordesc(lambda *arguments: calls.append(arguments), _SIGNATURE, metas)
    return SimpleNamespace(run=run, function=77, packed_metadata=(8, 1, 4096))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> tuple[KernelLaunch, list[tuple]]:
    """A launch whose kernel has been compiled, and what the driver gets."""
    calls: list[tuple] = []
    expand = nvidia.make_tensordesc_arg
    monkeypatch.setattr(
        nvidia,
        "make_tensordesc_arg",
        lambda desc, meta: (
            expand(desc, None) if meta is None else [("map", desc.base.data_ptr()), *desc.shape, *desc.strides]
        ),
    )
    monkeypatch.setattr(launching, "_current_stream", lambda: 5)
    monkeypatch.setattr(launching, "_current_device", lambda: 0)
    made = KernelLaunch(_kernel, 131, {"BLOCK": 64})
    monkeypatch.setattr(made, "_first", lambda key, arguments, stream: made._compiled.update({key: _compiled(calls)}))
    made(*_arguments(torch.zeros(64, 64, dtype=torch.bfloat16)))  # compiles
    return made, calls


def _arguments(x: torch.Tensor) -> tuple:
    desc = TensorDescriptor(x, [64, 64], [64, 1], [16, 64])
    return desc, x, 12, desc


def _as_addresses(arguments: tuple) -> tuple:
    return tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments)


def test_repeating_gives_the_driver_what_triton_gives_it(launch: tuple[KernelLaunch, list[tuple]]) -> None:
    made, calls = launch
    x, y = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    assert not made.repeat("x", 5)
    made(*_arguments(x), key="x")
    made(*_arguments(y), key="y")
    assert made.repeat("x", 5) and made.repeat("y", 5) and made.repeat("x", 6)
    first, second, again, again_second, elsewhere = map(_as_addresses, calls)
    assert again == first and again_second == second != first
    assert elsewhere == (131, 1, 1, 6, *first[4:])
    assert all(
        not isinstance(value, (torch.Tensor, TensorDescriptor)) for value in calls[2]
    )  # no memory is kept alive


def test_what_has_no_key_is_not_kept(launch: tuple[KernelLaunch, list[tuple]]) -> None:
    made, calls = launch
    made(*_arguments(torch.zeros(64, 64, dtype=torch.bfloat16)))
    assert len(calls) == 1 and not made.repeat(None, 5)


def test_another_device_loads_the_kernel_itself(
    launch: tuple[KernelLaunch, list[tuple]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded code belongs to one device: launched on another, the driver calls it an invalid handle."""
    made, calls = launch
    arguments = _arguments(torch.zeros(64, 64, dtype=torch.bfloat16))
    monkeypatch.setattr(launching, "_current_device", lambda: 1)
    made(*arguments)  # compiles again
    assert not calls and len(made._compiled) == 2
    for device in (0, 1, 0):
        monkeypatch.setattr(launching, "_current_device", lambda device=device: device)
        made(*arguments)
    assert len(calls) == 3 and len(made._compiled) == 2


def test_what_is_kept_is_bounded(launch: tuple[KernelLaunch, list[tuple]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MAX_REPEATED", 3)
    made, _ = launch
    arguments = _arguments(torch.zeros(64, 64, dtype=torch.bfloat16))
    for number in range(10):
        made(*arguments, key=number)
        assert made.repeat(number, 5) and len(made._repeated) <= 3


def test_another_kind_of_launcher_is_left_alone() -> None:
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert launching._direct_call(_compiled([], scratch_bytes=8), (*_arguments(x), 64)) is None
    assert launching._direct_call(SimpleNamespace(run=lambda *arguments: None), (x,)) is None
    compiled = _compiled([])
    compiled.run.launch = len  # a launcher of C, without descriptors
    given = (77, False, True, None, None, (8, 1, 4096), None, None, None, x.data_ptr(), 12, 64)
    assert launching._direct_call(compiled, (x, 12, 64)) == (len, given)
