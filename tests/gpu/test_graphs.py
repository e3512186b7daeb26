"""Megatron's CUDA graphs with each feature on: steps of a small GPT whose layers, or whole iterations, are captured by
Megatron's own code, bit for bit those of Megatron's layers captured alike.

Where a room is covered, its calls are counted while a graph is captured.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

LENGTH, HIDDEN, NUM_MICROBATCHES, NUM_STEPS = 1024, 1024, 2, 4


@pytest.fixture(autouse=True)
def _alone(device, nccl, monkeypatch):
    """Decided without timing; attention adds up gradients in one order."""
    if dist.get_world_size() != 2:
        pytest.skip("of two ranks")
    monkeypatch.setenv("DITRON_POLICY", "bits")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


@pytest.fixture
def calls(monkeypatch):
    """``calls.captured`` and ``calls.eager``: ops of the fused path, by name, in a capture and outside of one."""
    from types import SimpleNamespace

    from ditron_train.stream.op_context import OpContext

    seen, enter = SimpleNamespace(captured=[], eager=[]), OpContext.enter

    def entered(self, op="op", *details):
        (seen.captured if torch.cuda.is_current_stream_capturing() else seen.eager).append(op)
        return enter(self, op, *details)

    monkeypatch.setattr(OpContext, "enter", entered)
    return seen


@contextlib.contextmanager
def _world(**sizes):
    """Megatron's groups, generators that graphs can capture, microbatches counted; no graph is left of it."""
    from megatron.core import full_cuda_graph, num_microbatches_calculator, parallel_state
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import cuda_graphs

    import ditron_train.megatron
    from ditron_train.cpu import megatron_shim

    megatron_shim.allow_torch_norm_with_sequence_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    data_parallel = parallel_state.get_data_parallel_world_size()
    num_microbatches_calculator.init_num_microbatches_calculator(
        dist.get_rank(), None, NUM_MICROBATCHES * data_parallel, 1, data_parallel
    )

    def seed():
        model_parallel_cuda_manual_seed(5, te_rng_tracker=HAVE_TE, use_cudagraphable_rng=True, force_reset_rng=True)

    stream = torch.cuda.current_stream()
    try:
        yield seed
    finally:
        torch.cuda.synchronize()
        torch.cuda.set_stream(stream)
        ditron_train.megatron.restore()
        _forget_graphs(cuda_graphs, full_cuda_graph)
        num_microbatches_calculator.unset_num_microbatches_calculator()
        megatron_shim.uninstall()
        parallel_state.destroy_model_parallel()


def _forget_graphs(cuda_graphs, full_cuda_graph):
    """Also that a graph is being captured, which stays said where a capture fails."""
    cuda_graphs._set_capture_end()
    if cuda_graphs.HAVE_TE_GRAPHS:
        cuda_graphs.te_set_capture_end()
    cuda_graphs.delete_cuda_graphs()
    wrapper, loader = full_cuda_graph.FullCudaGraphWrapper, full_cuda_graph.StaticBufferLoader
    for stage in ("training", "validation"):
        wrapper.curr_iteration[stage], wrapper.cuda_graph[stage], wrapper.result[stage] = 0, None, None
        loader.static_buffers[stage] = []
    gc.collect()


def _model(use_te, options):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig

    settings = dict(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=8, add_bias_linear=False, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, bf16=True, normalization="RMSNorm", gradient_accumulation_fusion=False,
        attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False, deterministic_mode=True, finalize_model_grads_func=finalize_model_grads,
        cuda_graph_warmup_steps=2,
    )  # fmt: skip
    config = TransformerConfig(**{**settings, **options})
    if use_te:
        spec = specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config, spec, vocab_size=2048, max_sequence_length=LENGTH, position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).cuda()  # fmt: skip
    # As in Megatron's get_model: autograd adds up gradients on the stream of this moment, and a wait of the default
    # stream for a captured one breaks the capture.
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        wrapped = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=False), model
        )
    current.wait_stream(side)
    return wrapped


def _batches(step, use_te):
    """What the iterator of one step gives; the ranks of a data parallel group have other tokens each."""
    from megatron.core import parallel_state

    mask = None if use_te else torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)[None, None]
    parts, part = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    for index in range(NUM_MICROBATCHES):
        source = parallel_state.get_data_parallel_rank() if parts == 1 else 0
        generator = torch.Generator().manual_seed(1000 * step + 10 * index + source)
        tokens = torch.randint(0, 2048, (1, LENGTH + 1), generator=generator).cuda()
        share = torch.arange(LENGTH, device="cuda").chunk(parts)[part]
        batch = {"tokens": tokens[:, share], "labels": tokens[:, share + 1], "positions": share[None]}
        yield batch if mask is None else {**batch, "mask": mask}


