"""Ulysses in Megatron's self-attention on GPUs under torchrun: bits of Transformer Engine's own ``a2a`` attention."""

from __future__ import annotations

import contextlib
import os
import random

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def world(device):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Transformer Engine's attention adds up gradients in any order unless it is told not to when it is built.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    yield dist.get_world_size()
    parallel_state.destroy_model_parallel()


def attention_of(spec, config, fused):
    """Built, with random parameters, which are the same whoever's it is."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    import ditron_train.megatron as plugin

    if fused:
        spec = plugin.apply(spec, "sp", policy="bits")
    names = ["tp", "cp", *(["hcp"] if config.cp_comm_type == "a2a+p2p" else [])]
    options = dict(layer_number=1, cp_comm_type=config.cp_comm_type)
    options["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups(required_pgs=names)
    attention = build_module(spec, config=config, **options).cuda().to(torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(5)
    for parameter in attention.parameters():
        parameter.data.normal_(std=0.05, generator=generator)
    return attention


def build(world, use_te, fused, **options):
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import TransformerConfig

    settings = dict(
        num_layers=1, hidden_size=2048, num_attention_heads=16, num_query_groups=8, kv_channels=128, bf16=True,
        params_dtype=torch.bfloat16, context_parallel_size=world, cp_comm_type="a2a", add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        normalization="RMSNorm", pipeline_dtype=torch.bfloat16,
    )  # fmt: skip
    config = TransformerConfig(**{**settings, **options})
    make = get_gpt_layer_with_transformer_engine_spec if use_te else get_gpt_layer_local_spec
    kwargs = {} if use_te else {"normalization": "RMSNorm"}
    spec = make(qk_layernorm=config.qk_layernorm, **kwargs).submodules.self_attention
    return attention_of(spec, config, fused)


def run(attention, world, length, batch, rope=True, shards=1):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    generator = torch.Generator(device="cuda").manual_seed(20 + dist.get_rank())
    shape = (length // world // shards, batch, attention.config.hidden_size)
    x, grad = (torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator) for _ in range(2))
    x.requires_grad_()
    table = RotaryEmbedding(kv_channels=attention.config.kv_channels, rotary_percent=1.0)(length) if rope else None
    out, bias = attention(x, attention_mask=None, rotary_pos_emb=table)
    out.backward(grad)
    gradients = {name: parameter.grad for name, parameter in attention.named_parameters()}
    attention.zero_grad()
    return out.detach(), x.grad, gradients, bias


def assert_same_bits(fused, native):
    """On every rank, or the test fails on every rank: the next one is collective."""
    assert fused[2].keys() == native[2].keys()
    pairs = {"output": (fused[0], native[0]), "input's gradient": (fused[1], native[1])}
    pairs |= {name: (fused[2][name], gradient) for name, gradient in native[2].items()}
    different = torch.tensor([not torch.equal(*pair) for pair in pairs.values()], dtype=torch.int32, device="cuda")
    dist.all_reduce(different)
    assert not different.any(), dict(zip(pairs, different.tolist()))
    assert (fused[3] is None) == (native[3] is None)


@pytest.fixture
def set_late(monkeypatch):
    """Whether the output projection's weight gradient hides the exchange of dq, dk and dv, whatever its size."""
    from ditron_train.sp import functions

    return lambda is_late: monkeypatch.setattr(functions, "hides_gather", lambda *sizes: is_late)


def num_routes(kind):
    from ditron_train.policy import gate

    name = {"projections": "sp projections", "output": "sp output projection", "exchange": "sp exchange"}[kind]
    return sum(answer.context is not None for answer in gate.answers(name))


@contextlib.contextmanager
def native_routes(monkeypatch):
    """Our attentions by GEMMs and all-to-alls of the process group, where native has no attention to compare with."""
    from ditron_train.megatron.sp import attention_exchange, output, projections

    with monkeypatch.context() as patch:
        where = {"projections": projections, "exchange": attention_exchange, "output": output}
        for name, module in where.items():
            patch.setattr(module, f"route_{name}", lambda *args: None)
        yield


