"""Products of FP8 operands by recipe, and what quantising takes: multiples and shares of the rates in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from ditron_train.costs.products import pass_us
from ditron_train.data.rates import MachineRates

#: Of Transformer Engine, by the names of ``--fp8-recipe``.
Recipe = Literal["tensorwise", "delayed", "blockwise"]
Product = Literal["forward", "dgrad", "wgrad"]
# Bytes of memory traffic of an element: read in 16 bits, written twice, the second time transposed; one scale a tensor
# of the tensor's own values takes another read.
CAST_BYTES: dict[Recipe, int] = {"tensorwise": 6, "delayed": 4, "blockwise": 4}


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


def quantised_us(num_elements: float, recipe: Recipe, rates: MachineRates) -> float:
    """To cast so many elements, row-wise and transposed."""
    return cast_us(CAST_BYTES[recipe] * num_elements, rates)


def cast_us(num_bytes: float, rates: MachineRates) -> float:
    """One kernel that casts to FP8, or transposes in it, and reads and writes ``num_bytes`` together."""
    return pass_us(num_bytes * rates.memory_gbps / rates.cast_gbps, rates)
