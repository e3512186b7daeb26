"""Ulysses attention: ``--context-parallel-size N --cp-comm-type a2a`` (feature ``sp``).

megatron-core offers it with Transformer Engine's attention alone; here the local attention has it too. Where nothing
stands between a projection and its exchange (no norm of q and k, no output gate), the two are fused; RoPE then comes
after the exchange, with the tables of the whole sequence: it is elementwise, so bits stay. Else only the output
projection is fused with its exchange (``sp_output``), or the exchanges alone are ours. Causal masks are made by the
attention; a mask that is passed with them is not looked at, as Transformer Engine does.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from ditron_train.megatron.shared.forward_override import calling, signed_as, why_not_stand_in
from ditron_train.megatron.sp.exchange import AttentionShape, Exchange
from ditron_train.megatron.sp.linears import linears_of
from ditron_train.megatron.sp.nodes import forget_nodes
from ditron_train.megatron.sp.output import LeftInHeads, output_fused
from ditron_train.megatron.sp.packed import OneRank, packed_of, starts_of, table_of, why_not_packed
from ditron_train.megatron.sp.spec import route_exchange, route_projections
from ditron_train.policy import gate, log_native
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp import SPContext, late_wgrad
from ditron_train.stream.cached_tensor import CachedTensor

__all__ = ["DitronDotProductAttention", "DitronMLASelfAttention", "DitronSelfAttention", "class_map", "stop"]


def config_of_one_rank(config: Any, world_size: int) -> Any:
    """A copy of ``config`` for the attention around which the exchanges stand: whole sequence, own heads.

    Raises:
        NotSupportedError: Heads or query groups of one tensor parallel rank do not divide by the group.
    """
    ways = world_size * config.tensor_model_parallel_size
    if config.num_attention_heads % ways or config.num_query_groups % ways:
        raise NotSupportedError(
            f"The number of attention heads needs to be divisible by CP size! {config.num_attention_heads} heads and "
            f"{config.num_query_groups} query groups over {config.tensor_model_parallel_size} tensor parallel times "
            f"{world_size} context parallel ranks"
        )
    inner = copy.copy(config)
    inner.context_parallel_size = 1
    inner.num_attention_heads //= world_size
    inner.num_query_groups //= world_size
    return inner


def shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttentionShape:
    """Shape of an attention from its q, k and v [s, b, heads, d] (packed [t, heads, d])."""
    return AttentionShape(query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1])


def exchanged(
    group: dist.ProcessGroup,
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    left_in_heads: list[LeftInHeads] | None,
) -> torch.Tensor:
    """Exchange, ``attend(q, k, v)`` on the whole sequence with this rank's heads, exchange back: [s / W, b, heads *
    d].

    Where ``left_in_heads`` is a list, the way back is left to the output projection and noted there.
    """
    if query.shape[0] % 2:
        raise NotSupportedError(f"Sequence length per GPU needs to be divisible by 2! It is {query.shape[0]}")
    shape = shape_of(query, key, value)
    shape.qkv_layout(dist.get_world_size(group))
    exchange = Exchange(group, shape, route_exchange(group, shape, query))
    attended = attend(*exchange.to_heads(query, key, value))
    if left_in_heads is not None:
        left_in_heads.append(LeftInHeads(shape, None))
        return attended
    return exchange.to_sequence(attended)


def _causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """What the native softmax masks by where it gets no mask, on the tensors' own device: True above the diagonal."""
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
class DitronDotProductAttention(DotProductAttention):
    """``DotProductAttention`` that also takes a context parallel group, with ``cp_comm_type`` ``a2a``.

    ``forward`` gets and returns local parts of the sequence, ``attend`` the whole sequence of this rank's heads.

    Attributes:
        exchange_group: The group of the exchanges, or None where there are none.
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
        super().__init__(
            inner, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale, cp_comm_type,
            pg_collection,
        )  # fmt: skip
        if inner is not config:
            self.exchange_group = group
        self.left_in_heads: list[LeftInHeads] | None = None

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


def whole_rotary_table(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """RoPE's table of the whole sequence from the local one [s / W, ...]; gathered once for each table object."""
    known = _TablesOf.get(local)
    if known is not None:
        return known
    world = dist.get_world_size(group)
    gathered = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(gathered, local.contiguous(), group=group)
    halves = [table.chunk(2, dim=0) for table in gathered]
    whole = torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim=0)
    if not is_capturing(local.device):  # a graph's own: it is filled by replays
        _TablesOf.put(local, whole)
    return whole


class _TablesOf:
    """Whole tables by the identity of the local ones, for as long as those live (tensors compare by value)."""

    _entries: dict[int, tuple[Any, CachedTensor]] = {}

    @classmethod
    def get(cls, local: torch.Tensor) -> torch.Tensor | None:
        entry = cls._entries.get(id(local))
        return entry[1].get() if entry is not None and entry[0]() is local else None

    @classmethod
    def put(cls, local: torch.Tensor, whole: torch.Tensor) -> None:
        key = id(local)
        cls._entries[key] = (weakref.ref(local, lambda _: cls._entries.pop(key, None)), CachedTensor(whole))

    @classmethod
    def clear(cls) -> None:
        cls._entries.clear()