BOTH = [1, 0, 0]  # shapes whose projections are fused, whose exchanges and whose output projection alone are
NORMED = [1, 1, 1]  # with norms of heads the latter two are what the first is compared with
CASES = {
    "plain": ({}, BOTH),
    "one_group_a_head": ({"num_query_groups": 16}, BOTH),
    "fused_rope": ({"apply_rope_fusion": True}, BOTH),
    "recompute": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, BOTH),
    "norms": ({"qk_layernorm": True}, NORMED),
    "norms_recompute": (
        {"qk_layernorm": True, "recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        NORMED,
    ),
    "norms_layernorm_bias": (
        {"qk_layernorm": True, "normalization": "LayerNorm", "add_qkv_bias": True, "num_query_groups": 16},
        NORMED,
    ),
    "qkv_bias": ({"add_qkv_bias": True}, BOTH),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length, batch", [(4096, 1), (2048, 2)])
def test_bits_of_transformer_engine(world, name, length, batch, set_late):
    from megatron.core.extensions.transformer_engine import HAVE_TE

    import ditron_train.megatron as plugin

    if not HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    options, expected = CASES[name]
    native, fused = build(world, True, False, **options), build(world, True, True, **options)
    assert native.state_dict().keys() == fused.state_dict().keys()
    try:
        for rope in (True, False):
            set_late(rope)
            assert_same_bits(run(fused, world, length, batch, rope), run(native, world, length, batch, rope))
        assert [num_routes(one) for one in ("projections", "exchange", "output")] == expected
    finally:
        plugin.restore()


@pytest.mark.parametrize("seed", range(3))
def test_random_attentions_have_the_bits_of_transformer_engine(world, seed):
    from megatron.core.extensions.transformer_engine import HAVE_TE

    import ditron_train.megatron as plugin

    if not HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    draw = random.Random(seed)
    groups = world * draw.choice([1, 2, 3])
    options = dict(
        num_query_groups=groups,
        num_attention_heads=groups * draw.choice([1, 2, 4]),
        kv_channels=draw.choice([64, 128]),
        hidden_size=128 * draw.randint(3, 12),
    )
    native, fused = build(world, True, False, **options), build(world, True, True, **options)
    try:
        for _ in range(3):
            length, batch = 2 * world * draw.randint(20, 300), draw.choice([1, 2])
            assert_same_bits(run(fused, world, length, batch), run(native, world, length, batch))
        assert sum(num_routes(one) for one in ("projections", "exchange", "output")) >= 3, options
    finally:
        plugin.restore()


@pytest.mark.parametrize(
    "options", [{}, {"add_qkv_bias": True}, {"qk_layernorm": True}], ids=["plain", "bias", "norms"]
)
def test_local_spec_has_the_bits_of_all_to_alls(world, options, monkeypatch, set_late):
    import ditron_train.megatron as plugin
    from ditron_train.cpu import megatron_shim as megatron_cpu

    megatron_cpu.allow_torch_norm_with_sequence_parallel()
    attention = build(world, False, True, **options)
    try:
        with native_routes(monkeypatch):
            native = run(attention, world, 2048, 2)
        for is_late in (True, False):
            set_late(is_late)
            assert_same_bits(run(attention, world, 2048, 2), native)
        assert num_routes("projections") == 1
    finally:
        plugin.restore()
        megatron_cpu.uninstall()


@pytest.mark.parametrize("name", ["plain", "fused_rope", "recompute", "norms"])
def test_packed_sequences_have_the_bits_of_transformer_engine(world, name):
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.packed_seq_params import PackedSeqParams

    import ditron_train.megatron as plugin

    if not HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    lengths = [2 * world * count for count in (64, 8, 120, 16)]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    packed = dict(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, cu_seqlens_q_padded=starts,
                  cu_seqlens_kv_padded=starts, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))  # fmt: skip
    options, expected = CASES[name]
    native, fused = build(world, True, False, **options), build(world, True, True, **options)
    table = RotaryEmbedding(kv_channels=128, rotary_percent=1.0)(max(lengths), packed_seq=True)
    results = []
    try:
        for attention in (fused, native):
            generator = torch.Generator(device="cuda").manual_seed(dist.get_rank())
            shape = (sum(lengths) // world, 1, attention.config.hidden_size)
            x, grad = (
                torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator) for _ in range(2)
            )
            x.requires_grad_()
            out, bias = attention(
                x, attention_mask=None, rotary_pos_emb=table, packed_seq_params=PackedSeqParams(**packed)
            )
            out.backward(grad)
            results.append((out.detach(), x.grad, {n: p.grad for n, p in attention.named_parameters()}, bias))
        assert_same_bits(*results)
        assert [num_routes(one) for one in ("projections", "exchange", "output")] == expected
    finally:
        plugin.restore()


