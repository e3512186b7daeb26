"""Why an attention runs natively, by its configuration alone (part of feature ``sp``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def unsupported_reason_comm_type(cp_comm_type: str | None) -> str | None:
    """Why context parallelism of this kind around Transformer Engine's attention is Megatron's, or None."""
    if cp_comm_type in ("a2a", "a2a+p2p"):
        return None
    return f"--cp-comm-type is {cp_comm_type or 'p2p'} (a2a is covered, alone and around p2p)"


def unsupported_reason_levels(sizes: Sequence[int]) -> str | None:
    """Why ``a2a+p2p`` over groups of these sizes, of exchanges first, is Megatron's, or None."""
    if len(sizes) != 2:
        return f"a2a+p2p is over {len(sizes)} levels of groups, not 2"
    return "each exchange of a2a+p2p is of one rank" if sizes[0] == 1 else None


def unsupported_reason_te_attention(config: Any, is_training: bool) -> str | None:
    """Why Transformer Engine's attention makes its exchanges itself, or None."""
    if config.fp8 and (config.fp8_dot_product_attention or config.fp8_multi_head_attention):
        return "the attention itself computes in FP8"
    if getattr(config, "fp4", None) or config.softmax_type != "vanilla":
        return "FP4 or a softmax offset is on"
    if config.qk_clip or config.log_max_attention_logit:
        return "the largest attention logits are collected"
    if config.attention_dropout > 0 and is_training:
        return "attention dropout is on"
    return None
