"""Memory that torch did not allocate: what torch keeps of its description. The tensors: tests/gpu."""

from __future__ import annotations

import contextlib

import torch

from ditron_train.symm.device_bytes import DeviceBytes

_ADDRESS = 2**40


def test_torch_holds_the_same_description_of_the_same_memory() -> None:
    """torch 2.13 keeps a reference more to its parts at each call: new ones would fill the host's memory."""
    taken = [_taken(65536) for _ in range(100)]
    assert len({id(part) for one in taken for part in (one["shape"], one["data"])}) == 2
    assert _taken(65536)["data"] == (_ADDRESS, False) and _taken(64)["shape"] == (64,)


def _taken(num_bytes: int) -> dict[str, object]:
    """The description of memory that torch has taken; without CUDA it fails behind reading it."""
    memory = DeviceBytes(_ADDRESS, num_bytes)
    with contextlib.suppress(RuntimeError):
        torch.as_tensor(memory, device="cpu")
    return memory.__cuda_array_interface__
