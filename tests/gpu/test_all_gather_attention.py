"""``--cp-comm-type all_gather`` on GPUs under torchrun: bits of Transformer Engine's own attention.

torchrun --nproc-per-node 2 -m pytest tests/gpu/test_all_gather_attention.py
"""

from __future__ import annotations

import contextlib
import os
import random

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def world(device):
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    # Transformer Engine's attention adds up gradients in any order unless it is told not to when it is built.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    yield dist.get_world_size()
    parallel_state.destroy_model_parallel()


def attention_of(world, fused, heads, groups, head_dim, window=None, **options):
    """megatron-core's wrapper of Transformer Engine's attention, native or fused."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    import ditron_train.megatron as plugin
    from ditron_train.megatron.sp.te_attention import DitronTEDotProductAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=heads * head_dim, num_attention_heads=heads, num_query_groups=groups,
        kv_channels=head_dim, bf16=True, params_dtype=torch.bfloat16, context_parallel_size=world,
        cp_comm_type="all_gather", attention_dropout=0.0, hidden_dropout=0.0, window_size=window,
        **options,
    )  # fmt: skip
    if fused:
        plugin.apply(features="sp", policy="bits")
    kind = DitronTEDotProductAttention if fused else TEDotProductAttention
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    arguments = dict(attention_type="self", cp_comm_type="all_gather", pg_collection=groups)
    return kind(config, 1, AttnMaskType.causal, **arguments).cuda()


def values_of(world, length, batch, heads, groups, head_dim, seed):
    generator = torch.Generator(device="cuda").manual_seed(100 * seed + dist.get_rank())

    def values(*size):
        return torch.empty(length // world, batch, *size, device="cuda", dtype=torch.bfloat16).normal_(
            generator=generator
        )

    return [values(count, head_dim) for count in (heads, groups, groups)], values(heads * head_dim)


def run(attention, inputs, grad, as_split=False):
    """``as_split``: q, k and v are parts of one tensor, as a QKV projection gives them."""
    from megatron.core.transformer.enums import AttnMaskType

    if as_split:
        sizes = [x.shape[2] for x in inputs]
        inputs = torch.cat([x.detach() for x in inputs], dim=2).split(sizes, dim=2)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves, None, AttnMaskType.causal)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_same_bits(fused, native):
    """On every rank, or the test fails on every rank: the next one is collective."""
    different = torch.tensor(
        [not torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in zip(fused, native)],
        dtype=torch.int32,
        device="cuda",
    )
    dist.all_reduce(different)
    assert not different.any(), dict(zip(NAMES, different.tolist()))


@contextlib.contextmanager
def counted():
    """How often the fused attention has run, and which shapes are native for which reason."""
    from ditron_train.megatron.sp import te_all_gather

    calls, native = [], te_all_gather.all_gather_attention

    def count(*args):
        calls.append(1)
        return native(*args)

    te_all_gather.all_gather_attention = count
    try:
        yield calls
    finally:
        te_all_gather.all_gather_attention = native


def reasons():
    from ditron_train.policy import gate

    return [answer.reason for answer in gate.answers("sp all_gather_attention") if answer.context is None]


@pytest.mark.parametrize("seed", range(6))
def test_random_attentions_have_the_bits_of_transformer_engine(world, seed):
    import ditron_train.megatron as plugin

    draw = random.Random(seed)
    groups, head_dim = draw.choice([1, 2, 3, 8]), draw.choice([64, 128])
    heads, batch = groups * draw.choice([1, 2, 4]), draw.choice([1, 2])
    lengths = [2 * world * draw.choice([64, 128, 200, 512, 1024]) for _ in range(2)]
    window = None if seed % 2 else (draw.choice([1, 100, 255, 1000]), 0)
    native = attention_of(world, False, heads, groups, head_dim, window)
    fused = attention_of(world, True, heads, groups, head_dim, window)
    try:
        with counted() as calls:
            for number, length in enumerate(lengths):
                inputs, grad = values_of(world, length, batch, heads, groups, head_dim, seed)
                wanted = run(native, inputs, grad)
                for as_split in (False, True, False):
                    assert_same_bits(run(fused, inputs, grad, as_split), wanted)
                assert len(calls) == 3 * (number + 1), reasons()
    finally:
        plugin.restore()


def packed_of(world, lengths):
    """Packed sequences of these lengths, each padded to whole chunks, and their rows."""
    from megatron.core.packed_seq_params import PackedSeqParams

    whole = [-(-length // (2 * world)) * 2 * world for length in lengths]
    starts, padded = (
        torch.tensor([0, *one], device="cuda").cumsum(0).to(torch.int32).contiguous() for one in (lengths, whole)
    )
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=max(whole), max_seqlen_kv=max(whole),
    )  # fmt: skip
    return packed, sum(whole)


@pytest.mark.parametrize("window", [None, (300, 0)])
@pytest.mark.parametrize("lengths", [(1000, 37, 513, 2), (4096,), (64,) * 24])
def test_packed_sequences_have_the_bits_of_transformer_engine(world, lengths, window):
    from megatron.core.transformer.enums import AttnMaskType

    import ditron_train.megatron as plugin
    from ditron_train.runtime.versions import is_at_least

    if not is_at_least("transformer-engine", "2.18"):
        pytest.skip("Transformer Engine gathers no packed sequences before 2.18")
    packed, total = packed_of(world, lengths)
    native, fused = (attention_of(world, is_fused, 8, 2, 128, window) for is_fused in (False, True))
    try:
        inputs, grad = values_of(world, total, 1, 8, 2, 128, 5)
        results = []
        for attention in (native, fused, fused):
            leaves = [x.detach().squeeze(1).requires_grad_() for x in inputs]
            out = attention(*leaves, None, AttnMaskType.padding_causal, packed_seq_params=packed)
            out.backward(grad.view(out.shape))
            results.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for one in results[1:]:
            assert_same_bits(one, results[0])
        assert any(answer.context is not None for answer in plugin_answers()), reasons()
    finally:
        plugin.restore()


def test_ranks_that_come_late_are_waited_for(world):
    """One rank's stream is held up before each pass; the buffer holds NaN where nothing arrives."""
    import ditron_train.megatron as plugin

    native, fused = (attention_of(world, is_fused, 8, 2, 128, (300, 0)) for is_fused in (False, True))
    try:
        inputs, grad = values_of(world, 2 * world * 512, 1, 8, 2, 128, 9)
        wanted = run(native, inputs, grad)
        run(fused, inputs, grad)
        context = next(answer.context for answer in plugin_answers() if answer.context is not None)
        for late in range(world):
            torch.cuda.synchronize()
            dist.barrier()
            for plan in context.prepared.values():
                plan._sizes.buffer.local.fill_(float("nan"))
            torch.cuda.synchronize()
            dist.barrier()
            if dist.get_rank() == late:
                torch.cuda._sleep(200_000_000)
            assert_same_bits(run(fused, inputs, grad), wanted)
    finally:
        plugin.restore()


