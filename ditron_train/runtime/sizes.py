"""Sizes as kernels want them."""

from __future__ import annotations


def next_power_of_2(value: int) -> int:
    """The least power of two that is not below ``value``; 1 for 0 and below. (Triton's own takes the host ten times as
    long.)"""
    return 1 << max(value - 1, 0).bit_length()


_RANGES_LOG2 = 3  # ranges in an octave


def top_of_range(rows: int) -> int:
    """The most rows of the range that ``rows`` are in: eight ranges to an octave."""
    shift = max((rows - 1).bit_length() - 1 - _RANGES_LOG2, 0)
    return ((rows - 1 >> shift) + 1) << shift
