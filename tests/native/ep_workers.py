"""What the workers of the MoE tests run: megatron-core's MoE layer, native and with ``ep``, the same weights and
tokens."""

from __future__ import annotations

import contextlib
import functools
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ditron_train.cpu import megatron_shim as megatron_cpu
from ditron_train.runtime import logs
from tests.support.megatron_version import build_of
from tests.support.small_tiles import two_chunks

BASE = dict(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=48,
    moe_ffn_hidden_size=24,
    num_attention_heads=4,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall",
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func=F.silu,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


@contextlib.contextmanager
def groups(**sizes):
    """Megatron on gloo with those sizes."""
    from megatron.core import parallel_state

    with megatron_cpu.megatron_on_cpu(), two_chunks():
        parallel_state.initialize_model_parallel(**sizes)
        megatron_cpu.seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def groups_of_layers():
    """Layers of a caller with groups of its own, while Megatron's know no expert parallelism: native, patched, by a
    spec; whether each has the caller's groups, and its local experts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    import ditron_train.megatron as plugin

    found = []
    with groups():
        own = ProcessGroupCollection.use_mpu_process_groups()
        own.ep = own.tp_ep = dist.new_group(list(range(dist.get_world_size())))
        config = TransformerConfig(
            **{**megatron_cpu.CPU_CONFIG, **BASE, "expert_model_parallel_size": dist.get_world_size()}
        )
        for how in ("native", "patched", "spec"):
            spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
            if how != "native":
                spec = plugin.apply(spec if how == "spec" else None, "ep") or spec
            try:
                layer = build_of(spec, config=config, layer_number=1, pg_collection=own)
            finally:
                plugin.restore()
            found.append((type(layer.mlp).__qualname__, layer.mlp.ep_group is own.ep, layer.mlp.num_local_experts))
    return found


def build(options, fused, through_spec=False):
    """A MoE layer, native or with our dispatcher; equal weights either way."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig

    import ditron_train.megatron as plugin

    megatron_cpu.seed(1)
    options = dict(options)  # the last two are refused without FP8, which needs a GPU, and Transformer Engine
    late = {name: options.pop(name, False) for name in ("moe_router_padding_for_quantization", "moe_permute_fusion")}
    config = TransformerConfig(
        **{**megatron_cpu.CPU_CONFIG, **BASE, "expert_model_parallel_size": dist.get_world_size(), **options}
    )
    vars(config).update(late)
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    if not fused:
        return build_of(spec, config=config, layer_number=1)
    if through_spec:
        spec = plugin.apply(spec, "ep")
    else:
        plugin.apply(features="ep")
    try:
        return build_of(spec, config=config, layer_number=1)
    finally:
        plugin.restore()


def run_layer(layer, x, grad):
    """Output and all gradients of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    output, _ = layer(x)
    output.backward(grad)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    return output.detach(), x.grad, gradients


def assert_equal(native, fused):
    """Bit for bit."""
    assert torch.equal(native[0], fused[0]), (native[0] - fused[0]).abs().max()
    assert torch.equal(native[1], fused[1]), (native[1] - fused[1]).abs().max()
    assert native[2].keys() == fused[2].keys()
    for name, gradient in native[2].items():
        other = fused[2][name]
        assert (gradient is None) == (other is None) and (gradient is None or torch.equal(gradient, other)), name


def sizes_of(options):
    """Group sizes in `options`; all ranks in one expert-parallel group unless they say otherwise."""
    names = ("expert_model_parallel_size", "tensor_model_parallel_size", "expert_tensor_parallel_size")
    return {"expert_model_parallel_size": dist.get_world_size(), **{n: options[n] for n in names if n in options}}


@contextlib.contextmanager
def uneven_collectives():
    """Gathers and reduce-scatters of uneven parts, which gloo refuses and megatron-core asks for."""
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    def gather(parts, mine, group=None, async_op=False):
        if len({part.shape for part in parts}) == 1:
            return all_gather(parts, mine, group=group, async_op=async_op)
        assert not async_op
        parts[dist.get_rank(group)].copy_(mine)
        for source, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, group_src=source, group=group)

    def scatter(mine, parts, group=None):
        for rank, part in enumerate(parts):
            summed = part.clone()
            if part.numel():
                dist.all_reduce(summed, group=group)
            if rank == dist.get_rank(group):
                mine.copy_(summed)

    dist.all_gather, dist.reduce_scatter = gather, scatter
    try:
        yield
    finally:
        dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def sliced_layers_agree(options, tokens_by_rank, dtype, in_any_place=2):
    """``layers_agree`` where experts are split over tensor parallel ranks; of more than ``in_any_place`` rows are
    stored as natively."""
    from ditron_train.megatron.ep import gather as ep_gather

    before, ep_gather._RANKS_IN_ANY_PLACE = ep_gather._RANKS_IN_ANY_PLACE, in_any_place
    try:
        with uneven_collectives():
            layers_agree(options, tokens_by_rank, dtype)
    finally:
        ep_gather._RANKS_IN_ANY_PLACE = before


@contextlib.contextmanager
def lines_logged():
    """What rank 0 logs meanwhile, as if nothing had been logged before; empty on the others."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ditron_train")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logs._seen.clear()
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def said_of(options):
    """What rank 0 logs of a MoE layer with those options, native and fused having agreed."""
    with lines_logged() as lines:
        layers_agree(options, (8,) * dist.get_world_size(), torch.bfloat16, expect_fused=None)
    return lines