@pytest.mark.parametrize("name", ["plain", "norms", "recompute"])
@pytest.mark.parametrize("ring", [1, 2])
def test_exchanges_around_a_ring_have_the_bits_of_transformer_engine(world, name, ring):
    """``a2a+p2p``, whose ring is Transformer Engine's; of one rank it is no ring there."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import HAVE_TE

    import ditron_train.megatron as plugin

    if not HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    if world % (2 * ring) or (ring > 1 and dist.get_backend() != "nccl"):
        pytest.skip("needs 4 ranks, joined by NCCL")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        context_parallel_size=world, hierarchical_context_parallel_sizes=[world // ring, ring]
    )
    options, expected = CASES[name]
    options = dict(options, cp_comm_type="a2a+p2p")
    native, fused = build(world, True, False, **options), build(world, True, True, **options)
    assert native.state_dict().keys() == fused.state_dict().keys()
    try:
        for rope in (True, False):
            assert_same_bits(run(fused, world, 4096, 2, rope), run(native, world, 4096, 2, rope))
        assert [num_routes(one) for one in ("projections", "exchange", "output")] == expected
    finally:
        plugin.restore()
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=world)


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


REFUSED = {  # options for `world` ranks, and a call of such an attention
    "heads": (
        lambda world: {"num_attention_heads": world + 1, "num_query_groups": world + 1},
        lambda attention, x: attention(x, None),
    ),
    "groups": (lambda world: {"num_query_groups": 1}, lambda attention, x: attention(x, None)),
    "odd": (lambda world: {}, lambda attention, x: attention(x[1:], None)),
    "mask": (lambda world: {}, lambda attention, x: attention(x, None)),
    "bias": (
        lambda world: {},
        lambda attention, x: attention(
            x, None, attention_bias=x.new_zeros(1, 1, *(dist.get_world_size() * len(x),) * 2)
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformer_engine_refuses_is_refused_with_its_error(world, name):
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer.enums import AttnMaskType

    import ditron_train.megatron as plugin

    if not HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    options, call = REFUSED[name]
    errors = []
    try:
        for fused in (False, True):
            attention = build(world, True, fused, **options(world))
            if name == "mask":
                attention.attn_mask_type = AttnMaskType.padding
            x = torch.zeros(256, 1, attention.config.hidden_size, dtype=torch.bfloat16, device="cuda")
            errors.append(error_of(lambda attention=attention, x=x: call(attention, x)))
        assert errors[0] is not None and errors[0] == errors[1]
        everywhere = [None] * world
        dist.all_gather_object(everywhere, errors[1])
        assert set(everywhere) == {errors[0]}
    finally:
        plugin.restore()


@pytest.mark.parametrize("use_te", [True, False], ids=["te", "local"])
def test_ranks_together_have_the_bits_of_one(world, use_te, monkeypatch):
    """Outputs, and the input's gradient where native Ulysses has it, too."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import HAVE_TE

    import ditron_train.megatron as plugin

    if use_te and not HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    length, rank = 4096, dist.get_rank()
    generator = torch.Generator(device="cuda").manual_seed(9)
    x, grad = (
        torch.empty(length, 1, 2048, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
        for _ in range(2)
    )
    half = length // world // 2
    mine = torch.cat([torch.arange(half) + half * chunk for chunk in (rank, 2 * world - 1 - rank)]).cuda()

    def run_on(attention, rows):
        leaf = x[rows].detach().requires_grad_()
        out, _ = attention(leaf, attention_mask=None)
        out.backward(grad[rows])
        return out.detach(), leaf.grad

    try:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()
        whole = [result[mine] for result in run_on(build(1, use_te, False), torch.arange(length).cuda())]
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=world)
    try:
        attention = build(world, use_te, True)
        with contextlib.nullcontext() if use_te else native_routes(monkeypatch):
            native = run_on(build(world, True, False) if use_te else attention, mine)
        fused = run_on(attention, mine)
        assert num_routes("projections") == 1
        verdicts = [torch.equal(a, b) for one, two in ((native, whole), (fused, whole)) for a, b in zip(one, two)]
        everywhere = torch.tensor(verdicts, dtype=torch.int32, device="cuda")
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        native_out, native_grad, fused_out, fused_grad = everywhere.tolist()
        assert native_out and fused_out and fused_grad == native_grad, everywhere
    finally:
        plugin.restore()


