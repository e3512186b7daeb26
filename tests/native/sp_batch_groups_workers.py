"""Body of the test with batches that bring their own context parallel groups, around a simulated attention of
Transformer Engine."""

from __future__ import annotations

import copy

import sp_workers
import te_simulated
import torch
import torch.distributed as dist


def _pose_transformer_engine():
    """Gives megatron-core, for as long as this process lives, an attention that changes its group as Transformer
    Engine's does; every row attends to itself alone, so results do not depend on the group. ``asked``: who was called,
    with which group."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        asked = []

        def __init__(
            self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
            k_channels=None, v_channels=None, num_splits=None, cp_comm_type="p2p", pg_collection=None,
        ):  # fmt: skip
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            known = attention_dropout, softmax_scale, cp_comm_type, pg_collection
            super().__init__(alone, layer_number, attn_mask_type, attention_type, *known)
            self.config, self.attn_mask_type = config, "causal"
            self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
            self.hidden_size_per_attention_head_v = v_channels or config.kv_channels

        def forward(
            self,
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias=None,
            packed_seq_params=None,
            num_splits=None,
        ):
            if packed_seq_params is not None and packed_seq_params.cp_group is not None:
                self.cp_group = packed_seq_params.cp_group
            elif packed_seq_params is not None and packed_seq_params.local_cp_size is not None:
                self.cp_group = None
            self.asked.append((self, self.cp_group))
            assert value.shape[-1] == self.hidden_size_per_attention_head_v
            return value.repeat_interleave(query.shape[-2] // value.shape[-2], dim=-2).flatten(-2)

    te_simulated.pose_transformer_engine(Attention)
    return Attention


def batches_of_other_groups(lengths_of_ranks):
    """Batches that differ between ranks, in length and number, are native; so are those after them until the group is
    back."""
    simulated = _pose_transformer_engine()
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import AttnMaskType

    from ditron_train.megatron.sp.te_attention import DitronTEDotProductAttention
    from ditron_train.policy import gate

    world, rank = dist.get_world_size(), dist.get_rank()

    def batch(length, **own):
        starts = torch.tensor([0, length], dtype=torch.int32)
        return PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=starts, cu_seqlens_kv=starts, **own)

    def agrees(length, packed):
        """Results are native's; who attended, with which group."""
        simulated.asked.clear()
        x = torch.randn(length, 1, 32)
        with torch.no_grad():
            fused, _ = attention(x, None, packed_seq_params=packed)
            (asked,) = simulated.asked
            native, _ = SelfAttention.forward(attention, x, None, packed_seq_params=packed)
        assert torch.equal(fused, native)
        return asked

    with sp_workers.groups(world):
        attention = sp_workers.build(world, num_layers=1).decoder.layers[0].self_attention
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        core = attention.core_attention = DitronTEDotProductAttention(
            attention.config, 1, AttnMaskType.causal, "self", cp_comm_type="a2a", pg_collection=groups
        )
        (whole,) = core._whole
        assert agrees(8, None) == (whole, None)
        known = gate.answers("sp")
        assert sp_workers.num_fused_shapes("projections") == len(known) == 1
        for length in lengths_of_ranks[rank]:
            assert agrees(length, batch(length, local_cp_size=1)) == (core, None)
            assert core.left_in_heads is None
        assert agrees(8, None) == (core, None)
        assert agrees(8, batch(8, local_cp_size=world, cp_group=groups.cp)) == (core, groups.cp)
        assert gate.answers("sp") == known, "the ranks were asked about a batch that is not theirs alike"
        assert agrees(8, None) == (whole, None)


def padded_values_of_packed_sequences():
    """Multi-latent attention since 0.18 pads the values of packed sequences to the size of q, says so to its
    attention, and cuts what comes out: the output projection gets what it would without."""
    simulated = _pose_transformer_engine()
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from ditron_train.megatron.sp.exchange import AttentionShape
    from ditron_train.megatron.sp.output import output_fused
    from ditron_train.megatron.sp.te_attention import DitronTEDotProductAttention

    world, (length, heads, head_size, value_size) = dist.get_world_size(), (8, 8, 8, 4)
    starts = torch.tensor([0, length * world], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    with sp_workers.groups(world), torch.no_grad():
        attention = sp_workers.build(world, num_layers=1).decoder.layers[0].self_attention
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        core = attention.core_attention = DitronTEDotProductAttention(
            attention.config, 1, AttnMaskType.causal, "self", k_channels=head_size, v_channels=value_size,
            cp_comm_type="a2a", pg_collection=groups,
        )  # fmt: skip
        query, value = torch.randn(length, heads, head_size), torch.randn(length, heads, value_size)

        def attend(values):
            """As ``MultiLatentAttention._run_core_attention``."""
            core.hidden_size_per_attention_head_v = values.shape[-1]
            try:
                out = core(query, query, values, None, AttnMaskType.causal, packed_seq_params=packed)
            finally:
                core.hidden_size_per_attention_head_v = value_size
            out = out.reshape(len(out), -1, values.shape[-1])[..., :value_size]
            return attention.linear_proj(out.reshape(len(out), 1, -1))[0]

        native, _ = attention.linear_proj(value.reshape(length, 1, -1))
        for values in (torch.nn.functional.pad(value, [0, head_size - value_size]), value):
            assert torch.equal(attend(values), native)
            shape = AttentionShape(heads, heads, head_size, value_size)
            with output_fused(attention, shape, torch.randn(length, 1, 32), packed):
                assert torch.equal(attend(values), native)
        assert sp_workers.num_fused_shapes("output") == 1 and {one for one, _ in simulated.asked} == {core._whole[0]}
        simulated.asked.clear()
        other = torch.randn(2 * length, heads, 1, head_size)[
            ..., 0, :
        ]  # of another sequence, as cross attention has it
        core(query[:, None], other[:, None], other[:, None, :, :value_size], None, AttnMaskType.no_mask)
        assert simulated.asked == [(core, groups.cp)]
