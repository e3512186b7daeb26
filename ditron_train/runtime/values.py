"""Values of measurements and comparisons."""

from __future__ import annotations

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one device have equal shapes, types and bits: ``-0.0`` is not ``0.0``, and two NaN are
    equal if their bits are. Waits for the device."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        return have_same_bits(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    words = _WORDS[a.element_size()]
    return torch.equal(a.resolve_neg().view(words), b.resolve_neg().view(words))


def normal_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Normal values from a generator of their own: the user's random state does not move."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of ``host`` on ``device``, in the order of the current stream; the host does not wait for a GPU."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


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
