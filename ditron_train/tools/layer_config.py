"""The configuration of the layers that benchmarks build, as far as they have it in common."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


def layer_config(dtype: torch.dtype, **fields: Any) -> TransformerConfig:
    """One layer without biases, dropout and Apex's kernels; ``fields`` are the others, or replace these."""
    types = dict(bf16=dtype == torch.bfloat16, params_dtype=dtype, pipeline_dtype=dtype)
    without = dict(
        add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, gradient_accumulation_fusion=False
    )
    return TransformerConfig(**{"num_layers": 1, **types, **without, **fields})
