"""Bodies of the tests of ``a2a+p2p``: exchanges over one level of ranks, rings over the other, around a simulated
attention."""

from __future__ import annotations

import contextlib
import copy
import sys

import sp_workers
import te_simulated
import torch
import torch.distributed as dist

from ditron_train.cpu import megatron_shim as megatron_cpu
from ditron_train.sp.layouts import global_rows


class _Gather(torch.autograd.Function):
    """Local parts of all ranks of a group, in the order of the sequence."""

    @staticmethod
    def forward(ctx, local, group):
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        whole = torch.cat(parts)
        whole[_rows(len(local), group)] = whole.clone()
        return whole

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        own = len(grad) // ctx.group.size()
        return grad[_rows(own, ctx.group)[dist.get_rank(ctx.group) * own :][:own]], None


def _rows(length, group):
    world = group.size()
    return torch.cat([torch.from_numpy(global_rows(rank, world, length)) for rank in range(world)])


def _simulated():
    """An attention without softmax, causal over the sequence that its group holds, with sums in fp64: it has the same
    bits however heads and rows are dealt out. It is told of its group as Transformer Engine's is, and ``asked`` how
    often which kind attended with how many heads; ``described`` is what Transformer Engine would choose kernels by.
    With ``rounds`` it returns whole numbers."""

    class Attention(torch.nn.Module):
        asked, described, rounds = [], [], False

        def __init__(
            self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
            k_channels=None, v_channels=None, num_splits=None, cp_comm_type="p2p", pg_collection=None,
        ):  # fmt: skip
            from megatron.core import parallel_state

            super().__init__()
            self.config, self.attn_mask_type, self.cp_comm_type = config, "causal", cp_comm_type
            self.cp_group = self.holders = pg_collection.cp if config.context_parallel_size > 1 else None
            if self.cp_group is not None and cp_comm_type == "a2a+p2p":
                self.cp_group = parallel_state.get_hierarchical_context_parallel_groups()

        def forward(
            self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None,
            num_splits=None,
        ):  # fmt: skip
            group = self.holders
            self.asked.append((self.cp_comm_type, group and group.size(), query.shape[2]))
            self.described.append(
                dpa_utils.AttentionParams(
                    num_heads=query.shape[2], num_gqa_groups=key.shape[2], context_parallel=group is not None,
                    cp_comm_type=self.cp_comm_type, cp_size=1 if group is None else group.size(),
                )
            )  # fmt: skip
            rows, key, value = torch.arange(len(query)), key.double(), value.double()
            if group is not None:
                rows = torch.from_numpy(global_rows(dist.get_rank(group), group.size(), len(query)))
                key, value = _Gather.apply(key, group), _Gather.apply(value, group)
            repeats = query.shape[2] // key.shape[2]
            key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
            scores = torch.einsum("sbhd,tbhd->bhst", query.double(), key)
            seen = torch.arange(len(key)) <= rows[:, None]
            attended = torch.einsum("bhst,tbhd->sbhd", scores * seen, value)
            if self.rounds:
                attended = attended + (attended.round() - attended).detach()
            return attended.to(query.dtype).flatten(-2)

    te_simulated.pose_transformer_engine(Attention)
    dpa_utils = sys.modules["transformer_engine.pytorch.attention.dot_product_attention.utils"]
    return Attention


@contextlib.contextmanager
def _levels(*sizes):
    """Megatron on gloo, its context parallel group of these levels, with feature ``sp``."""
    from megatron.core import parallel_state

    import ditron_train.megatron as plugin

    with megatron_cpu.megatron_on_cpu():
        ranks = dist.get_world_size()
        parallel_state.initialize_model_parallel(
            context_parallel_size=ranks, hierarchical_context_parallel_sizes=list(sizes)
        )
        plugin.apply(features="sp")
        try:
            yield ranks
        finally:
            plugin.restore()
            parallel_state.destroy_model_parallel()


