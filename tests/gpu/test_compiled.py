"""Transformer layers and pipeline messages in code that torch.compile has compiled: native's bits, forward and
backward."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

#: So few tokens that native's attention scores, [b * heads, s, s], fit into the buffer that native's gather has made:
#: in a graph it would be made of the graph's memory, and native's next gather into it is an error.
HIDDEN, TOKENS = 1024, 256
STEPS = 4  # of CUDA graphs: one to warm up, one that is captured, replays
NUM_MESSAGES = 20  # more than there are slots: the last ones are copied when the receiver has taken the first


@pytest.fixture(autouse=True)
def _wherever_bits_are_equal(monkeypatch):
    monkeypatch.setenv("DITRON_POLICY", "bits")
    yield
    torch.compiler.reset()


@pytest.fixture
def tensor_parallel(device, nccl):
    """Megatron's groups: tensor parallel over all ranks."""
    from megatron.core import parallel_state

    import ditron_train.megatron
    from ditron_train.cpu import megatron_shim as megatron_cpu
    from ditron_train.policy import gate

    if dist.get_world_size() == 1:
        pytest.skip("needs at least 2 GPUs")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    megatron_cpu.allow_torch_norm_with_sequence_parallel()
    yield
    ditron_train.megatron.restore()
    gate.forget()
    megatron_cpu.uninstall()
    parallel_state.destroy_model_parallel()


def _layer(use_te: bool, fused: bool) -> torch.nn.Module:
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    import ditron_train.megatron
    from ditron_train.cpu import megatron_shim as megatron_cpu

    megatron_cpu.seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    if use_te:
        spec = specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    layer = build_module(ditron_train.megatron.apply(spec) if fused else spec, config=config, layer_number=1).cuda()
    if not fused:
        _end_graphs_at_parallel_layers(layer)
    return layer


def _end_graphs_at_parallel_layers(layer: torch.nn.Module) -> None:
    """As the fused path and Transformer Engine's do: what is between is the same compiled code then.

    Compiled themselves, native's take their collectives into graphs, of which each rank decides for itself what it
    computes anew in backward: on 2 GPUs one rank gathered twice more than the other, which waited for it for ever
    (torch 2.11).
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for module in layer.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.forward = torch.compiler.disable(module.forward)


def _step(layer: torch.nn.Module, mask: torch.Tensor | None, seed: int) -> dict[str, torch.Tensor]:
    """Output and all gradients of a forward and a backward."""
    generator = torch.Generator(device="cuda").manual_seed(100 * seed + dist.get_rank())
    shape = (TOKENS // dist.get_world_size(), 2, HIDDEN)
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    torch.compiler.cudagraph_mark_step_begin()
    layer.zero_grad()
    y, _ = layer(x.requires_grad_(), attention_mask=mask)
    y.backward(grad)
    found = {"y": y.detach(), "dx": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize("use_te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}], ids=["default", "graphs"])
def test_transformer_layer(tensor_parallel, all_equal, use_te, options, monkeypatch):
    """Both compiled alike: what is between parallel layers may be rounded in another way than uncompiled."""
    from ditron_train.policy import gate

    if use_te:
        pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    mask = None if use_te else torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="cuda").triu(1)[None, None]
    layers = [_layer(use_te, fused) for fused in (False, True)]
    for layer in layers:
        layer.compile(**options)
    for seed in range(STEPS if options else 2):
        native, fused = (_step(layer, mask, seed) for layer in layers)
        for name, expected in native.items():
            assert all_equal(fused[name], expected), (seed, name)
    answers = gate.answers("tp")
    assert len(answers) == 4 and all(answer.context is not None for answer in answers)


def test_messages_that_later_replays_overwrite(device, all_equal, nccl):
    """The first rank sends what a replay has made, and replays at once; the second one receives late."""
    if dist.get_world_size() != 2:
        pytest.skip("has two stages")
    from megatron.core.transformer import TransformerConfig

    from ditron_train.megatron.pp.communicator import DitronP2PCommunicator
    from ditron_train.pp import close_pipeline_contexts

    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.bfloat16,
    )
    communicator = DitronP2PCommunicator(dist.group.WORLD, config)
    make = torch.compile(lambda x: x * 2 + 1, mode="reduce-overhead")
    start, received = (
        torch.arange(1 << 20, device="cuda").remainder(64).bfloat16(),
        [],
    )  # exact, and no two messages are alike
    for _ in range(STEPS):
        make(start)
    torch.cuda.synchronize()
    dist.barrier()
    for index in range(NUM_MESSAGES):
        if index == 1 and dist.get_rank() == 1:  # the first one meets the other rank
            time.sleep(0.3)
        sent = make(start + index) if dist.get_rank() == 0 else None
        tensor, _, _ = communicator._communicate(
            tensor_send_next=sent,
            tensor_send_prev=None,
            recv_prev=dist.get_rank() == 1,
            recv_next=False,
            tensor_shape=start.shape,
        )
        received.append(tensor)
    for index, tensor in enumerate(received):
        expected = (start + index) * 2 + 1
        assert all_equal(expected if tensor is None else tensor.detach(), expected), index
    received.clear()
    dist.barrier()
    close_pipeline_contexts()
