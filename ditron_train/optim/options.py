"""Which options `Muon` takes, of itself and of its param groups, and which parameters: why not, or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

TensorParallelMode = Literal["blockwise", "duplicated"]
PRODUCT_DTYPES = {"medium": torch.bfloat16, "high": torch.float32, "highest": torch.float32}


def default_algorithm(param: torch.Tensor) -> str:
    """Of a parameter whose group names none."""
    is_embedding = getattr(param, "is_embedding_or_output_parameter", False)
    return "muon" if param.dim() == 2 and not is_embedding else "adamw"


def unsupported_reason_options(
    fp32_matmul_prec: str,
    weight_decay_method: str,
    tp_mode: str,
    split_qkv: bool,
    is_qkv_fn: Callable[[torch.Tensor], bool] | None,
    qkv_split_shapes: tuple[int, ...] | None,
) -> str | None:
    """Of words that hold for every param group: see `Muon`, whose arguments these are."""
    if fp32_matmul_prec not in PRODUCT_DTYPES:
        return f"fp32_matmul_prec {fp32_matmul_prec!r} is not one of {', '.join(PRODUCT_DTYPES)}"
    if weight_decay_method not in ("decoupled", "independent", "l2"):
        return f"weight_decay_method {weight_decay_method!r} is not decoupled, independent or l2"
    if tp_mode not in ("blockwise", "duplicated"):
        return f"tp_mode {tp_mode!r} is not blockwise or duplicated"
    if split_qkv and (is_qkv_fn is None or qkv_split_shapes is None):
        return "split_qkv needs is_qkv_fn and qkv_split_shapes"
    return None


def unsupported_reason_group(lr: Any, weight_decay: float, momentum_beta: float, algorithm: str | None) -> str | None:
    """Of the hyperparameters of a param group."""
    if not float(lr) >= 0 or not weight_decay >= 0:
        return f"lr {lr} and weight_decay {weight_decay} must not be below 0"
    if not 0 <= momentum_beta < 1:
        return f"momentum_beta {momentum_beta} is not in [0, 1)"
    if algorithm not in (None, "muon", "adamw"):
        return f"algorithm {algorithm!r} is not muon or adamw"
    return None


def unsupported_reason_param(param: torch.Tensor, algorithm: str | None, takes_muon: bool) -> str | None:
    """Of a parameter whose group names ``algorithm``, or none; kernels cannot read DTensors, and the
    products of sharded matrices need not have the bits of whole ones."""
    if algorithm == "muon" and param.dim() != 2:
        return f"Muon needs matrices; a parameter has shape {tuple(param.shape)}: give its group algorithm='adamw'"
    if not param.is_floating_point():
        return f"a parameter of {param.dtype}"
    if takes_muon and hasattr(param, "placements"):  # a DTensor
        return f"a parameter is a {type(param).__name__}, as fully_shard makes them"
    return None
