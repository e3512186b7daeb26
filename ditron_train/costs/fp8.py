"""Products of FP8 operands by recipe: multiples and shares of the rates in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from ditron_train.data.rates import MachineRates

#: Of Transformer Engine, by the names of ``--fp8-recipe``.
Recipe = Literal["tensorwise", "delayed", "blockwise"]
Product = Literal["forward", "dgrad", "wgrad"]


def operands(recipe: Recipe | None) -> torch.dtype:
    """Of a linear layer's products."""
    return torch.bfloat16 if recipe is None else torch.float8_e4m3fn


def product_rates(rates: MachineRates, recipe: Recipe | None, product: Product) -> MachineRates:
    """``rates`` at which that product of a layer runs: forward adds up fast with one scale a tensor, the gradients in
    parts; with scales of blocks everything does."""
    if recipe is None:
        return rates
    if recipe == "blockwise":
        share = rates.fp8_block_wgrad_share if product == "wgrad" else rates.fp8_block_share
    else:
        share = 1.0 if product == "forward" else rates.fp8_split_share
    return replace(rates, fp8_speed=rates.fp8_speed * share)