def build_mla(world, fused):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=1024,
        num_attention_heads=16,
        bf16=True,
        params_dtype=torch.bfloat16,
        context_parallel_size=world,
        cp_comm_type="a2a",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        normalization="RMSNorm",
        pipeline_dtype=torch.bfloat16,
        q_lora_rank=256,
        kv_lora_rank=128,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        rope_type="rope",
        qk_layernorm=True,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, qk_layernorm=True)
    spec = spec.submodules.self_attention
    return attention_of(spec, config, fused)


def test_multi_latent_attention_has_the_bits_of_all_to_alls(world, monkeypatch):
    """Transformer Engine's own ``a2a`` refuses heads of two sizes; its attention between native all-to-alls does
    not."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    import ditron_train.megatron as plugin

    if not HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    attention = build_mla(world, True)
    try:
        with native_routes(monkeypatch):
            native = run(attention, world, 2048, 2, rope=False)
        assert num_routes("exchange") == num_routes("output") == 0
        assert_same_bits(run(attention, world, 2048, 2, rope=False), native)
        assert num_routes("exchange") == num_routes("output") == 1
    finally:
        plugin.restore()
    with pytest.raises(AssertionError, match="does not support MLA"):
        run(build_mla(world, False), world, 2048, 2, rope=False)


@pytest.mark.parametrize("use_te", [True, False], ids=["te", "local"])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicas"])
def test_inside_tensor_parallel_groups(world, use_te, sequence_parallel, monkeypatch):
    """Fused projections in groups of 2 x 2 against native ones; the local spec's exchanges by all-to-alls are its
    native."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import HAVE_TE

    import ditron_train.megatron as plugin
    from ditron_train.cpu import megatron_shim as megatron_cpu

    if world % 2 or world < 4:
        pytest.skip("needs 4 ranks")
    if use_te and not HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=world // 2, tensor_model_parallel_size=2)
    megatron_cpu.allow_torch_norm_with_sequence_parallel()
    sizes = dict(world=world // 2, length=4096, batch=1, shards=2 if sequence_parallel else 1)
    options = dict(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    try:
        fused = build(world // 2, use_te, True, **options)
        native = build(world // 2, use_te, not use_te, **options)
        with contextlib.nullcontext() if use_te else native_routes(monkeypatch):
            expected = run(native, **sizes)
        assert_same_bits(run(fused, **sizes), expected)
        assert num_routes("projections") == 1
    finally:
        plugin.restore()
        megatron_cpu.uninstall()
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=world)