def _forward_step(iterator, model):
    batch = next(iterator)
    loss = model(batch["tokens"], batch["positions"], batch.get("mask"), labels=batch["labels"])
    return loss, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})


def _train(seed, impl, scope, *, use_te=True, **options):
    """Losses of every step and gradients of the last two, with Megatron's graphs of this kind."""
    from megatron.core import full_cuda_graph
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import cuda_graphs

    seed()
    model = _model(use_te, dict(cuda_graph_impl=impl, cuda_graph_scope=scope, **options))
    config, helper = model.module.config, None
    run = get_forward_backward_func()
    if scope == ["full_iteration"]:
        run = full_cuda_graph.FullCudaGraphWrapper(run, cuda_graph_warmup_steps=2)
    if impl == "transformer_engine":
        helper = cuda_graphs.TECudaGraphHelper([model], config, LENGTH, 1)
    found = []
    for step in range(NUM_STEPS):
        if helper is not None and step == 2:
            helper.create_cudagraphs()
        model.zero_grad_buffer()
        batches = list(_batches(step, use_te))
        torch.cuda.synchronize()  # Megatron's StaticBufferLoader copies them on a stream that waits for nothing
        losses = run(
            forward_step_func=_forward_step, data_iterator=iter(batches), model=[model],
            num_microbatches=NUM_MICROBATCHES, seq_length=LENGTH, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        torch.cuda.synchronize()
        found += [loss["loss"].clone() for loss in losses]
        with torch.no_grad():
            for parameter in model.parameters():
                if step > NUM_STEPS - 3:
                    found.append(parameter.main_grad.clone())
                parameter.add_(parameter.main_grad.to(parameter.dtype), alpha=-0.01)
    _forget_graphs(cuda_graphs, full_cuda_graph)
    torch.cuda.set_stream(torch.cuda.default_stream())
    return found


def _compare(all_equal, calls, room, sizes, impl, scope, **options):
    import ditron_train.megatron
    from ditron_train.policy import gate

    options = {**sizes, **options}
    with _world(**sizes) as seed:
        native = _train(seed, impl, scope, **options)
        assert not calls.captured and not calls.eager
        gate.forget()
        ditron_train.megatron.apply(features=(room,))
        fused = _train(seed, impl, scope, **options)
    assert len(native) == len(fused)
    # One verdict: stages of a pipeline have other numbers of tensors.
    different = [index for index, (one, other) in enumerate(zip(native, fused)) if not torch.equal(one, other)]
    assert all_equal(torch.tensor(len(different)), torch.tensor(0)), different


def _needs_te():
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        pytest.skip("needs Transformer Engine")


@pytest.mark.parametrize(
    "impl, scope, use_te",
    [
        ("local", "full", True),
        ("local", ["full_iteration"], False),
        ("transformer_engine", "full", True),
        ("transformer_engine", ["attn"], True),
    ],
    ids=str,
)
def test_tensor_parallel_layers_in_graphs(all_equal, calls, impl, scope, use_te):
    if use_te:
        _needs_te()
    sizes = dict(tensor_model_parallel_size=2)
    _compare(all_equal, calls, "tp", sizes, impl, scope, use_te=use_te, sequence_parallel=True)
    assert {"ag_gemm", "gemm_rs"} <= set(calls.captured)


@pytest.mark.parametrize("impl, scope", [("local", "full"), ("transformer_engine", ["attn"])], ids=str)
def test_ulysses_in_graphs(all_equal, calls, impl, scope):
    _needs_te()
    options = dict(cp_comm_type="a2a", num_query_groups=4)
    _compare(all_equal, calls, "sp", dict(context_parallel_size=2), impl, scope, **options)
    assert calls.captured


def test_messages_between_stages_beside_graphs(all_equal, calls, monkeypatch):
    """1F1B with captured layers: what a stage sends is in buffers that the next replay overwrites."""
    from ditron_train.megatron.pp import communicator

    _needs_te()
    moved, exchange = [], communicator.exchange
    monkeypatch.setattr(communicator, "exchange", lambda *args, **named: moved.append(1) or exchange(*args, **named))
    sizes = dict(pipeline_model_parallel_size=2)
    _compare(all_equal, calls, "pp", sizes, "transformer_engine", "full", batch_p2p_comm=True)
    assert moved