@contextlib.contextmanager
def two_nodes():
    """Half of the ranks pose as another node, and tokens go along rails."""
    os.environ["NCCL_HOSTID"] = str(2 * dist.get_rank() // dist.get_world_size())
    os.environ["DITRON_EP_RAILS"] = "on"
    try:
        yield
    finally:
        del os.environ["NCCL_HOSTID"], os.environ["DITRON_EP_RAILS"]


def layers_agree_over_two_nodes(options, tokens_by_rank, dtype):
    """``layers_agree`` over two nodes; how many of them the contexts know."""
    from ditron_train.ep import rails

    with two_nodes():
        layers_agree(options, tokens_by_rank, dtype)
        return {context.num_nodes for context in rails._contexts.values() if context is not None}


def native_over_two_nodes(function, *arguments):
    """Why a layer of ``function``, which returns that, ends native over two nodes; what the log says of it."""
    with two_nodes(), lines_logged() as lines:
        reason = function(*arguments)
    return reason, [line for line in lines if "native" in line]


def layers_agree(options, tokens_by_rank, dtype, through_spec=False, expect_fused=True):
    """Two steps, native and fused; ``expect_fused`` says whether the fused path moves the tokens (None: whichever
    does)."""
    from ditron_train.megatron.ep.dispatcher import DitronMoEAlltoAllTokenDispatcher

    options = {**options, "params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    torch.use_deterministic_algorithms(True)
    try:
        with groups(**sizes_of(options)):
            native, fused = build(options, False), build(options, True, through_spec)
            assert [n for n, _ in native.named_parameters()] == [n for n, _ in fused.named_parameters()]
            assert all(torch.equal(a, b) for a, b in zip(native.parameters(), fused.parameters()))
            if expect_fused is not None:
                assert isinstance(fused.token_dispatcher, DitronMoEAlltoAllTokenDispatcher)
            for step in range(2):
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                shape = (tokens_by_rank[dist.get_rank()], 1, BASE["hidden_size"])
                x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
                assert_equal(run_layer(native, x, grad), run_layer(fused, x, grad))
                if expect_fused is not None:
                    assert (fused.token_dispatcher.ep_context is not None) == expect_fused
    finally:
        torch.use_deterministic_algorithms(False)


def inputs_of_shared_experts(options):
    """Through which steps the gradient of the shared experts comes to the layer's input: natively, by the fused
    path."""
    found = []
    with groups(**sizes_of(options)):
        for is_fused in (False, True):
            layer, steps = build(options, is_fused), []
            begin = layer.shared_experts.pre_forward_comm

            def seen(given, begin=begin, steps=steps):
                node = given.grad_fn
                while type(node).__name__ != "MulBackward0":
                    steps.append(type(node).__name__)
                    node = node.next_functions[0][0]
                return begin(given)

            layer.shared_experts.pre_forward_comm = seen
            x = torch.randn(8, 1, BASE["hidden_size"], requires_grad=True)
            layer(x * 2)
            assert (getattr(layer.token_dispatcher, "ep_context", None) is not None) is is_fused
            found.append(steps)
    return found


def policy_is_asked_once(options=None):
    """The policy's run of both dispatchers, of which the interpreter compares nothing; its answer is kept."""
    from ditron_train.policy import gate

    options = {"params_dtype": torch.float32, "num_moe_experts": 8, **(options or {})}
    with groups(**sizes_of(options)), uneven_collectives():
        layer = build(options, True)
        probs = torch.rand(5 + dist.get_rank(), 8)
        given = torch.randn(len(probs), 1, BASE["hidden_size"]), probs > 0, probs
        answers = [layer.token_dispatcher._ask_policy(*given) for _ in range(2)]
        kept = len(gate.answers("ep"))
        gate.forget("ep")
        return answers, kept


def falls_back_when_memory_is_capped(options=None, capped_ranks=None):
    """A cap, of some ranks only if they are named, that holds the signals but not the rows: the call goes on natively,
    later ones start natively."""
    options = {"params_dtype": torch.float32, "num_moe_experts": 6, **(options or {})}
    if capped_ranks is not None and dist.get_rank() not in capped_ranks:
        os.environ.pop("DITRON_ARENA_BYTES")
    with groups(**sizes_of(options)), uneven_collectives():
        native, fused = build(options, False), build(options, True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            x, grad = (torch.randn(64, 1, BASE["hidden_size"], generator=generator) for _ in range(2))
            assert_equal(run_layer(native, x, grad), run_layer(fused, x, grad))
            assert fused.token_dispatcher.ep_context is None
    return fused.token_dispatcher._native_because


def memory_ends_between_two_forwards(capped_ranks):
    """A forward of few tokens by the fused path, one of more for which ``capped_ranks`` have no room, then both
    backward; why the fused path is native in the end."""
    options = {"params_dtype": torch.float32, "num_moe_experts": 8}
    with groups(**sizes_of(options)):
        layers = [build(options, which) for which in (False, True)]
        dispatcher = layers[1].token_dispatcher
        inputs = [torch.randn(n, 1, BASE["hidden_size"], requires_grad=True) for n in (4, 64)]
        outputs = []
        try:
            for x, is_fused in zip(inputs, (True, False)):
                outputs.append([layer(x)[0] for layer in layers])
                assert (dispatcher.ep_context is not None) == is_fused
                if dist.get_rank() in capped_ranks:
                    os.environ["DITRON_ARENA_BYTES"] = "500"
        finally:
            os.environ.pop("DITRON_ARENA_BYTES", None)
        for x, (native, fused) in zip(inputs, outputs):
            assert torch.equal(native, fused)
            grad = torch.randn_like(native)
            wanted, got = (torch.autograd.grad(output, x, grad) for output in (native, fused))
            assert torch.equal(*wanted, *got)
        return dispatcher._native_because


def routed_wider_than_topk(num_experts=BASE["num_moe_experts"], first=0):
    """A router of the user's that gives a token of the second step all experts from the ``first`` on, more than top-k;
    why the fused path is native in the end."""
    options = {"params_dtype": torch.float32, "num_moe_experts": num_experts}
    with groups(**sizes_of({})):
        native, fused = (build(options, which) for which in (False, True))
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(3):
            for layer in (native, fused):
                route = type(layer.router).forward
                layer.router.forward = functools.partial(_widened, route, layer.router, first if step == 1 else None)
            x, grad = (torch.randn(9, 1, BASE["hidden_size"], generator=generator) for _ in range(2))
            assert_equal(run_layer(native, x, grad), run_layer(fused, x, grad))
            assert (fused.token_dispatcher.ep_context is not None) == (step == 0)
        return fused.token_dispatcher._native_because


def _widened(route, router, first, *given):
    probs, routing_map = route(router, *given)
    if first is not None and dist.get_rank() == 0:
        routing_map = routing_map.clone()
        routing_map[0] = torch.arange(routing_map.shape[1]) >= first
    return probs, routing_map


def _dispatchers_agree(prepare, steps=2):
    """Steps of a layer, native and fused, which ``prepare(dispatcher)`` has before each; which contexts the fused path
    ran with."""
    contexts = []
    with groups(**sizes_of({})):
        native, fused = (build({"params_dtype": torch.bfloat16, "bf16": True}, which) for which in (False, True))
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(steps):
            prepare(fused.token_dispatcher, step)
            x, grad = (torch.randn(16, 1, BASE["hidden_size"], generator=generator).bfloat16() for _ in range(2))
            assert_equal(run_layer(native, x, grad), run_layer(fused, x, grad))
            contexts.append(fused.token_dispatcher.ep_context is not None)
    return contexts, fused.token_dispatcher


def experts_wrapped_after_their_capacity():
    """A capacity that was decided for other experts than are there when the layer is called: exact sizes, from then
    on."""
    torch.use_deterministic_algorithms(True)

    def decide(dispatcher, step):
        assert dispatcher._capacity.factor is None
        dispatcher._capacity.factor = 4.0 if step == 0 else None

    try:
        contexts, dispatcher = _dispatchers_agree(decide)
    finally:
        torch.use_deterministic_algorithms(False)
    return contexts, dispatcher._capacity.factor


def captured_calls():
    """The first and the last of three calls are made in a capture, which is pretended."""
    from ditron_train.megatron.ep import dispatcher as ep

    torch.use_deterministic_algorithms(True)
    captures = iter([True, False, True])

    def pretend(dispatcher, step):
        is_capturing = next(captures)
        ep.is_capturing = lambda device: is_capturing

    before = ep.is_capturing
    try:
        return _dispatchers_agree(pretend, steps=3)[0]
    finally:
        ep.is_capturing = before
        torch.use_deterministic_algorithms(False)


def captured_numbers_of_tokens(options):
    """Calls of 16 and of 24 tokens, then the same and a third number in a capture, which is pretended; whether the
    fused path moved the tokens of each."""
    from ditron_train.ep import context as rooms
    from ditron_train.megatron.ep import dispatcher as ep

    is_capturing, moved = False, []
    before = ep.is_capturing
    torch.use_deterministic_algorithms(True)
    try:
        ep.is_capturing = rooms.is_capturing = lambda device: is_capturing
        with groups(**sizes_of({})):
            native, fused = (build({"params_dtype": torch.float32, **options}, which) for which in (False, True))
            fused.token_dispatcher.asks_policy = False
            for call, num_tokens in enumerate((16, 24, 16, 20, 24, 20)):
                is_capturing = 2 <= call < 5
                generator = torch.Generator().manual_seed(num_tokens + dist.get_rank())
                x, grad = (torch.randn(num_tokens, 1, BASE["hidden_size"], generator=generator) for _ in range(2))
                assert_equal(run_layer(native, x, grad), run_layer(fused, x, grad))
                moved.append(fused.token_dispatcher.ep_context is not None)
    finally:
        ep.is_capturing = rooms.is_capturing = before
        torch.use_deterministic_algorithms(False)
    return moved


def gpt(config, *, te=False, vocabulary=64, sequence=16):
    """A GPT of that configuration, its weights from a seed."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=te)
    megatron_cpu.seed(3)
    return GPTModel(config, spec, vocabulary, sequence, position_embedding_type="rope")


def combined_steps(model, num_microbatches, device="cpu"):
    """Losses and gradients of microbatches whose forward passes run beside the backward pass of the one before."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams

    set_streams()
    sequence, losses, behind = model.max_sequence_length, [], None
    mask = torch.ones(1, 1, sequence, sequence, device=device).triu(1).bool()
    for micro in range(num_microbatches + 1):
        plan = None
        if micro < num_microbatches:
            generator = torch.Generator().manual_seed(10 * micro + dist.get_rank())
            tokens = torch.randint(0, model.vocab_size, (1, sequence), generator=generator).to(device)
            plan = model.build_schedule_plan(
                tokens, torch.arange(sequence, device=device)[None], mask, labels=tokens.roll(1)
            )
        grad = None if behind is None else torch.ones(1, sequence, device=device)
        loss = TransformerModelChunkSchedulePlan.run(plan, behind, b_grad=grad)
        losses += [] if plan is None else [loss.detach()]
        behind = plan
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) > num_microbatches
    model.zero_grad()
    return [*losses, *gradients]


#: A configuration whose MoE layers run in pieces, beside those of another microbatch.
COMBINED = dict(num_layers=3, overlap_moe_expert_parallel_comm=True, moe_layer_freq=[0, 1, 1])


def whole_step(model, device="cpu"):
    """Loss and gradients of one microbatch, forward and backward as ever."""
    sequence = model.max_sequence_length
    mask = torch.ones(1, 1, sequence, sequence, device=device).triu(1).bool()
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, model.vocab_size, (1, sequence), generator=generator).to(device)
    loss = model(tokens, torch.arange(sequence, device=device)[None], mask, labels=tokens.roll(1))
    loss.backward(torch.ones_like(loss))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [loss.detach(), *gradients]


def with_and_without_plans(native, fused, num_microbatches=3, device="cpu"):
    """Of a whole step, of schedule plans, and of a whole step again: which losses and gradients differ, and whether
    the dispatchers of the MoE layers ran the fused path."""
    found = []
    steps = (whole_step, functools.partial(combined_steps, num_microbatches=num_microbatches), whole_step)
    for step in steps:
        results = [step(model, device=device) for model in (native, fused)]
        wrong = [index for index, (a, b) in enumerate(zip(*results)) if not torch.equal(a, b)]
        dispatchers = [layer.mlp.token_dispatcher for layer in fused.decoder.layers[1:]]
        found.append((wrong, {dispatcher.ep_context is not None for dispatcher in dispatchers}))
    return found


@contextlib.contextmanager
def schedule_models(**options):
    """GPTs of the combined schedule in PyTorch's deterministic mode, native and with ``ep``, applied inside."""
    from megatron.core.transformer import TransformerConfig

    import ditron_train.megatron as plugin

    fields = {
        **megatron_cpu.CPU_CONFIG, **BASE, **COMBINED, "params_dtype": torch.bfloat16, "bf16": True,
        "moe_shared_expert_intermediate_size": 24, "expert_model_parallel_size": dist.get_world_size(), **options,
    }  # fmt: skip
    torch.use_deterministic_algorithms(True)
    try:
        with groups(expert_model_parallel_size=dist.get_world_size()):
            native = gpt(TransformerConfig(**fields)).bfloat16()
            plugin.apply(features="ep")
            try:
                yield native, gpt(TransformerConfig(**fields)).bfloat16()
            finally:
                plugin.restore()
    finally:
        torch.use_deterministic_algorithms(False)


def schedule_without_its_flag():
    """``with_and_without_plans`` with overlap_moe_expert_parallel_comm off, as of a caller who builds plans
    himself."""
    with schedule_models(overlap_moe_expert_parallel_comm=False) as models:
        return with_and_without_plans(*models)


def combined_schedule(num_microbatches, **options):
    """Which losses and gradients differ, and how the dispatchers of the MoE layers ran."""
    import ditron_train.megatron as plugin

    with schedule_models(**options) as (native, fused):
        plugin.restore()  # layers that were built stay fused
        results = [combined_steps(model, num_microbatches) for model in (native, fused)]
        dispatchers = [layer.mlp.token_dispatcher for layer in fused.decoder.layers[1:]]
    wrong = [index for index, (a, b) in enumerate(zip(*results)) if not torch.equal(a, b)]
    return wrong, [(d.ep_context is not None, d._pairs == frozenset()) for d in dispatchers]


def slices_without_room(options, tokens_by_rank):
    """``sliced_layers_agree`` where no buffer of the slices fits; how often one was asked for, and what was logged."""
    from ditron_train.megatron.ep import gather
    from ditron_train.runtime.errors import ArenaError

    asked, before = [], gather.start

    def refused(rows, context, sum_dtype):
        asked.append(len(rows))
        raise ArenaError(f"no room for {len(rows)} rows")

    gather.start = refused
    try:
        with lines_logged() as lines:
            sliced_layers_agree(options, tokens_by_rank, torch.bfloat16)
    finally:
        gather.start = before
    return len(asked), [line for line in lines if "ep slices" in line]


def gathered_layers_agree(options, num_tokens, dtype, steps=2):
    """Steps of a layer with the allgather dispatcher, native and fused; whether the fused path moved the tokens."""
    from ditron_train.megatron.ep.gathered_dispatcher import DitronMoEAllGatherTokenDispatcher

    options = {
        "moe_token_dispatcher_type": "allgather", "params_dtype": dtype, "bf16": dtype == torch.bfloat16, **options,
    }  # fmt: skip
    hidden = options.get("hidden_size", BASE["hidden_size"])
    torch.use_deterministic_algorithms(True)
    try:
        with groups(**sizes_of(options)):
            native, fused = build(options, False), build(options, True)
            assert type(fused.token_dispatcher) is DitronMoEAllGatherTokenDispatcher
            moved = []
            for step in range(steps):
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                x, grad = (torch.randn(num_tokens, 1, hidden, generator=generator).to(dtype) for _ in range(2))
                assert_equal(run_layer(native, x, grad), run_layer(fused, x, grad))
                moved.append(fused.token_dispatcher.ep_context is not None)
            return moved, fused.token_dispatcher._native_because
    finally:
        torch.use_deterministic_algorithms(False)


def slices_of_experts(options, tokens_by_rank):
    """``sliced_layers_agree``; how often copy engines moved slices' rows."""
    from ditron_train.megatron.ep import gather

    calls, before = [], gather.scatter_rows

    def counted(rows, call):
        calls.append(call)
        return before(rows, call)

    gather.scatter_rows = counted
    try:
        sliced_layers_agree(options, tokens_by_rank, torch.bfloat16)
    finally:
        gather.scatter_rows = before
    return len(calls)
