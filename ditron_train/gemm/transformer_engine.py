"""What versions of Transformer Engine name differently."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=1)
def _takes_quantizers(function: Callable[..., Any]) -> bool:
    return "quantization_params" in inspect.signature(function).parameters


def grouped_gemm(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], out: list[torch.Tensor], dtype: torch.dtype, **options: Any
) -> None:
    """``general_grouped_gemm`` without quantization, as ``GroupedLinear`` calls it: from 2.11 on it wants a quantizer
    for each GEMM between ``out`` and the type.

    Args:
        a: Weights (for weight gradients: inputs), one for each expert.
        b: Rows of each expert.
        out: What is written into: one tensor of all rows (``single_output``), or one for each expert.
        dtype: Of the results.
        options: Those of ``general_grouped_gemm``.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    if _takes_quantizers(general_grouped_gemm):
        options["quantization_params"] = [None] * len(a)
    general_grouped_gemm(list(a), list(b), out, out_dtype=dtype, **options)
