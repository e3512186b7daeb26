"""Inputs of measurements and comparisons."""

from __future__ import annotations

import torch


def normal_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Normal values from a generator of their own: the user's random state does not move."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


def make_values(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int, rank: int
) -> torch.Tensor:
    """Normal values on a GPU; on the CPU whole numbers from -3 to 3, of which sums are exact in any order.

    So bits of GEMMs can be compared on both, although the interpreter's GEMM rounds in another order than torch's.
    """
    own_seed = 1000 * seed + rank
    if device.type == "cpu":
        generator = torch.Generator().manual_seed(own_seed)
        return torch.randint(-3, 4, shape, device=device, generator=generator).to(dtype)
    return normal_values(shape, dtype, device, own_seed)
