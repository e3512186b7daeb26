"""Bodies that run on gloo ranks: a tiny GPT with ``--optimizer muon`` and ``dist_muon``, natively and with
ditron_train."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist

from tests.support.megatron_version import is_newer_than_0_17
from tests.support.model_parallel import model_parallel


def _model(num_experts, bf16):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG

    options = {"num_moe_experts": num_experts, "moe_router_topk": 2, "add_bias_linear": False} if num_experts else {}
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        params_dtype=torch.bfloat16 if bf16 else torch.float32, bf16=bf16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        **{**CPU_CONFIG, **options},
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False)
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=16)
    return model.bfloat16() if bf16 else model


def _build(layer_wise, num_experts=None, **options):
    """A model, wrapped for data parallelism, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    from ditron_train.cpu import megatron_shim as megatron_cpu

    megatron_cpu.seed(1)
    if is_newer_than_0_17() and "muon_use_nesterov" in options:
        options["muon_nesterov"] = options.pop("muon_use_nesterov")
    model = _model(num_experts, options.get("bf16", False))
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=False), model
    )
    config = OptimizerConfig(
        **{
            **dict(
                optimizer="dist_muon" if layer_wise else "muon",
                lr=0.01,
                min_lr=0.0,
                weight_decay=0.1,
                clip_grad=0.0,
                bf16=False,
            ),
            **options,
        }
    )
    return wrapped, get_megatron_muon_optimizer(config, [wrapped], layer_wise_distributed_optimizer=layer_wise)


def _run(wrapped, optimizer, steps):
    """Losses of these steps; each step has data of its own."""
    from megatron.core import parallel_state

    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
        tokens = torch.randint(0, 64, (2, 16), generator=generator)
        mask = torch.triu(torch.ones(1, 1, 16, 16), 1).bool()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss = wrapped(tokens, torch.arange(16).expand(2, 16), mask, labels=tokens).mean()
        loss.backward()
        wrapped.finish_grad_sync()
        successful, _, _ = optimizer.step()
        assert successful
        losses.append(float(loss.detach()))
    return losses


def _weights(wrapped):
    return {name: p.detach().clone() for name, p in wrapped.module.named_parameters()}


def _train(layer_wise, num_experts=None, **options):
    """Weights by name, losses, the optimizer."""
    wrapped, optimizer = _build(layer_wise, num_experts, **options)
    losses = _run(wrapped, optimizer, range(4))
    return _weights(wrapped), losses, optimizer


def _different(weights, others):
    return [name for name in weights if not torch.equal(weights[name], others[name])]


def muon_and_dist_muon_agree(num_experts, sharding):
    """Whole and layer-wise optimizers give equal weights; returns what each rank owns and the losses.

    Gradients are not clipped: the norm of a sharded model sums in another order than that of a whole one, natively
    too.
    """
    import ditron_train.megatron as plugin
    from ditron_train.cpu import megatron_shim as megatron_cpu
    from ditron_train.megatron.muon.optimizer import DitronLayerWiseDistributedOptimizer, DitronTensorParallelMuon

    os.environ["DITRON_MUON_SHARDING"] = sharding
    with megatron_cpu.megatron_on_cpu(), model_parallel():
        plugin.apply(features="muon")
        try:
            bf16 = is_newer_than_0_17()  # since 0.18 fp32 is not sharded layer-wise, natively neither
            whole, losses, optimizer = _train(False, num_experts, bf16=bf16)
            assert isinstance(optimizer.chained_optimizers[0].optimizer, DitronTensorParallelMuon)
            sharded, sharded_losses, optimizer = _train(True, num_experts, bf16=bf16)
            assert isinstance(optimizer, DitronLayerWiseDistributedOptimizer)
        finally:
            plugin.restore()
            del os.environ["DITRON_MUON_SHARDING"]
    different = _different(whole, sharded)
    owned = sum(len(o.optimizer.state) for o in optimizer.chained_optimizers)
    return different, losses == sharded_losses, losses, owned, len(whole)


