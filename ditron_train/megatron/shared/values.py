"""Values that comparisons of linear layers use, and when they say nothing."""

from __future__ import annotations

from typing import Literal

import torch

from ditron_train.gemm.order_probe import HIDDEN_TERMS, order_probe_matrix
from ditron_train.runtime.settings import get_settings
from ditron_train.runtime.values import normal_values


def unsupported_reason_hidden(device: torch.device, rows_of_a_rank: int, *features: int) -> str | None:
    """Why the bits of a linear layer cannot be compared, or None, also if the policy compares none: the partners of
    wgrad's sums are among the rows of one rank, those of forward's and dgrad's among the features."""
    if device.type != "cuda" or min(rows_of_a_rank, *features) > HIDDEN_TERMS:
        return None
    if get_settings().policy in ("fast", "force"):
        return None
    return f"the order of sums of at most {HIDDEN_TERMS} features, or tokens a rank, cannot be compared"


def order_probe_like(
    tensor: torch.Tensor, seed: int, signed: Literal["rows", "columns"], row_block: int | None = None
) -> torch.Tensor:
    """Values whose sums show their order, in the layout of `tensor`; the user's random state does not move."""
    shape = (tensor.shape[:-1].numel(), tensor.shape[-1])
    values = order_probe_matrix(shape, tensor.dtype, tensor.device, seed=seed, signed=signed, row_block=row_block)
    return torch.empty_like(tensor).copy_(values.view(tensor.shape))


def own_or_normal(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The values of `tensor` to compare on; normal ones if it has none yet: with Megatron-FSDP's fine-grained
    gathers a weight has no memory until its own module is called, which is after the decision."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return normal_values(tuple(tensor.shape), tensor.dtype, tensor.device, seed)
    return tensor.detach()
