"""In which order native adds up the rows of a token, and where it rounds: read off torch itself, once."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

#: ``ascending_rounded``: by ascending expert, rounded to the rows' type after each addition. ``ascending``: the same
#: in fp32 with one rounding at the end. ``descending``: by descending expert in fp32, one rounding: Transformer
#: Engine's fused permutation.
SumOrder = Literal["ascending_rounded", "ascending", "descending"]


@cache
def index_add_order(dtype: torch.dtype, device: torch.device) -> SumOrder | None:
    """How ``index_add_`` of deterministic mode adds rows of one index (rows come by ascending expert).

    It differs between devices, so it is tried: eight random rows on one index. None if it is neither of ours. The
    first call for a type and device waits for the device.
    """
    generator = torch.Generator(device=device).manual_seed(1)
    rows = torch.empty(8, 512, dtype=dtype, device=device).normal_(generator=generator)
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        added = torch.zeros(2, 512, dtype=dtype, device=device)
        added.index_add_(0, torch.ones(8, dtype=torch.int64, device=device), rows)
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
    rounded = torch.zeros(512, dtype=dtype, device=device)
    total = torch.zeros(512, dtype=torch.float32, device=device)
    for row in rows:
        rounded = (rounded.float() + row.float()).to(dtype)
        total = total + row.float()
    if torch.equal(added[1], rounded):
        return "ascending_rounded"
    return "ascending" if torch.equal(added[1], total.to(dtype)) else None