def data_that_is_replaced(num_ranks):
    """Parameters whose weights differ between ranks behind a step, where each got other memory before it, as those of
    an optimizer that is offloaded and brought back."""
    import ditron_train.megatron as plugin
    from ditron_train.cpu import megatron_shim as megatron_cpu
    from ditron_train.megatron.muon.optimizer import DitronLayerWiseDistributedOptimizer

    with megatron_cpu.megatron_on_cpu(), model_parallel():
        plugin.apply(features="muon")
        try:
            wrapped, optimizer = _build(True, bf16=is_newer_than_0_17())
            assert isinstance(optimizer, DitronLayerWiseDistributedOptimizer) and optimizer._rounds
            _run(wrapped, optimizer, range(1))
            for parameter in wrapped.module.parameters():
                parameter.data = parameter.data.clone()
            _run(wrapped, optimizer, range(1, 2))
            different = []
            for name, weight in _weights(wrapped).items():
                of_ranks = [torch.empty_like(weight) for _ in range(num_ranks)]
                dist.all_gather(of_ranks, weight)
                different += [name] * any(not torch.equal(weight, one) for one in of_ranks)
        finally:
            plugin.restore()
    return different


def how_matrices_are_dealt(sharding, tensor_parallel, options):
    """What the log says of it, and whether each rank owns what it owns natively."""
    import logging

    from ditron_train.cpu import emerging_optimizers
    from ditron_train.cpu import megatron_shim as megatron_cpu
    from ditron_train.runtime.logs import forget_decisions

    assert emerging_optimizers.install()
    import ditron_train.megatron as plugin

    def owned():
        wrapped, optimizer = _build(True, **options)
        names = {id(param): name for name, param in wrapped.module.named_parameters()}
        return [{names[id(param)] for param in params} for params in optimizer.dp_cp_params_list or ()]

    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ditron_train").addHandler(handler)
    logging.getLogger("ditron_train").setLevel(logging.INFO)
    forget_decisions()
    os.environ["DITRON_MUON_SHARDING"] = sharding
    with megatron_cpu.megatron_on_cpu(), model_parallel(tensor_model_parallel_size=tensor_parallel):
        native = owned()
        plugin.apply(features="muon")
        try:
            fused = owned()
        finally:
            plugin.restore()
            logging.getLogger("ditron_train").removeHandler(handler)
            del os.environ["DITRON_MUON_SHARDING"]
    return [line for line in lines if "dealt out" in line], fused == native


def _muon_class():
    """What Megatron builds for Muon now."""
    from ditron_train.megatron.compat.muon import muon_module, registered_muon

    entry = registered_muon()
    return muon_module().TensorParallelMuon if entry is None else entry["optimizer_cls"]


def restore_brings_native_back():
    """After restore, native refuses again where emerging_optimizers is missing."""
    import ditron_train.megatron as plugin
    from ditron_train.cpu import megatron_shim as megatron_cpu
    from ditron_train.megatron.compat.muon import availability_owner

    owner = availability_owner()
    before = _muon_class(), owner.HAVE_EMERGING_OPTIMIZERS
    with megatron_cpu.megatron_on_cpu(), model_parallel():
        plugin.apply(features="muon")
        plugin.apply(features="muon")
        during = _muon_class().__qualname__, owner.HAVE_EMERGING_OPTIMIZERS
        plugin.restore()
    return during, (_muon_class(), owner.HAVE_EMERGING_OPTIMIZERS) == before


