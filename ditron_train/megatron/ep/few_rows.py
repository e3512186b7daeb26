"""From how many rows on our products of a layer's experts have the bits of Transformer Engine's (part of feature
``ep``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ditron_train.ep.few_rows import RowProduct, fewest_rows_here
from ditron_train.runtime.groups import GroupCache

_agreed: GroupCache[tuple[Any, ...], int] = GroupCache()


def products_of(num_experts: int, *weights: Any) -> frozenset[RowProduct]:
    """All products of rows with such weights of each expert, forward and for gradients."""
    shapes = [tuple(weight.shape) for weight in weights]
    return frozenset(RowProduct(shape, num_experts, transpose) for shape in shapes for transpose in (True, False))


def agreed_fewest_rows(
    products: frozenset[RowProduct], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> int:
    """Of several products the most of any rank, so that all ranks choose alike (collective the first time)."""
    key = (products, dtype, device, group)
    if key not in _agreed:
        here = max(fewest_rows_here(product, dtype, device) for product in products)
        most = torch.tensor([here], device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        _agreed[key] = int(most)
    return _agreed[key]
