"""Ulysses attention in plain PyTorch: megatron-core's own between all-to-alls that exchange tokens for heads.

The quickstart's reference of ``sp`` without Transformer Engine: there megatron-core has no context parallelism.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.dot_product_attention import DotProductAttention

__all__ = ["UlyssesAttention"]


class UlyssesAttention(DotProductAttention):
    """``DotProductAttention`` for a sequence in 2 W chunks over W ranks, of which rank r has r and 2 W - 1 - r."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        """As ``DotProductAttention``, which gets the configuration of one rank: whole sequence, its share of heads."""
        self.world_size = parallel_state.get_context_parallel_world_size()
        inner = copy.copy(config)
        inner.context_parallel_size = 1
        inner.num_attention_heads //= self.world_size
        inner.num_query_groups //= self.world_size
        super().__init__(inner, *arguments, **options)
        ranks = torch.arange(self.world_size)
        self.chunks = torch.stack((ranks, 2 * self.world_size - 1 - ranks), dim=1).flatten()

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """``x[i]`` of every rank, for rank i -> ``x[i]`` of rank i, for this rank."""
        return all_to_all(parallel_state.get_context_parallel_group(), x)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[s / W, b, heads, d] -> [s, b, heads / W, d]."""
        length, batch, heads, size = x.shape
        by_rank = x.view(length, batch, self.world_size, heads // self.world_size, size).movedim(2, 0)
        chunks = self._exchange(by_rank).view(2 * self.world_size, length // 2, batch, -1, size)
        return chunks[self.chunks.argsort()].view(self.world_size * length, batch, -1, size)

    def to_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, features / W] -> [s / W, b, features]."""
        length, batch, features = x.shape
        chunks = x.view(2 * self.world_size, length // (2 * self.world_size), batch, features)[self.chunks]
        by_rank = self._exchange(chunks.view(self.world_size, length // self.world_size, batch, features))
        return by_rank.permute(1, 2, 0, 3).reshape(length // self.world_size, batch, -1)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        """As ``DotProductAttention``, of this rank's part of the sequence; the mask is of the whole sequence."""
        whole = (self.to_heads(part) for part in (query, key, value))
        return self.to_sequence(super().forward(*whole, *arguments, **options))
