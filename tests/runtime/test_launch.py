"""``KernelLaunch``: the driver is given what the installed Triton's own launcher gives it, for the arguments that the
key stands for. A driver that records stands where there is no GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ditron_train.runtime.launch import _specialization
from ditron_train.runtime.triton_launcher import recorder_of

_HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``launch_worker.py`` saw."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("Triton builds its launcher by a C compiler, and there is none")
    folder = tmp_path_factory.mktemp("driver")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = ["-shared", "-fPIC", "-O1", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1"]
    command = [compiler, *library, "-o", str(folder / "libcuda.so.1"), str(_HERE / "recording_driver.c")]
    subprocess.run(command, check=True)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.update(TRITON_LIBCUDA_PATH=str(folder), TRITON_CACHE_DIR=str(folder / "cache"))
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # what a later version does unasked
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    worker = [sys.executable, str(_HERE / "launch_worker.py"), str(folder)]
    done = subprocess.run(worker, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


_KERNELS = ["with_descriptors", "without_descriptors", "with_tuples"]


@pytest.mark.parametrize("kernel", _KERNELS)
def test_the_driver_is_given_what_triton_gives_it(seen: dict[str, Any], kernel: str) -> None:
    found = seen[kernel]
    assert len(found["triton"]["parameters"]) > 4 and found["triton"]["stream"] == 5
    assert found["directly"] == found["triton"]
    assert found["repeated"] == {**found["triton"], "stream": 6}
    assert found["known"] and not found["unknown"]
    assert found["launches_of_a_recorded_call"] == 1 and found["launches"] == 2  # to record is not to launch


@pytest.mark.parametrize("kernel", _KERNELS)
def test_no_memory_is_kept_alive(seen: dict[str, Any], kernel: str) -> None:
    assert not seen[kernel]["keeps_memory"]


def test_a_tuple_is_given_as_its_fields(seen: dict[str, Any]) -> None:
    """(pointer, 16), 12 and (pointer, (pointer,)) are the same six parameters as without tuples."""
    parameters = seen["with_tuples"]["triton"]["parameters"]
    assert parameters[1:3] == ["10000000", "0c000000"] and [len(part) for part in parameters[:5]] == [16, 8, 8, 16, 16]


def test_what_a_tuple_holds_is_specialised_on(seen: dict[str, Any]) -> None:
    """Code for an aligned address must not run on another: each alignment, and each value, is a kernel of its own."""
    assert seen["compiled_by_field"] == [1, 2, 2, 3]


def test_what_is_not_specialised_on_may_change(seen: dict[str, Any]) -> None:
    """Rows of experts change at every step: they are no kernel of their own, but for another width."""
    sizes = ["0c000000", "10000000", "01000000", "25000000", "fbffffff", "0000008000000000", "00000080"]
    assert seen["any_sizes"] == [[1 + (index > 4), size] for index, size in enumerate(sizes)]


def test_kernels_compiled_together_are_loaded_at_once(seen: dict[str, Any]) -> None:
    assert seen["preloaded"]["functions"] == [0x77] and seen["preloaded"]["launches"] == 0


def test_a_kernel_is_launched_while_others_are_compiled(seen: dict[str, Any]) -> None:
    """Grouped GEMMs run while an expert layer compiles its kernels, and Triton 3.9 then gives back a promise."""
    assert seen["while_compiling"] == {"launches": [1, 3], "repeated": True, "known": 1}


def test_products_and_sums_are_fused_whatever_the_default(seen: dict[str, Any]) -> None:
    assert seen["with_descriptors"]["fp_fusion"] and seen["without_descriptors"]["fp_fusion"]


def test_what_is_kept_is_bounded_and_needs_a_key(seen: dict[str, Any]) -> None:
    assert not seen["kept"]["without_key"] and seen["kept"]["most"] == 3


def test_another_device_loads_the_kernel_itself(seen: dict[str, Any]) -> None:
    """Loaded code belongs to one device: launched on another, the driver calls it an invalid handle."""
    assert seen["kept"]["compiled_by_device"] == [2, 2, 2]


def _launcher(**changes: Any) -> Any:
    launch = changes.pop("launch", len)
    return SimpleNamespace(launch=launch, **{"global_scratch_size": 0, "profile_scratch_size": 0, **changes})


class _Compiled:
    def __init__(self, run: Any) -> None:
        self.run = run

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *arguments, stream: self.run.launch(*grid, stream, *arguments)


@pytest.mark.parametrize(
    "run",
    [
        _launcher(global_scratch_size=8),
        _launcher(profile_scratch_size=8),
        _launcher(gsan_enabled=True),
        _launcher(launch=lambda *arguments: None),
        _launcher(launch=SimpleNamespace()),
        lambda *arguments: None,
    ],
)
def test_another_kind_of_launcher_is_left_alone(run: Any) -> None:
    assert recorder_of(_Compiled(_launcher()), 131) is not None
    assert recorder_of(_Compiled(run), 131) is None


def test_nothing_is_recorded_for_who_wants_to_hear_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert recorder_of(_Compiled(_launcher()), 131)((12,)) is None


def test_arguments_that_triton_compiles_for_apart_have_keys_apart() -> None:
    """None at one place or at another, types of tensors and descriptors, blocks, truth values and numbers."""
    matrix = torch.zeros(16, 16)
    half = torch.zeros(16, 16, dtype=torch.bfloat16)
    descriptors = [
        TensorDescriptor(tensor, [16, 16], [16, 1], block)
        for tensor, block in ((matrix, [8, 16]), (matrix, [16, 8]), (half, [8, 16]))
    ]
    several = [
        (None, matrix), (matrix, None), (None, half), (half, None), (matrix,), (half,), (matrix.half(),),
        ((None, matrix),), ((matrix, None),), (1.5, matrix), (matrix, 1.5), (True,), (1,), (0,), ((True,),), ((1,),),
        (matrix.view(-1)[1:],), *((descriptor,) for descriptor in descriptors), (None, descriptors[0]), (),
    ]  # fmt: skip
    keys = [_specialization(arguments) for arguments in several]
    assert len(set(keys)) == len(keys)
    assert [_specialization(arguments) for arguments in several] == keys
    assert _specialization((3, None), frozenset({0})) == _specialization((5, None), frozenset({0}))
