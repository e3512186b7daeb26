"""In which order native adds up the rows of a token, and where it rounds: read off torch itself, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch

from ditron_train.runtime.values import normal_values

#: ``ascending_rounded``: by ascending expert, rounded to the rows' type after each addition. ``ascending``: the same
#: in fp32 with one rounding at the end. ``descending``: by descending expert in fp32, one rounding: Transformer
#: Engine's fused permutation.
SumOrder = Literal["ascending_rounded", "ascending", "descending"]


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """PyTorch's deterministic mode, in which Megatron's sums repeat themselves."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@cache
def index_add_order(dtype: torch.dtype, device: torch.device) -> SumOrder | None:
    """How ``index_add_`` of deterministic mode adds rows of one index (rows come by ascending expert).

    It differs between devices, so it is tried: eight random rows on one index. None if it is neither of ours. The
    first call for a type and device waits for the device.
    """
    rows = normal_values((8, 512), dtype, device, 1)
    with deterministic(warn_only=False):
        added = torch.zeros(2, 512, dtype=dtype, device=device)
        added.index_add_(0, torch.ones(8, dtype=torch.int64, device=device), rows)
    rounded = torch.zeros(512, dtype=dtype, device=device)
    total = torch.zeros(512, dtype=torch.float32, device=device)
    for row in rows:
        rounded = (rounded.float() + row.float()).to(dtype)
        total = total + row.float()
    if torch.equal(added[1], rounded):
        return "ascending_rounded"
    return "ascending" if torch.equal(added[1], total.to(dtype)) else None
