"""The local attention with a context parallel group, which megatron-core's does not take (part of feature ``sp``)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.sp.attention_exchange import config_of_one_rank, exchanged
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.stream.cached_tensors import CachedTensor


def _causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """What the native softmax masks by if it gets no mask, on the tensors' own device: True above the diagonal."""
    if is_capturing(device):
        return _new_causal_mask(
            length, device
        )  # a graph's own: it is filled by replays, and none that is kept outlives it
    return _kept_causal_mask(length, device).get()


def _new_causal_mask(length: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # an evaluation may be the first to ask for it
        return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)


@functools.lru_cache(maxsize=2)
def _kept_causal_mask(length: int, device: torch.device) -> CachedTensor:
    return CachedTensor(_new_causal_mask(length, device))


@outside_compile
class DitronDotProductAttention(DotProductAttention, metaclass=EqualsBaseClass, native=DotProductAttention):
    """``DotProductAttention`` that also takes a context parallel group, with ``cp_comm_type`` ``a2a``.

    ``forward`` gets and returns local parts of the sequence, ``attend`` the whole sequence of this rank's heads.

    Attributes:
        exchange_group: The group of the exchanges, or None if there are none.
    """

    takes_packed = False

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        """As the native constructor.

        Raises:
            NotSupportedError: Heads that do not divide.
        """
        self.exchange_group: dist.ProcessGroup | None = None
        inner = config
        # Softmax offsets that are trained would be other heads' on every rank, and their gradients added up.
        if config.context_parallel_size > 1 and cp_comm_type == "a2a" and config.softmax_type != "learnable":
            group = getattr(pg_collection, "cp", None) or _context_parallel_group()
            inner = config_of_one_rank(config, dist.get_world_size(group))
        options = attention_dropout, softmax_scale, cp_comm_type, pg_collection
        super().__init__(inner, layer_number, attn_mask_type, attention_type, *options)
        if inner is not config:
            self.exchange_group = group
        self.left_in_heads: list[torch.Tensor | None] | None = None

    @property
    def can_attend(self) -> bool:
        """Whether ``attend`` may be called by a module that has made the exchanges itself."""
        return self.exchange_group is not None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask_type: Any = None
    ) -> torch.Tensor:
        """Attention of the whole sequence: q, k, v [s, b, heads of this rank, d] -> [s, b, heads of this rank * d]."""
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise NotSupportedError(f"{mask_type.name} mask type is not supported for BSHD and SBHD!")
        mask = _causal_mask(query.shape[0], query.device) if mask_type == AttnMaskType.causal else None
        return super().forward(query, key, value, mask, mask_type)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if (
            self.exchange_group is None or attention_bias is not None or packed_seq_params is not None
        ):  # native refuses both
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        attend = functools.partial(self.attend, attn_mask_type=attn_mask_type)
        return exchanged(self.exchange_group, attend, query, key, value, self.left_in_heads)


def _context_parallel_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()
