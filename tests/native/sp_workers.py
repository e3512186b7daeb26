"""Bodies of the context parallel tests: a small GPT of the local spec, whole on one rank and with Ulysses on
several."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from unittest import mock

import torch
import torch.distributed as dist

from ditron_train.cpu import megatron_shim as megatron_cpu
from ditron_train.sp.gemm_a2a import GemmA2APlan
from tests.support.exact import exact_sums
from tests.support.megatron_version import batch_on_this_cp_rank

VOCABULARY, BATCH = 64, 2

# Against one rank, whose sums over the sequence are not sums over ranks: a few units of 2**-24 a sum
LOSS_BOUND = 5e-6
GRADIENT_BOUND = 5e-5


@contextlib.contextmanager
def groups(context_parallel, tensor_parallel=1, features="sp", exact=True):
    """Megatron on gloo with these sizes, ``features`` on if there is a context parallel group; exact arithmetic."""
    from megatron.core import parallel_state

    import ditron_train.megatron as plugin

    with megatron_cpu.megatron_on_cpu(), exact_sums() if exact else contextlib.nullcontext():
        parallel_state.initialize_model_parallel(
            context_parallel_size=context_parallel, tensor_model_parallel_size=tensor_parallel
        )
        if context_parallel > 1:
            plugin.apply(features=features)
        try:
            yield
        finally:
            plugin.restore()
            parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def without(*names):
    """The fused projections (``projections``, ``output``) or the exchanges (``exchange``) run natively."""
    from ditron_train.megatron.sp import attention_exchange, output, projections

    where = {"projections": projections, "exchange": attention_exchange, "output": output}
    saved = {name: getattr(where[name], f"route_{name}") for name in names}
    for name in names:
        setattr(where[name], f"route_{name}", lambda *args: None)
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(where[name], f"route_{name}", function)


def build(context_parallel, tensor_parallel=1, spec=None, **options):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    megatron_cpu.seed(11)
    has_own_norms = options.pop("own_norms", False)
    settings = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        params_dtype=torch.float32,
    )
    config = TransformerConfig(
        **{
            **megatron_cpu.CPU_CONFIG,
            **settings,
            "context_parallel_size": context_parallel,
            "cp_comm_type": "a2a",
            "tensor_model_parallel_size": tensor_parallel,
            "sequence_parallel": tensor_parallel > 1,
            **options,
        }
    )
    model = GPTModel(
        config,
        spec or get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    for module in model.modules() if has_own_norms else ():
        if type(module) is torch.nn.LayerNorm and module.normalized_shape == (config.kv_channels,):
            module.__class__ = OwnNorm
    return model


class OwnNorm(torch.nn.LayerNorm):
    """A norm of heads that the fused ones do not know: the QKV projection in front of it stays native."""


def run(model, context_parallel, length):
    """Losses of this rank's tokens, and all gradients summed over the context parallel group."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (BATCH, length + 1), generator=generator)
    batch = dict(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        position_ids=torch.arange(length).expand(BATCH, length).contiguous(),
    )
    if context_parallel > 1:
        batch = batch_on_this_cp_rank(batch)
    mask = None if context_parallel > 1 else torch.ones(length, length, dtype=torch.bool).triu_(1)[None, None]
    losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    model.zero_grad()
    losses.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    local = {name: gradient.clone() for name, gradient in gradients.items()}
    for gradient in gradients.values():
        if context_parallel > 1:
            dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    return losses.detach(), gradients, local


SPECS = {"projections": "sp projections", "output": "sp output projection", "exchange": "sp exchange"}


def num_fused_shapes(kind):
    from ditron_train.policy import gate

    return sum(answer.context is not None for answer in gate.answers(SPECS[kind]))


def assert_same_bits(fused, native):
    assert torch.equal(fused[0], native[0])
    for name, gradient in native[2].items():
        assert torch.equal(fused[2][name], gradient), name