def plugin_answers():
    from ditron_train.policy import gate

    return gate.answers("sp all_gather_attention")


def test_many_steps_have_the_same_bits(world):
    """Without a host that waits in between: several layers' exchanges follow each other on the streams."""
    import ditron_train.megatron as plugin

    native, fused = (attention_of(world, is_fused, 8, 2, 128) for is_fused in (False, True))
    try:
        cases = [values_of(world, 2 * world * 1024, 1, 8, 2, 128, seed) for seed in range(4)]
        wanted = [run(native, *case) for case in cases]
        found = [run(fused, *cases[step % 4]) for step in range(20)]
        for step, one in enumerate(found):
            assert_same_bits(one, wanted[step % 4])
    finally:
        plugin.restore()


def test_evaluation_has_the_same_bits(world):
    from megatron.core.transformer.enums import AttnMaskType

    import ditron_train.megatron as plugin

    native, fused = (attention_of(world, is_fused, 8, 2, 128).eval() for is_fused in (False, True))
    try:
        inputs, _ = values_of(world, 2 * world * 512, 2, 8, 2, 128, 3)
        with torch.no_grad(), counted() as calls:
            results = [attention(*inputs, None, AttnMaskType.causal) for attention in (fused, native)]
        assert_same_bits(results[:1], results[1:])
        assert len(calls) == 1, reasons()
    finally:
        plugin.restore()
