"""Sizes as kernels want them."""

from __future__ import annotations


def next_power_of_2(value: int) -> int:
    """The least power of two that is not below ``value``; 1 for 0 and below. (Triton's own takes the host ten times as
    long.)"""
    return 1 << max(value - 1, 0).bit_length()
