"""Switches of the process that change native's bits or times, as they stand when something is decided.

They are no part of what a plan was made with, which is compared when it is read: Megatron sets them behind its
arguments, a script whenever it likes. So a decision's key names those that are not as torch has them, and a plan holds
decisions under both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PLAIN_BLAS = ("default", "cublas")


def _is_off(name: str) -> Callable[[], bool]:
    """Whether something that torch's products may do by default is forbidden; what this torch does not know is not."""
    return lambda: not getattr(torch.backends.cuda.matmul, name, True)


def _is_other_blas() -> bool:
    library: Any = torch.backends.cuda.preferred_blas_library()  # an enumeration, of which torch says no names
    return library.name.lower() not in _PLAIN_BLAS


_switches: dict[str, Callable[[], bool]] = {
    "bf16 sums in full": _is_off("allow_bf16_reduced_precision_reduction"),
    "bf16 sums not split": _is_off("allow_bf16_reduced_precision_reduction_split_k"),
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "fp16 accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "fp16 sums in full": _is_off("allow_fp16_reduced_precision_reduction"),
    "fp16 sums not split": _is_off("allow_fp16_reduced_precision_reduction_split_k"),
    "other blas": _is_other_blas,
}


def add_switch(name: str, is_on: Callable[[], bool]) -> None:
    """A switch of another library that what computes native's products depends on; ``name``: of small letters and
    digits."""
    _switches[name] = is_on


def switches() -> tuple[str, ...]:
    """Those that are not as torch has them, in the order of their names."""
    return tuple(sorted(name for name, is_on in _switches.items() if is_on()))