def gpt_agrees(
    options, length=16, expect_fused=True, tensor_parallel=1, through_spec=False, data_parallel=1, features="sp"
):
    """Ulysses by ops against Ulysses by all-to-alls, bit for bit, and against one rank."""
    import ditron_train.megatron as plugin

    world = dist.get_world_size() // (tensor_parallel * data_parallel)
    spec = None
    if through_spec:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        spec = plugin.apply(get_gpt_layer_local_spec(), "sp")
    with groups(world, tensor_parallel, features):
        if through_spec:
            plugin.restore()
        model = build(world, tensor_parallel, spec, **options)
        with without("projections", "output", "exchange"):
            native = run(model, world, length)
        with without("projections", "output"):
            assert_same_bits(run(model, world, length), native)
            assert num_fused_shapes("exchange") > 0
        fused = run(model, world, length)
        # What is recomputed in backward runs without gradients first; tp overlaps the projections.
        kinds = (1 + (options.get("recompute_granularity") == "full")) * (features == "sp")
        expected = (kinds * expect_fused, kinds * (not expect_fused))
        assert (num_fused_shapes("projections"), num_fused_shapes("output")) == expected
        assert_same_bits(fused, native)
        state = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
        rank = dist.get_rank() // tensor_parallel % world
    with groups(1, tensor_parallel):
        whole = build(1, tensor_parallel, **options)
        missing = whole.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys and all("_extra_state" in name for name in missing.missing_keys)
        expected = run(whole, 1, length)
    chunk = length // (2 * world)
    mine = torch.cat([torch.arange(chunk) + chunk * place for place in (rank, 2 * world - 1 - rank)])
    assert (native[0] - expected[0][:, mine]).abs().max() <= LOSS_BOUND
    for name, gradient in expected[1].items():
        assert (native[1][name] - gradient).abs().max() <= 10 * GRADIENT_BOUND, name
    return torch.equal(native[0], expected[0][:, mine])


