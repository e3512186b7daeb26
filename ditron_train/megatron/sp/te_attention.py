"""Ulysses with Transformer Engine's attention (part of feature ``sp``).

The reference is Transformer Engine's own ``a2a`` attention: the same attention kernels get the same q, k and v. So
does its ring in ``a2a+p2p``: what the exchanges leave on a rank are the two chunks that a ring of the other level's
ranks alone would have there.
Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch.attention.dot_product_attention.utils as dpa_utils
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.shared.interfaces import unsupported_reason_otherwise
from ditron_train.megatron.sp.attention_exchange import (
    config_of_one_rank,
    exchanged,
    shape_of,
    unsupported_reason_comm_type,
    unsupported_reason_levels,
    unsupported_reason_te_attention,
)
from ditron_train.megatron.sp.exchange import Exchange
from ditron_train.megatron.sp.packed import table_of, unsupported_reason_packed
from ditron_train.megatron.sp.spec import route_exchange
from ditron_train.policy import log_native
from ditron_train.policy.gate import INTERFACE_ERRORS
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile

_VALUE_SIZE = "hidden_size_per_attention_head_v"  # since 0.18 that of padded values in one call, another after it


@outside_compile
class DitronTEDotProductAttention(TEDotProductAttention, metaclass=EqualsBaseClass, native=TEDotProductAttention):
    """``TEDotProductAttention`` whose ``a2a`` exchanges, or ``all_gather`` of keys and values, are fused.

    Built natively, so that what is not covered (an attention in FP8, dropout, ...) runs as it did; beside it stands
    the same attention for this rank's heads, of the whole sequence or by a ring over what the exchanges do not reach.
    It is no submodule: checkpoints stay as they were.

    Attributes:
        exchange_group: The ranks that exchange, if that is fused: the context parallel group, of ``a2a+p2p`` its
            first level.
        takes_packed: Whether packed sequences are covered; Transformer Engine refuses them in ``a2a+p2p``.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        options = attention_dropout, softmax_scale, k_channels, v_channels, num_splits, cp_comm_type, pg_collection
        arguments = layer_number, attn_mask_type, attention_type, *options
        super().__init__(config, *arguments)
        self._whole: list[TEDotProductAttention] = []
        self.exchange_group: dist.ProcessGroup | None = None
        self.left_in_heads: list[torch.Tensor | None] | None = None
        self.takes_packed = cp_comm_type == "a2a"
        self._own_group = getattr(self, "cp_group", None)  # native rewrites its own with that of the batch
        self._gathers = cp_comm_type == "all_gather" and config.context_parallel_size > 1
        if not self._gathers and config.context_parallel_size > 1 and getattr(pg_collection, "cp", None) is not None:
            try:
                group, ring = self._levels(pg_collection.cp, cp_comm_type)
                inner = config_of_one_rank(config, group.size())
            except NotSupportedError as error:
                log_native("sp attention", str(error))
            else:
                if ring is not None and ring.size() > 1:
                    inner.context_parallel_size, groups = ring.size(), copy.copy(pg_collection)
                    groups.cp = ring
                    arguments = (*arguments[:-2], "p2p", groups)
                self._whole.append(TEDotProductAttention(inner, *arguments))
                self.exchange_group = group

    def _levels(
        self, group: dist.ProcessGroup, cp_comm_type: str | None
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        """The ranks of one exchange, and those of one ring of what has been exchanged."""
        reason = unsupported_reason_comm_type(cp_comm_type)
        if reason is None and cp_comm_type == "a2a":
            return group, None
        levels = self._own_group if isinstance(self._own_group, list) else []
        reason = reason or unsupported_reason_levels([level.size() for level in levels])
        if reason is not None:
            raise NotSupportedError(reason)
        return levels[0], levels[1]

    @property
    def can_attend(self) -> bool:
        """Whether ``attend`` may be called by a module that has made the exchanges itself."""
        return bool(self._whole) and self._unsupported_reason() is None

    def _unsupported_reason(self) -> str | None:
        if self.cp_group is not self._own_group:  # it stays until another batch brings a group
            return "a batch before this one has changed the context parallel group"
        return unsupported_reason_te_attention(self.config, self.training)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask_type: Any = None,
        packed: Any = None,
    ) -> torch.Tensor:
        """Attention of what was exchanged, s rows: q, k, v [s, b, heads of this rank, d] -> [s, b, heads of this
        rank * d]; of ``packed`` ones without b."""
        whole, group = self._whole[0], self.exchange_group
        assert group is not None, "the whole sequence is given"
        whole.train(self.training)
        value_size = getattr(self, _VALUE_SIZE, None)
        if value_size != getattr(whole, _VALUE_SIZE, None):
            setattr(whole, _VALUE_SIZE, value_size)
        mask_type = attn_mask_type or AttnMaskType[self.attn_mask_type]
        _hand_over_fp8(self, whole)
        try:
            with _kernels_of(self, group.size()):
                return whole(query, key, value, None, mask_type, packed_seq_params=packed)
        finally:
            _hand_over_fp8(whole, self)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        attn_mask_type: Any,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        packed, options, reason = packed_seq_params, (attention_bias, packed_seq_params, num_splits), None
        if self._gathers:
            with self._gathering(None if packed is None else unsupported_reason_packed(packed)):
                return super().forward(query, key, value, attention_mask, attn_mask_type, *options)
        if self._whole:
            others = {"attention_bias": attention_bias, "num_splits": num_splits}
            others["packed_seq_params"] = None if self.takes_packed else packed
            reason = self._unsupported_reason() or self._unsupported_reason_call(
                query, key, attn_mask_type, packed, others
            )
            if reason is not None:
                log_native("sp attention", reason)
        if not self._whole or reason is not None:
            return super().forward(query, key, value, attention_mask, attn_mask_type, *options)
        assert self.exchange_group is not None, "the whole sequence is given"
        if packed is None:
            attend = functools.partial(self.attend, attn_mask_type=attn_mask_type)
            return exchanged(self.exchange_group, attend, query, key, value, self.left_in_heads)
        shape = shape_of(query, key, value)
        context = route_exchange(self.exchange_group, shape, query)
        if context is None:
            return super().forward(query, key, value, attention_mask, attn_mask_type, *options)
        table = table_of(packed, context.world_size, query.shape[0])
        exchange = Exchange(self.exchange_group, shape, context, table)
        query, key, value = exchange.to_heads(query, key, value)
        attended = self.attend(query, key, value, attn_mask_type, packed)
        if self.left_in_heads is not None:
            self.left_in_heads.append(table)
            return attended
        return exchange.to_sequence(attended)

    def _gathering(self, reason: str | None) -> contextlib.AbstractContextManager[None]:
        """Inside, Transformer Engine's attention gathers keys and values by the fused path, unless there is a reason
        not to."""
        reason = reason or self._unsupported_reason()
        if reason is None:
            try:
                from ditron_train.megatron.sp.te_all_gather import fused_exchanges

                return fused_exchanges()
            except INTERFACE_ERRORS as error:
                reason = unsupported_reason_otherwise("Transformer Engine", error)
        log_native("sp attention", reason)
        return contextlib.nullcontext()

    @staticmethod
    def _unsupported_reason_call(
        query: torch.Tensor, key: torch.Tensor, attn_mask_type: Any, packed: Any, others: dict[str, Any]
    ) -> str | None:
        given = sorted(name for name, value in others.items() if value is not None)
        if given:
            return f"the attention is called with {', '.join(given)}"
        reason = None if packed is None else unsupported_reason_packed(packed)
        if reason is None and len(key) != len(query):  # cross attention
            reason = f"q and k have {len(query)} and {len(key)} rows"
        if reason is None and packed is None and attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            reason = f"the mask is {attn_mask_type}"
        if reason is None and (
            query.dim() != (4 if packed is None else 3) or query.shape[0] % 2 or query.shape[-1] % 8
        ):
            reason = f"q is {tuple(query.shape)}"
        return reason


