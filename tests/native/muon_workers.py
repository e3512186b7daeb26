"""Bodies that run on gloo ranks: a tiny GPT with ``--optimizer muon`` and ``dist_muon``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def _model(num_experts=None):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from ditron_train.testing.megatron_cpu import CPU_CONFIG

    options = {"num_moe_experts": num_experts, "moe_router_topk": 2, "add_bias_linear": False} if num_experts else {}
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, params_dtype=torch.float32,
        **{**CPU_CONFIG, **options},
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False)
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=16)


def _optimizer(model, layer_wise, clip_grad):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=False), model)
    config = OptimizerConfig(
        optimizer="muon", lr=0.01, min_lr=0.0, weight_decay=0.1, clip_grad=clip_grad, muon_use_nesterov=True, bf16=False
    )
    return wrapped, get_megatron_muon_optimizer(config, [wrapped], layer_wise_distributed_optimizer=layer_wise)


def _train(layer_wise, num_steps, num_experts, clip_grad=0.0):
    from ditron_train.testing import megatron_cpu

    megatron_cpu.seed(1)
    model = _model(num_experts)
    wrapped, optimizer = _optimizer(model, layer_wise, clip_grad)
    losses = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 64, (2, 16), generator=generator)
        positions = torch.arange(16).expand(2, 16)
        mask = torch.triu(torch.ones(1, 1, 16, 16), 1).bool()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss = wrapped(tokens, positions, mask, labels=tokens).mean()
        loss.backward()
        wrapped.finish_grad_sync()
        successful, _, _ = optimizer.step()
        assert successful
        losses.append(float(loss.detach()))
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses, optimizer


def muon_and_dist_muon_agree(num_steps, num_experts, sharding):
    """Whole and layer-wise optimizers give equal weights; returns what each rank owns and the losses.

    Gradients are not clipped: the norm of a sharded model sums in another order than that of a whole one, natively too.
    """
    import ditron_train.megatron as plugin
    from ditron_train.megatron.muon import DitronLayerWiseDistributedOptimizer, DitronTensorParallelMuon
    from ditron_train.testing import megatron_cpu

    os.environ["DITRON_MUON_SHARDING"] = sharding
    with megatron_cpu.megatron_on_cpu(), megatron_cpu.model_parallel():
        plugin.apply(features="muon")
        try:
            whole, losses, optimizer = _train(False, num_steps, num_experts)
            assert isinstance(optimizer.chained_optimizers[0].optimizer, DitronTensorParallelMuon)
            sharded, sharded_losses, optimizer = _train(True, num_steps, num_experts)
            assert isinstance(optimizer, DitronLayerWiseDistributedOptimizer)
        finally:
            plugin.restore()
            del os.environ["DITRON_MUON_SHARDING"]
    different = [name for name in whole if not torch.equal(whole[name], sharded[name])]
    owned = sum(len(o.optimizer.state) for o in optimizer.chained_optimizers)
    return different, losses == sharded_losses, losses, owned, len(whole)


def restore_brings_native_back():
    """After restore, native refuses again where emerging_optimizers is missing."""
    import ditron_train.megatron as plugin
    from megatron.core.optimizer import muon as native

    from ditron_train.testing import megatron_cpu

    before = native.TensorParallelMuon, native.HAVE_EMERGING_OPTIMIZERS
    with megatron_cpu.megatron_on_cpu(), megatron_cpu.model_parallel():
        plugin.apply(features="muon")
        plugin.apply(features="muon")
        during = native.TensorParallelMuon.__name__, native.HAVE_EMERGING_OPTIMIZERS
        plugin.restore()
    return during, (native.TensorParallelMuon, native.HAVE_EMERGING_OPTIMIZERS) == before


def clipped_gradients_keep_native_ownership(num_steps):
    """With clipping the owners are those that megatron-core's own wrapper chooses, rank by rank."""
    import ditron_train.megatron as plugin
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    from ditron_train.megatron.muon import DitronLayerWiseDistributedOptimizer
    from ditron_train.testing import megatron_cpu

    with megatron_cpu.megatron_on_cpu(), megatron_cpu.model_parallel():
        plugin.apply(features="muon")
        try:
            ours, losses, optimizer = _train(True, num_steps, None, clip_grad=0.5)
            shard_params = DitronLayerWiseDistributedOptimizer.shard_params
            try:  # the same steps with native's sharding and native's gather at the end
                del DitronLayerWiseDistributedOptimizer.shard_params
                DitronLayerWiseDistributedOptimizer._matrix_ids = DitronLayerWiseDistributedOptimizer._dense_ids = frozenset()
                DitronLayerWiseDistributedOptimizer._group_of = {}
                DitronLayerWiseDistributedOptimizer.allgather_params, saved = (
                    LayerWiseDistributedOptimizer.broadcast_params,
                    DitronLayerWiseDistributedOptimizer.allgather_params,
                )
                native, native_losses, _ = _train(True, num_steps, None, clip_grad=0.5)
            finally:
                DitronLayerWiseDistributedOptimizer.shard_params = shard_params
                DitronLayerWiseDistributedOptimizer.allgather_params = saved
                for name in ("_matrix_ids", "_dense_ids", "_group_of"):
                    delattr(DitronLayerWiseDistributedOptimizer, name)
        finally:
            plugin.restore()
    return [name for name in ours if not torch.equal(ours[name], native[name])], losses == native_losses
