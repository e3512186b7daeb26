"""Transformer Engine simulated for megatron-core, for as long as a worker process lives: enough for ``sp``'s
attention."""

from __future__ import annotations

import functools
import sys
from unittest.mock import MagicMock

import torch


def pose_transformer_engine(attention):
    """Has megatron-core find Transformer Engine, and the class ``attention`` as its own wrapper of its attention."""
    import megatron.core.extensions.transformer_engine as native
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401  looks for Transformer Engine, which is not to be there yet
    from megatron.core.transformer import multi_latent_attention

    attention.forward.__module__ = native.__name__
    library = MagicMock()
    library.pytorch.attention.dot_product_attention.utils.AttentionParams = dict
    for name in ("", ".pytorch", ".pytorch.attention", ".pytorch.attention.dot_product_attention",
                 ".pytorch.attention.dot_product_attention.utils", ".pytorch.cpp_extensions", ".pytorch.cpu_offload",
                 ".pytorch.export", ".pytorch.fp8", ".pytorch.module", ".pytorch.module._common",
                 ".pytorch.module.base", ".pytorch.module.layernorm_linear"):  # fmt: skip
        sys.modules["transformer_engine" + name] = functools.reduce(getattr, name.split(".")[1:], library)
    for name in ("TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TERowParallelLinear"):
        setattr(native, name, type(name, (torch.nn.Module,), {}))
    native.TEDotProductAttention = attention
    multi_latent_attention.TELinear = native.TEColumnParallelLinear  # without Transformer Engine it is no class