def native_and_fused_agree(layer_wise, tensor_parallel, options):
    """megatron-core's own optimizer on the stand-in of emerging_optimizers, and the fused path: weights that differ,
    equal losses."""
    from ditron_train.cpu import emerging_optimizers
    from ditron_train.cpu import megatron_shim as megatron_cpu

    assert emerging_optimizers.install()
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    import ditron_train.megatron as plugin
    from ditron_train.megatron.muon.optimizer import DitronTensorParallelMuon

    with megatron_cpu.megatron_on_cpu(), model_parallel(tensor_model_parallel_size=tensor_parallel):
        gather = LayerWiseDistributedOptimizer.allgather_params
        LayerWiseDistributedOptimizer.allgather_params = LayerWiseDistributedOptimizer.broadcast_params
        try:  # gloo has no uneven all-gather; native keeps this one as its reference
            native, native_losses, optimizer = _train(layer_wise, **options)
        finally:
            LayerWiseDistributedOptimizer.allgather_params = gather
        assert not isinstance(optimizer.chained_optimizers[0].optimizer, DitronTensorParallelMuon)
        plugin.apply(features="muon")
        try:
            fused, losses, optimizer = _train(layer_wise, **options)
        finally:
            plugin.restore()
    is_covered = options.get("muon_tp_mode") != "distributed"
    assert isinstance(optimizer.chained_optimizers[0].optimizer, DitronTensorParallelMuon) == is_covered
    return _different(native, fused), native_losses == losses


def what_is_refused_runs_natively():
    """Types of the optimizers that constructors give, the log, and Megatron's error for steps that are none."""
    import logging

    from ditron_train.cpu import emerging_optimizers

    assert emerging_optimizers.install()
    import ditron_train.megatron as plugin
    from ditron_train.megatron.compat.muon import momentum_key

    native_class, lines = _muon_class(), []
    mode, momentum = ("tp_mode" if is_newer_than_0_17() else "mode"), momentum_key()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ditron_train").addHandler(handler)
    logging.getLogger("ditron_train").setLevel(logging.INFO)
    plugin.apply(features="muon")
    muon = _muon_class()
    matrix, cube = torch.nn.Parameter(torch.eye(4)), torch.nn.Parameter(torch.zeros(2, 4, 4))
    matrix.is_embedding_or_output_parameter = True
    cases = {
        "taken": dict(),
        "distributed": {mode: "distributed"},
        "polar_express": dict(coefficient_type="polar_express", num_ns_steps=8),
        "momentum": {momentum: 1.0},
        "split": dict(split_qkv=True),
        "steps": dict(num_ns_steps=7),
    }
    kinds = {name: type(muon([matrix], **case)) is native_class for name, case in cases.items()}
    kinds["cube"] = type(muon(iter([dict(params=[cube])]))) is native_class
    error = ""
    try:
        muon([matrix], num_ns_steps=0)
    except ValueError as raised:
        error = str(raised)
    fused = muon([matrix], lr=0.5, weight_decay=0.0)
    matrix.grad = torch.randn(4, 4)
    fused.step()
    states = set(fused.state[matrix])
    again = copy.deepcopy(fused)
    (copied,) = again.param_groups[0]["params"]
    copied.grad = matrix.grad.clone()
    fused.step()
    again.step()
    assert torch.equal(copied, matrix)
    generators = [
        len(muon([dict(params=iter([matrix, torch.nn.Parameter(torch.eye(4))]))], **case).param_groups[0]["params"])
        for case in ({mode: "distributed"}, {})
    ]
    given = [dict(params=[matrix], lr_mult=2.0)]
    groups = [sorted(muon(given, **case).param_groups[0]) for case in ({mode: "distributed"}, {})]
    saved, other = fused.state_dict(), {"momentum": "momentum_beta"}.get(momentum, "momentum")
    saved["param_groups"][0][other] = 0.5  # as another version of emerging_optimizers called it
    del saved["param_groups"][0][momentum]
    fused.load_state_dict(saved)
    assert fused.param_groups[0][momentum] == 0.5
    groups.append(sorted({**fused.param_groups[0], "lr_mult": 2.0}))
    plugin.restore()
    return kinds, [line for line in lines if "native" in line], error, states, groups, momentum, generators