@outside_compile
class DitronSelfAttention(SelfAttention):
    """``SelfAttention`` whose projections are fused with Ulysses' exchanges where that covers it, else as
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
        reason = self._why_not_fused(args, kwargs) or linears_of(self.linear_proj).why_not(
            self.linear_qkv, self.linear_proj, hidden_states
        )
        if reason is not None:
            log_native("sp projections", reason)
            return None
        group = self.core_attention.exchange_group
        length = self._num_rows(hidden_states)
        if length % 2 or (kwargs.get("packed_seq_params") is not None and hidden_states.shape[1] != 1):
            return None  # the exchange says what is wrong
        return route_projections(
            group,
            self._shape(),
            (length, *hidden_states.shape[1:]),
            self.linear_qkv.weight,
            self.linear_proj.weight,
            hidden_states,
        )

    def _why_not_fused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """What stands between a projection and its exchange, or is not training, in this call."""
        config, packed = self.config, kwargs.get("packed_seq_params")
        covered = {"rotary_pos_emb", "packed_seq_params"} if self.core_attention.takes_packed else {"rotary_pos_emb"}
        others = {name for name, value in kwargs.items() if value is not None and name not in covered}
        if any(value is not None for value in args) or others:
            return f"the attention is called with {', '.join(sorted(others)) or 'positional options'}"
        if packed is not None:
            reason = why_not_packed(packed)
            if reason is None and config.mrope_section is not None:
                reason = "packed sequences have positions in several dimensions"
            if reason is not None:
                return reason
        if self.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            return f"the mask is {self.attn_mask_type}"
        if self.world_size > 1 and config.num_query_groups < self.world_size:
            return "tensor parallel ranks share query groups: the exchanges alone are ours"
        for norm in (self.q_layernorm, self.k_layernorm):
            if norm is not None and not isinstance(norm, IdentityOp):
                return "q and k are normalised before the exchange"
        if config.attention_output_gate or config.fused_single_qkv_rope or config.flash_decode or config.test_mode:
            return "an output gate, fused RoPE of q and k, flash decoding or test mode is on"
        if self.offload_qkv_linear or self.offload_core_attention or self.offload_attn_proj:
            return "activations are offloaded"
        return why_not_stand_in(self.core_attention)

    def _forward_fused(
        self, hidden_states: torch.Tensor, rotary_pos_emb: Any, packed: Any, context: SPContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        linears, shape, core = linears_of(self.linear_proj), self._shape(), self.core_attention
        table = None if packed is None else table_of(packed, context.world_size, self._num_rows(hidden_states))
        # A weight sharded by FSDP has its gradient reduced when its own module's backward is done. Beside the
        # collectives of a tensor parallel group the late gradient was not seen on GPUs.
        wgrad_stays = hasattr(self.linear_proj.weight, "__fsdp_param__") or self.world_size > 1
        late = None if wgrad_stays else late_wgrad(self.linear_qkv.weight, self.linear_proj.weight)
        options = dict(row_table=table, late=late)
        with calling(
            self.linear_qkv, lambda x: linears.project_qkv(self.linear_qkv, x, context, shape, **options)
        ) as project:
            parts = project(hidden_states)
        lead = parts[0].shape[:3]
        if packed is not None:
            parts = [part.squeeze(1) for part in parts]
        query, key = self._rotated(*parts[:2], rotary_pos_emb, packed)

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
                return apply_rotary_pos_emb(tensor, table, cu_seqlens=starts, cp_group=OneRank(), **options)
            return apply_rotary_pos_emb(
                tensor, whole_rotary_table(table, group), cu_seqlens=None, cp_group=group, **options
            )

        query_starts, key_starts = (None, None) if packed is None else starts_of(packed)
        return rotated(query, tables[0], query_starts), rotated(key, tables[1], key_starts)


@outside_compile
class DitronMLASelfAttention(MLASelfAttention):
    """``MLASelfAttention`` whose output projection is fused with its exchange where that covers it."""

    @signed_as(MLASelfAttention.forward)
    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads = self.num_attention_heads_per_partition
        shape = AttentionShape(heads, heads, self.q_head_dim, self.config.v_head_dim)
        with output_fused(self, shape, hidden_states, packed_of(args, kwargs)):
            return super().forward(hidden_states, *args, **kwargs)


def class_map() -> dict[type, type]:
    """The native classes and ours; Transformer Engine's attention is among them where it is installed."""
    classes: dict[type, type] = {
        SelfAttention: DitronSelfAttention,
        MLASelfAttention: DitronMLASelfAttention,
        DotProductAttention: DitronDotProductAttention,
    }
    if HAVE_TE:
        from ditron_train.megatron.sp import te_attention

        classes.update(te_attention.class_map())
    return classes


def stop() -> None:
    """Forget what was decided about shapes, and with it the symmetric memory of this feature."""
    gate.forget("sp")
    forget_nodes()
    _TablesOf.clear()
