"""Ulysses attention: ``--context-parallel-size N --cp-comm-type a2a`` (feature ``sp``).

megatron-core offers it with Transformer Engine's attention alone; here the local attention has it too. If only norms
of heads come between a projection and its exchange (all-to-all), the two are fused; RoPE then comes after the
exchange, with the tables of the whole sequence: it is elementwise, so bits stay. Else only the output projection is
fused with its exchange (``output``), or only the exchanges are fused. Causal masks are made by the attention; a mask
that is passed with them is not looked at, as Transformer Engine does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from ditron_train.megatron.compat.config import rope_arguments
from ditron_train.megatron.shared.forward_override import calling, signed_as, unsupported_reason_stand_in
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.shared.interfaces import classes_of_te
from ditron_train.megatron.sp.dot_product_attention import DitronDotProductAttention
from ditron_train.megatron.sp.exchange import AttentionShape
from ditron_train.megatron.sp.linears import linears_of
from ditron_train.megatron.sp.nodes import forget_nodes
from ditron_train.megatron.sp.norms import norms_of, unsupported_reason_norms
from ditron_train.megatron.sp.output import output_fused
from ditron_train.megatron.sp.packed import (
    OneRank,
    forget_tables,
    packed_of,
    starts_of,
    table_of,
    unsupported_reason_packed,
    whole_rotary_table,
)
from ditron_train.megatron.sp.projections import forget_hooks, unsupported_reason_hooks_of_ranks
from ditron_train.policy import gate, log_native
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp import SPContext, late_wgrad


@outside_compile
class DitronSelfAttention(SelfAttention, metaclass=EqualsBaseClass, native=SelfAttention):
    """``SelfAttention`` whose projections are fused with Ulysses' exchanges if that covers it, else as
    inherited."""

    @signed_as(SelfAttention.forward)
    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = None
        if getattr(self.core_attention, "can_attend", False):
            context = self._route(hidden_states, args, kwargs)
        if context is None:
            with output_fused(self, self._shape(), hidden_states, packed_of(args, kwargs)):
                return super().forward(hidden_states, attention_mask, *args, **kwargs)
        return self._forward_fused(
            hidden_states, kwargs.get("rotary_pos_emb"), kwargs.get("packed_seq_params"), context
        )

    def _shape(self) -> AttentionShape:
        size = self.hidden_size_per_attention_head
        return AttentionShape(self.num_attention_heads_per_partition, self.num_query_groups_per_partition, size, size)

    def _num_rows(self, hidden_states: torch.Tensor) -> int:
        """Length of the projections' input, which tensor parallel ranks may share."""
        return hidden_states.shape[0] * (self.world_size if self.config.sequence_parallel else 1)

    def _route(self, hidden_states: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SPContext | None:
        linears, layers = linears_of(self.linear_proj), (self.linear_qkv, self.linear_proj)
        norms = norms_of(self)
        reason = unsupported_reason_hooks_of_ranks(self)  # first, since all ranks have to come to it
        reason = (
            reason
            or self._unsupported_reason_fused(args, kwargs)
            or linears.unsupported_reason(*layers, hidden_states)
        )
        if reason is not None:
            log_native("sp projections", reason)
            return None
        group = self.core_attention.exchange_group
        length = self._num_rows(hidden_states)
        if length % 2 or (kwargs.get("packed_seq_params") is not None and hidden_states.shape[1] != 1):
            return None  # the exchange says what is wrong
        input_shape = (length, *hidden_states.shape[1:])
        return linears.route(group, self._shape(), input_shape, layers, hidden_states, norms)

    def _unsupported_reason_fused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """What comes between a projection and its exchange in this call, or why it is no training."""
        config, packed = self.config, kwargs.get("packed_seq_params")
        covered = {"rotary_pos_emb", "packed_seq_params"} if self.core_attention.takes_packed else {"rotary_pos_emb"}
        others = {name for name, value in kwargs.items() if value is not None and name not in covered}
        if any(value is not None for value in args) or others:
            return f"the attention is called with {', '.join(sorted(others)) or 'positional options'}"
        if packed is not None:
            reason = unsupported_reason_packed(packed)
            if reason is None and config.mrope_section is not None:
                reason = "packed sequences have positions in several dimensions"
            if reason is not None:
                return reason
        if self.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            return f"the mask is {self.attn_mask_type}"
        if self.world_size > 1 and config.num_query_groups < self.world_size:
            return "tensor parallel ranks share query groups: the exchanges alone are fused"
        reason = unsupported_reason_norms(norms_of(self))
        if reason is not None:
            return reason
        if config.attention_output_gate or config.fused_single_qkv_rope or config.flash_decode or config.test_mode:
            return "an output gate, fused RoPE of q and k, flash decoding or test mode is on"
        if self.offload_qkv_linear or self.offload_core_attention or self.offload_attn_proj:
            return "activations are offloaded"
        return unsupported_reason_stand_in(self.core_attention)

    def _forward_fused(
        self, hidden_states: torch.Tensor, rotary_pos_emb: Any, packed: Any, context: SPContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        linears, shape, core = linears_of(self.linear_proj), self._shape(), self.core_attention
        table = None if packed is None else table_of(packed, context.world_size, self._num_rows(hidden_states))
        # A weight sharded by FSDP has its gradient reduced when its own module's backward is done. Beside the
        # collectives of a tensor parallel group the late gradient was not seen on GPUs.
        wgrad_stays = hasattr(self.linear_proj.weight, "__fsdp_param__") or self.world_size > 1
        late = None if wgrad_stays else late_wgrad(self.linear_qkv.weight, self.linear_proj.weight)
        options: dict[str, Any] = dict(row_table=table, late=late)
        norms = norms_of(self)
        with calling(
            self.linear_qkv, lambda x: linears.project_qkv(self.linear_qkv, x, context, shape, **options, norms=norms)
        ) as project:
            parts = project(hidden_states)
        lead = parts[0].shape[:3]
        if packed is not None:
            parts = [part.squeeze(1) for part in parts]
        query, key = self._rotated(parts[0], parts[1], rotary_pos_emb, packed)

        def attend(*parts: torch.Tensor) -> torch.Tensor:
            """A call of the module, recomputed ones too."""
            with calling(
                core, core.attend if packed is None else functools.partial(core.attend, packed=packed)
            ) as module:
                return module(*parts)

        if self.checkpoint_core_attention and self.training:
            attended = tensor_parallel.checkpoint(attend, False, query, key, parts[2])
        else:
            attended = attend(query, key, parts[2])
        attended = attended.view(*lead, shape.value_head_dim)
        with calling(
            self.linear_proj, lambda x: linears.project_out(self.linear_proj, x, context, shape, **options)
        ) as project:
            return project(attended)

    def _rotated(
        self, query: torch.Tensor, key: torch.Tensor, rotary_pos_emb: Any, packed: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE at the positions of the whole sequence; the tables of packed ones are whole."""
        if self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]:
            rotary_pos_emb = None
        if rotary_pos_emb is None:
            return query, key
        tables = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
        group = self.core_attention.exchange_group
        options = dict(config=self.config, mscale=_yarn_get_concentration_factor_from_config(self.config))

        def rotated(tensor: torch.Tensor, table: torch.Tensor | None, starts: torch.Tensor | None) -> torch.Tensor:
            if table is None:
                return tensor
            if packed is not None:
                return apply_rotary_pos_emb(
                    tensor, table, cu_seqlens=starts, cp_group=OneRank(), **options, **rope_arguments(packed)
                )
            return apply_rotary_pos_emb(
                tensor, whole_rotary_table(table, group), cu_seqlens=None, cp_group=group, **options
            )

        query_starts, key_starts = (None, None) if packed is None else starts_of(packed)
        return rotated(query, tables[0], query_starts), rotated(key, tables[1], key_starts)


@outside_compile
class DitronMLASelfAttention(MLASelfAttention, metaclass=EqualsBaseClass, native=MLASelfAttention):
    """``MLASelfAttention`` whose output projection is fused with its exchange if that covers it."""

    @signed_as(MLASelfAttention.forward)
    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads = self.num_attention_heads_per_partition
        shape = AttentionShape(heads, heads, self.q_head_dim, self.config.v_head_dim)
        with output_fused(self, shape, hidden_states, packed_of(args, kwargs)):
            return super().forward(hidden_states, *args, **kwargs)


def class_map() -> dict[type, type]:
    """The native classes and the fused ones; Transformer Engine's attention is among them if it is installed."""
    classes: dict[type, type] = {
        SelfAttention: DitronSelfAttention,
        MLASelfAttention: DitronMLASelfAttention,
        DotProductAttention: DitronDotProductAttention,
    }
    if HAVE_TE:
        classes.update(classes_of_te("sp", _classes_of_te))
    return classes


def _classes_of_te() -> dict[type, type]:
    from ditron_train.megatron.sp import te_attention

    return te_attention.class_map()


def stop() -> None:
    """Forget what was decided about shapes, and with it the symmetric memory of this feature."""
    gate.forget("sp")
    forget_hooks()
    forget_nodes()
    forget_tables()