def resumed_with_other_flags_agree():
    """One step, its state into an optimizer with other flags, another step: natively and fused."""
    from ditron_train.cpu import emerging_optimizers

    assert emerging_optimizers.install()
    import ditron_train.megatron as plugin

    nesterov = "nesterov" if is_newer_than_0_17() else "use_nesterov"
    flags = {nesterov: False}, {nesterov: True, "fp32_matmul_prec": "highest"}
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(8, 6, generator=generator) for _ in flags]
    found = []
    for fused in (False, True):
        if fused:
            plugin.apply(features="muon")
        matrix, state = torch.nn.Parameter(torch.ones(8, 6)), None
        for options, matrix.grad in zip(flags, gradients):
            optimizer = _muon_class()([matrix], **options)
            if state is not None:
                optimizer.load_state_dict(state)
            optimizer.step()
            state = optimizer.state_dict()
        found.append(matrix.detach())
    plugin.restore()
    return torch.equal(*found)


def checkpoints_interchange(folder, layer_wise, from_fused, sharding, options):
    """Two steps by one implementation, a ``torch_dist`` checkpoint, two by the other: weights that differ, equal
    losses."""
    from megatron.core import dist_checkpointing

    import ditron_train.megatron as plugin
    from ditron_train.cpu import emerging_optimizers
    from ditron_train.cpu import megatron_shim as megatron_cpu

    assert emerging_optimizers.install()
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as Native

    def state(wrapped, optimizer, is_loading):
        metadata = {"dp_cp_group": dist.group.WORLD, "chained_optim_avoid_prefix": True}
        model = wrapped.module.sharded_state_dict(metadata=metadata)
        return {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}

    def build(fused):
        plugin.restore()
        if fused:
            plugin.apply(features="muon")
        return _build(layer_wise, **options)

    os.environ["DITRON_MUON_SHARDING"] = sharding
    with megatron_cpu.megatron_on_cpu(), model_parallel():
        gather = Native.allgather_params
        Native.allgather_params = Native.broadcast_params  # gloo has no uneven all-gather
        try:
            source = build(from_fused)
            losses = _run(*source, range(2))
            dist_checkpointing.save(state(*source, False), folder)
            megatron_cpu.seed(2)  # of dropout
            losses += _run(*source, range(2, 4))
            target = build(not from_fused)
            loaded = dist_checkpointing.load(state(*target, True), folder)
            target[0].module.load_state_dict(loaded["model"])
            target[1].load_state_dict(loaded["optimizer"])
            megatron_cpu.seed(2)
            resumed = _run(*target, range(2, 4))
        finally:
            plugin.restore()
            Native.allgather_params = gather
            del os.environ["DITRON_MUON_SHARDING"]
    return _different(_weights(source[0]), _weights(target[0])), losses[2:] == resumed


def files_of_ranks_interchange(folder, from_fused, job):
    """Two steps by one implementation, a file of each rank as Megatron's loop with the arguments ``job`` writes it,
    one step by the other: weights that differ, equal losses."""
    import argparse
    import sys
    import types
    from unittest import mock

    import ditron_train.megatron as plugin
    from ditron_train.cpu import emerging_optimizers
    from ditron_train.cpu import megatron_shim as megatron_cpu

    assert emerging_optimizers.install()
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as Native

    def build(fused):
        plugin.restore()
        if fused:
            plugin.apply(features="muon")
        return _build(True, bf16=True)

    name = f"{folder}/layer_wise_optimizer_{dist.get_rank()}.pt"
    loop = types.SimpleNamespace(_GLOBAL_ARGS=argparse.Namespace(**job))
    with (
        mock.patch.dict(sys.modules, {"megatron.training.global_vars": loop}),
        mock.patch.object(Native, "allgather_params", Native.broadcast_params),  # gloo has no uneven all-gather
        megatron_cpu.megatron_on_cpu(),
        model_parallel(),
    ):
        try:
            source = build(from_fused)
            _run(*source, range(2))
            source[1].save_state_dict_to_file(name)
            weights = _weights(source[0])
            megatron_cpu.seed(2)  # of dropout
            losses = _run(*source, range(2, 3))
            target = build(not from_fused)
            target[0].module.load_state_dict(weights, strict=False)  # parameters alone
            target[1].load_state_dict_from_file(name)
            megatron_cpu.seed(2)
            resumed = _run(*target, range(2, 3))
        finally:
            plugin.restore()
    return _different(_weights(source[0]), _weights(target[0])), losses == resumed