def norms_of_heads_agree(options, length):
    """An attention with norms of q and k on whole numbers, which no GEMM rounds: q, k, v and every gradient have the
    bits of projection, norm and all-to-all, one behind the other."""
    world, rank = dist.get_world_size(), dist.get_rank()
    with groups(world):
        attention = build(world, num_layers=1, **options).decoder.layers[0].self_attention
        generator = torch.Generator().manual_seed(5)
        for name, parameter in attention.named_parameters():
            if "linear" in name:
                parameter.data.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
            else:
                parameter.data.normal_(1.0, 0.3, generator=generator)
        generator.manual_seed(20 + rank)
        x, grad = (torch.randint(-3, 4, (length // world, BATCH, 32), generator=generator).float() for _ in range(2))

        def run_once():
            seen, attend = [], attention.core_attention.attend

            def attending(*parts, **kwargs):
                seen.extend(part.detach().clone() for part in parts)
                return attend(*parts, **kwargs)

            attention.core_attention.attend, leaf = attending, x.clone().requires_grad_()
            try:
                out, _ = attention(leaf, None)
                out.backward(grad)
            finally:
                del attention.core_attention.attend
            gradients = {name: parameter.grad for name, parameter in attention.named_parameters()}
            attention.zero_grad()
            return out.detach(), seen[:3], {"x": leaf.grad, **gradients}

        with without("projections", "output", "exchange"):
            native = run_once()
        with mock.patch.object(GemmA2APlan, "mixed", autospec=True, side_effect=GemmA2APlan.mixed) as mixed:
            fused, num_copies = run_once(), mixed.call_count
            with torch.no_grad():
                assert torch.equal(attention(x, None)[0], fused[0]) and mixed.call_count == num_copies > 0
        assert (num_fused_shapes("projections"), num_fused_shapes("output")) == (2, 0)  # with and without gradients
    assert torch.equal(fused[0], native[0])
    assert len(native[1]) == 3 and all(torch.equal(*pair) for pair in zip(fused[1], native[1], strict=True))
    assert native[2].keys() == fused[2].keys() and "q_layernorm.weight" in native[2]
    different = [name for name, gradient in native[2].items() if not torch.equal(fused[2][name], gradient)]
    # The exchanges are the same permutation: gradients of one rank's norms are sums over its own part of the sequence.
    assert not different and native[2]["q_layernorm.weight"].abs().max() > 0, different


def largest_sums(options, length):
    """What the policy's data that shows the order of sums leaves of them, against sums of the same magnitudes that do
    not cancel: the largest ratio among all results and gradients, for each question asked."""
    from ditron_train.megatron.sp import spec
    from ditron_train.policy import native_results

    asked, world = {}, dist.get_world_size()
    decide = spec._UlyssesOp.decide

    def recording(self, call, context):
        freed = [torch.empty_like(weight) for weight in call.weights]  # as Megatron-FSDP leaves what it gathers later
        for weight in freed:
            weight.untyped_storage().resize_(0)
        own = self.timed_call(call._replace(weights=tuple(freed), norms=()), context)
        assert all(result.isfinite().all() for result in native_results(self, own))
        given = self.timed_call(call, context)
        memory = {tensor.untyped_storage().data_ptr() for tensor in given.values}
        assert all(weight.untyped_storage().data_ptr() not in memory for weight in call.weights)
        for one in self.order_probe(call, context):
            shapes = [[(t.shape, t.dtype) for t in (*each.values, *each.grads)] for each in (one, given)]
            assert shapes[0] == shapes[1]
            positive = one._replace(
                **{name: tuple(t.abs() for t in getattr(one, name)) for name in ("values", "grads")}
            )
            left, whole = native_results(self, one), native_results(self, positive)
            asked[self.word] = max(float(a.abs().max() / b.max()) for a, b in zip(left, whole))
        return decide(self, call, context)

    spec._UlyssesOp.decide = recording
    try:
        with groups(world, exact=False):
            run(build(world, **options), world, length)
    finally:
        spec._UlyssesOp.decide = decide
    return asked


@contextlib.contextmanager
def simulated_nodes(ranks_per_node):
    """Processes of one machine that take themselves for nodes, without memory of one another's peers."""
    from ditron_train.symm.shm_transport import ShmTransport

    allocate, before = ShmTransport.allocate, os.environ.get("NCCL_HOSTID")

    def allocate_on_this_node(self, group, device, num_bytes):
        segment = allocate(self, group, device, num_bytes)
        own = dist.get_rank() // ranks_per_node
        ranks = dist.get_process_group_ranks(group)
        addresses = [a if rank // ranks_per_node == own else 0 for a, rank in zip(segment.addresses, ranks)]
        return dataclasses.replace(segment, addresses=addresses)

    ShmTransport.allocate = allocate_on_this_node
    os.environ["NCCL_HOSTID"] = f"simulated{dist.get_rank() // ranks_per_node}"
    try:
        yield
    finally:
        ShmTransport.allocate = allocate
        if before is None:
            del os.environ["NCCL_HOSTID"]
        else:
            os.environ["NCCL_HOSTID"] = before


def gpt_across_nodes(ranks_per_node, batch_of_rows):
    """Ulysses over nodes: exchanges by rails and peer memory where nodes have several ranks, else native; the same
    bits."""
    from ditron_train.megatron.sp.nodes import NodesContext
    from ditron_train.policy import gate

    world = dist.get_world_size()
    with simulated_nodes(ranks_per_node), groups(world):
        model = build(world)
        with without("projections", "output", "exchange"):
            native = run(model, world, batch_of_rows)
        assert_same_bits(run(model, world, batch_of_rows), native)
        contexts = {kind: [answer.context for answer in gate.answers(name)] for kind, name in SPECS.items()}
        contexts = {kind: of_kind[-1] for kind, of_kind in contexts.items()}
        assert contexts["projections"] is None and contexts["output"] is None
        assert isinstance(contexts["exchange"], NodesContext) == (ranks_per_node > 1)
        if ranks_per_node > 1:
            packed_across_nodes(contexts["exchange"])


def memory_missing_on_one_node(ranks_per_node, capped):
    """Reasons for exchanges that all nodes leave to native since the ``capped`` ranks' has no memory: for its context,
    then for a shape's buffers; with memory again, the next shape is exchanged by the fused path."""
    from megatron.core import parallel_state

    from ditron_train.megatron.sp.nodes import get_nodes_context

    module = sys.modules["ditron_train.policy.gate"]
    world, log, reasons = dist.get_world_size(), module.log_native, []
    module.log_native = lambda name, reason: reasons.append(reason) if name == "sp exchange" else None
    try:
        with simulated_nodes(ranks_per_node), groups(world):
            model = build(world, num_layers=1)
            for length, cap in ((16, 4096), (24, None), (8, 0)):
                if cap is None:
                    cap = get_nodes_context(
                        parallel_state.get_context_parallel_group(), torch.device("cpu")
                    ).node.arena.num_bytes
                with without("projections", "output", "exchange"):
                    native = run(model, world, length)
                if cap and dist.get_rank() in capped:
                    os.environ["DITRON_ARENA_BYTES"] = str(cap)
                assert_same_bits(run(model, world, length), native)
                os.environ.pop("DITRON_ARENA_BYTES", None)
                assert num_fused_shapes("exchange") == int(not cap)
    finally:
        module.log_native = log
    return reasons


def packed_across_nodes(context):
    """Packed sequences by rails: rows come to be where the table says, and go back."""
    from ditron_train.sp import output_layout, packed_rows, qkv_layout

    world, rank = context.world_size, context.rank
    lengths = [2 * world * count for count in (3, 1, 5)]
    total = sum(lengths)
    table = packed_rows(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]), world, total // world)
    layout, out_layout = qkv_layout(2 * world, world, 8, world), output_layout(2 * world, 8, world)
    whole = [
        torch.arange(total * heads * 8, dtype=torch.float32).view(total, heads, 8)
        for heads in (2 * world, world, world)
    ]
    rows = table[rank].long()
    parts = context.to_heads([part[rows] for part in whole], layout, table)
    for part, expected, heads in zip(parts, whole, (2, 1, 1)):
        assert torch.equal(part, expected[:, rank * heads : (rank + 1) * heads])
    assert torch.equal(context.to_sequence(parts[0], out_layout, table), whole[0][rows])


def refused_calls():
    """Errors of attentions called with what native refuses: an odd length, a padding mask, a bias, packed
    sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    world, errors = dist.get_world_size(), {}
    with groups(world):
        attention = build(world).decoder.layers[0].self_attention
        core = attention.core_attention
        x = torch.zeros(4, BATCH, 32)
        parts = [torch.zeros(4, BATCH, heads, 4) for heads in (8, 4, 4)]
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=torch.tensor([0, 8]), cu_seqlens_kv=torch.tensor([0, 8])
        )
        calls = {
            "odd": lambda: attention(x[:3], None),
            "bias": lambda: core(*parts, None, AttnMaskType.causal, attention_bias=torch.zeros(1)),
            "packed": lambda: core(*parts, None, AttnMaskType.causal, packed_seq_params=packed),
            "mask": lambda: core(*parts, None, AttnMaskType.padding),
            "projected": lambda: (setattr(attention, "attn_mask_type", AttnMaskType.padding), attention(x, None)),
        }
        for name, call in calls.items():
            try:
                call()
            except (AssertionError, ValueError) as error:
                errors[name] = f"{type(error).__name__}: {error}"
    return errors


def tables_of_native_exchanges():
    """How many exchanges by all-to-alls of the group were set up in two steps of two layers."""
    from ditron_train.sp import native

    made, init = [], native.AllToAlls.__init__

    def counted(self, *arguments):
        made.append(arguments)
        init(self, *arguments)

    with groups(2), without("projections", "output", "exchange"):
        model = build(2)
        with mock.patch.object(native.AllToAlls, "__init__", counted):
            for _ in range(2):
                run(model, 2, 16)
    return len(made)


def bytes_of_layers():
    """Symmetric memory of the group with one layer and with three."""
    from ditron_train.policy import gate

    world, sizes = dist.get_world_size(), []
    for num_layers in (1, 3):
        with groups(world):
            run(build(world, num_layers=num_layers), world, 16)
            sizes.append({answer.context.arena.num_bytes for answer in gate.answers("sp")})
    return sizes


@contextlib.contextmanager
def newer_rope(longest):
    """RoPE as after 0.19, which has to be told the longest of packed sequences: else it takes other rows of a table
    that is as long as all of them, and asks the device."""
    from megatron.core.models.common.embeddings import rope_utils

    from ditron_train.megatron.compat import config
    from ditron_train.megatron.sp import attention

    native = rope_utils.apply_rotary_pos_emb

    def rope(t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None, max_seqlen=None):
        assert cu_seqlens is not None and max_seqlen == longest
        return native(t, freqs, config, cu_seqlens, mscale, cp_group)

    config._rope_takes_longest.cache_clear()
    with mock.patch.object(rope_utils, "apply_rotary_pos_emb", rope):
        with mock.patch.object(attention, "apply_rotary_pos_emb", rope):
            yield


def packed_attention_agrees(lengths, options, newer=False):
    """Fused projections of packed sequences, by an attention that masks them apart, against each sequence by itself on
    one rank; ``newer``: with RoPE as after 0.19."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from ditron_train.megatron.sp.dot_product_attention import DitronDotProductAttention
    from ditron_train.sp import packed_rows

    class Attention(DitronDotProductAttention):
        takes_packed = True

        def attend(self, query, key, value, attn_mask_type=None, packed=None):
            sequence = torch.bucketize(torch.arange(len(query)), packed.cu_seqlens_q[1:], right=True)
            mask = (sequence[:, None] != sequence[None, :]) | torch.ones(
                len(query), len(query), dtype=torch.bool
            ).triu_(1)
            parts = [part.unsqueeze(1) for part in (query, key, value)]
            return DotProductAttention.forward(self, *parts, mask[None, None], self.attn_mask_type).squeeze(1)

    world, rank = dist.get_world_size(), dist.get_rank()
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(starts[-1])
    rows = packed_rows(starts, world, total // world)[rank].long()
    generator = torch.Generator().manual_seed(8)
    x, grad = (torch.randn(total, 1, 32, generator=generator) for _ in range(2))

    def results(attention, leaf, out, grad):
        out.backward(grad)
        return out.detach(), leaf.grad, {name: parameter.grad for name, parameter in attention.named_parameters()}

    with groups(world), newer_rope(max(lengths)) if newer else contextlib.nullcontext():
        attention = build(world, num_layers=1, **options).decoder.layers[0].self_attention
        attention.core_attention.__class__ = Attention
        table = RotaryEmbedding(kv_channels=4, rotary_percent=1.0, use_cpu_initialization=True)(
            max(lengths), packed_seq=True
        )
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        leaf = x[rows].requires_grad_()
        out, _ = attention(leaf, None, rotary_pos_emb=table, packed_seq_params=packed)
        fused = results(attention, leaf, out, grad[rows])
        for gradient in fused[2].values():
            dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        assert num_fused_shapes("projections") == 1
        state = {name: value for name, value in attention.state_dict().items() if torch.is_tensor(value)}
    with groups(1):
        attention = build(1, num_layers=1, **options).decoder.layers[0].self_attention
        attention.load_state_dict(state, strict=False)
        leaf = x.clone().requires_grad_()
        pieces = [leaf[first:last] for first, last in zip(starts.tolist(), starts.tolist()[1:])]
        masks = [torch.ones(len(piece), len(piece), dtype=torch.bool).triu_(1)[None, None] for piece in pieces]
        whole = [attention(piece, mask, rotary_pos_emb=table[: len(piece)]) for piece, mask in zip(pieces, masks)]
        out = torch.cat([one for one, _ in whole])
        expected = results(attention, leaf, out, grad)
    assert (fused[0] - expected[0][rows]).abs().max() <= LOSS_BOUND
    assert (fused[1] - expected[1][rows]).abs().max() <= GRADIENT_BOUND
    for name, gradient in expected[2].items():
        assert (fused[2][name] - gradient).abs().max() <= 10 * GRADIENT_BOUND, name


def refuses(options, length, tensor_parallel):
    """The error of a model that native refuses too."""
    world = dist.get_world_size() // tensor_parallel
    with groups(world, tensor_parallel):
        try:
            run(build(world, tensor_parallel, **options), world, length)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
    return None


def native_without_ulysses(options):
    """What stays native, the local attention refuses."""
    with groups(dist.get_world_size()):
        try:
            build(dist.get_world_size(), **options)
        except AssertionError as error:
            return str(error)
    return None


def made_in_inference_mode(options):
    """A model that never saw autograd, which what the policy compares needs."""
    world = dist.get_world_size()
    with groups(world), torch.inference_mode():
        model = build(world, **options)
        tokens = torch.arange(8).repeat(BATCH, 1) + dist.get_rank()
        places = torch.arange(8).repeat(BATCH, 1)
        with without("projections", "output"):
            native = model(tokens, places, None)
        assert torch.equal(model(tokens, places, None), native)
        return num_fused_shapes("projections"), num_fused_shapes("output")
