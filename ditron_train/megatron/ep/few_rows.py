"""From how many rows on our products of a layer's experts have the bits of Transformer Engine's (part of feature
``ep``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ditron_train.ep.few_rows import RowProduct, fewest_rows_here

_agreed: dict[tuple[object, ...], int] = {}


def products_of(*weights: Any) -> frozenset[RowProduct]:
    """All products of rows with these weights, forward and for gradients."""
    return frozenset(RowProduct(tuple(weight.shape), transpose) for weight in weights for transpose in (True, False))


def agreed_fewest_rows(
    products: frozenset[RowProduct], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> int:
    """Of several products the most of any rank, so that all ranks choose alike (collective the first time)."""
    key = (products, dtype, device, group.group_name)
    if key not in _agreed:
        most = torch.tensor([max(fewest_rows_here(product, dtype, device) for product in products)], device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        _agreed[key] = int(most)
    return _agreed[key]
