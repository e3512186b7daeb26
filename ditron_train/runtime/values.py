"""Inputs of measurements and comparisons."""

from __future__ import annotations

import torch


def make_values(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int, rank: int
) -> torch.Tensor:
    """Normal values on a GPU; on the CPU whole numbers from -3 to 3, of which sums are exact in any order.

    So bits of GEMMs can be compared on both, although the interpreter's GEMM rounds in another order than torch's.
    """
    generator = torch.Generator(device).manual_seed(1000 * seed + rank)
    if device.type == "cpu":
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)
    return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)