@contextlib.contextmanager
def _kernels_of(native: Any, num_ranks: int) -> Iterator[None]:
    """Inside, Transformer Engine chooses an attention's kernels as for ``native``, whose heads ``num_ranks`` exchange:
    for context parallelism it takes others since 2.15 (no FlashAttention 4, nor cuDNN's of an odd number of heads)."""
    describe = dpa_utils.AttentionParams

    def describe_native(**given: Any) -> Any:
        for name in {"num_heads", "num_gqa_groups", "cp_size"} & given.keys():
            given[name] *= num_ranks
        given.update(context_parallel=True, cp_comm_type=native.cp_comm_type)
        return describe(**given)

    dpa_utils.AttentionParams = describe_native
    try:
        yield
    finally:
        dpa_utils.AttentionParams = describe


# An attention that computes in bf16 among linear layers in FP8 keeps the recipe all the same, and under delayed
# scaling amaxes: they are in checkpoints.
_FP8_STATE = (
    "fp8",
    "fp8_calibration",
    "fp8_parameters",
    "fp8_initialized",
    "fp8_meta_tensors_initialized",
    "fp8_meta",
    "quantizers",
)


def _hand_over_fp8(of: Any, to: Any) -> None:
    """What Transformer Engine keeps of FP8 in a module is ``to``'s, too."""
    if of.config.fp8:
        for name in _FP8_STATE:
            if hasattr(of, name):
                setattr(to, name, getattr(of, name))


def class_map() -> dict[type, type]:
    """Transformer Engine's attention as megatron-core wraps it, and the fused ones."""
    return {TEDotProductAttention: DitronTEDotProductAttention}