def _attention(ranks, kind, whole_numbers, **options):
    """A self-attention of Megatron's with the simulated one in it; of small whole numbers, whose products are
    exact."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from ditron_train.megatron.sp.te_attention import DitronTEDotProductAttention

    attention = sp_workers.build(ranks, num_layers=1, **options).decoder.layers[0].self_attention
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    attention.core_attention = DitronTEDotProductAttention(
        attention.config, 1, AttnMaskType.causal, "self", cp_comm_type=kind, pg_collection=groups
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in attention.parameters():
        drawn = torch.randint(-1, 2, parameter.shape, generator=generator).float()
        parameter.data.copy_(drawn if whole_numbers else drawn * torch.rand(parameter.shape, generator=generator))
    return attention


def _results(attention, forward, length, whole_numbers, with_rope):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(7 + rank)
    x, grad = (torch.randint(-1, 2, (length // ranks, 2, 32), generator=generator).float() for _ in range(2))
    if not whole_numbers:
        x, grad = x * 0.3, grad * 0.7
    table = None
    if with_rope:
        table = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True)(length)
    x.requires_grad_()
    out, _ = forward(attention, x, None, rotary_pos_emb=table)
    out.backward(grad)
    gradients = {name: parameter.grad for name, parameter in attention.named_parameters()}
    attention.zero_grad()
    return out.detach(), x.grad, gradients


def attends_in_rings(sizes, options, projections_fused):
    """Bits of the attention that exchanges by itself, whose inner one is a ring of the second level's ranks with this
    rank's heads: with projections in whole numbers, whose sums are exact; around it with any values and RoPE."""
    simulated = _simulated()
    from megatron.core.transformer.attention import SelfAttention

    with _levels(*sizes) as ranks:
        attention = _attention(ranks, "a2a+p2p", projections_fused, kv_channels=8, **options)
        heads, (exchanged, ring) = attention.config.num_attention_heads, sizes
        without = () if projections_fused else ("projections", "output")
        with sp_workers.without(*without):
            fused = _results(attention, type(attention).forward, 32, projections_fused, not projections_fused)
        kind = ("p2p", ring) if ring > 1 else ("a2a+p2p", None)
        assert set(simulated.asked) == {(*kind, heads // exchanged)}, simulated.asked
        names = ["projections"] if projections_fused else ["exchange"]
        assert all(sp_workers.num_fused_shapes(name) == 1 for name in names)
        attention.core_attention.__class__ = simulated
        native = _results(attention, SelfAttention.forward, 32, projections_fused, not projections_fused)
        assert simulated.asked[-1] == ("a2a+p2p", ranks, heads)
        assert all(described == simulated.described[-1] for described in simulated.described), simulated.described
        sp_workers.assert_same_bits((fused[0], None, fused[2]), (native[0], None, native[2]))
        assert torch.equal(fused[1], native[1])


def tables_of_levels():
    """Of one local table, each group of ranks that exchange has its own tokens."""
    _simulated()
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from ditron_train.megatron.sp.packed import whole_rotary_table

    with _levels(2, 2):
        embedding = RotaryEmbedding(kv_channels=4, rotary_percent=1.0, use_cpu_initialization=True)
        local = embedding(32)
        whole = embedding(32, packed_seq=True)
        exchange, ring = parallel_state.get_hierarchical_context_parallel_groups()
        rows = torch.from_numpy(global_rows(dist.get_rank(ring), ring.size(), 16))
        for _ in range(2):
            assert torch.equal(whole_rotary_table(local, exchange), whole[rows])
            assert torch.equal(whole_rotary_table(local, parallel_state.get_context_parallel_group()), whole)


def stays_native(sizes):
    """Packed sequences, which Transformer Engine refuses there, and levels without an exchange or of another number
    are native; returns the reason in the log."""
    simulated = _simulated()
    from megatron.core.packed_seq_params import PackedSeqParams

    from ditron_train.megatron.sp import te_attention

    reasons = []
    te_attention.log_native = lambda what, reason: reasons.append(reason)
    with _levels(*sizes) as ranks:
        core = _attention(ranks, "a2a+p2p", True).core_attention
        q, kv = torch.ones(8, 8, 4), torch.ones(8, 4, 4)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 32], dtype=torch.int32))
        if core._whole:
            assert not core.takes_packed
            core(q.unsqueeze(1), kv.unsqueeze(1), kv.unsqueeze(1), None, None, packed_seq_params=packed)
        else:
            assert not core.can_attend
            core(q.unsqueeze(1), kv.unsqueeze(1), kv.unsqueeze(1), None, None)
        assert simulated.asked == [("a2a+p2p", ranks, 8)]
    return reasons


def latents_agree(sizes, kind, q_lora_rank, output_fused):
    """Multi-latent attention, heads of two sizes and RoPE on a part of them: bits of the attention that exchanges by
    itself. Fused with its exchange the output projection gets whole numbers, whose sums are exact."""
    simulated = _simulated()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from ditron_train.megatron.sp.attention import DitronMLASelfAttention
    from ditron_train.megatron.sp.te_attention import DitronTEDotProductAttention

    with _levels(*sizes) as ranks:
        config = MLATransformerConfig(
            **{
                **megatron_cpu.CPU_CONFIG, "num_layers": 1, "hidden_size": 32, "num_attention_heads": 8,
                "attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False,
                "params_dtype": torch.float32, "context_parallel_size": ranks, "cp_comm_type": kind,
                "transformer_impl": "local",
                "q_lora_rank": q_lora_rank, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8,
                "v_head_dim": 8, "rope_type": "rope", "apply_rope_fusion": False,
            }
        )  # fmt: skip
        submodules = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention.submodules
        submodules = copy.copy(submodules)
        submodules.core_attention = DitronTEDotProductAttention
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        megatron_cpu.seed(11)
        attention = DitronMLASelfAttention(
            config, submodules, 1, AttnMaskType.causal, cp_comm_type=kind, pg_collection=groups
        )
        assert type(attention.core_attention) is DitronTEDotProductAttention
        simulated.rounds = output_fused
        generator = torch.Generator().manual_seed(5)
        drawn = torch.randint(-1, 2, attention.linear_proj.weight.shape, generator=generator).float()
        attention.linear_proj.weight.data.copy_(drawn)
        with sp_workers.without(*(() if output_fused else ("output",))):
            fused = _results(attention, DitronMLASelfAttention.forward, 32, True, False)
        assert sp_workers.num_fused_shapes("exchange") == 1
        assert sp_workers.num_fused_shapes("output") == int(output_fused)
        attention.core_attention.__class__ = simulated
        native = _results(attention, MLASelfAttention.forward, 32, True, False)
        assert simulated.asked[-1] == (kind, ranks, 8)
        sp_workers.assert_same_bits((fused[0], None, fused[2]), (native[0], None, native[2]))
        assert torch.equal(fused[1], native[1])
        assert parallel_state.get_context_parallel_world_size() == ranks
