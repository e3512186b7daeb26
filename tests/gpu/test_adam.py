"""Adam in one pass against Transformer Engine's FusedAdam, Megatron's clipping and its copy: bits, and what the gate
says. One GPU is enough: ``python3 scripts/launch.py 1 -m pytest tests/gpu/test_adam.py -q -x``."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")
FusedAdam = pytest.importorskip("transformer_engine.pytorch.optimizers").FusedAdam

from ditron_train.optim.adam import AdamPlan, Shard, find_form, results_of, sample_shard  # noqa: E402
from ditron_train.policy.probe import same_bits  # noqa: E402

SIZES = [1, 3, 16, 17, 2047, 2048, 2049, 4096, 100_003, 1 << 20]
BETAS = (0.9, 0.95)


def _tell(words):
    if dist.get_rank() == 0:
        sys.__stderr__.write(f"\n{words}\n")


def _optimizer(device, is_l2=False, decay=0.1, betas=BETAS):
    param = torch.nn.Parameter(torch.zeros(8, device=device))
    return FusedAdam([param], lr=3e-4, betas=betas, eps=1e-8, weight_decay=decay, adam_w_mode=not is_l2)


def _call(optimizer, device):
    from ditron_train.megatron.adam.optimizer import AdamCall, _options

    options = _options(optimizer, {**optimizer.param_groups[0], "step": 2})
    return AdamCall(optimizer, dist.group.WORLD, device, options)


@functools.cache
def _form(device, is_l2=False):
    from ditron_train.megatron.adam.optimizer import _step_natively

    optimizer = _optimizer(device, is_l2)
    options = _call(optimizer, device).options
    return find_form(functools.partial(_step_natively, optimizer), device, options)


def _copies(shards):
    return [Shard(*(one if one is None else one.clone() for one in shard)) for shard in shards]


def _native_steps(optimizer, shards, scale, steps):
    """All of them in one optimizer, as in a job."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    params = [torch.nn.Parameter(shard.param, requires_grad=False) for shard in shards]
    optimizer.param_groups[0].update(params=params)
    for param, shard in zip(params, shards):
        optimizer.state[param].update(exp_avg=shard.moment, exp_avg_sq=shard.variance)
    for _ in range(steps):
        for param, shard in zip(params, shards):
            param.grad = shard.grad.clone()
        if scale is not None:
            clip_grad_by_total_norm_fp32(params, scale, 1.0 - 1e-6)
        optimizer.step()
        for shard in shards:
            shard.out.copy_(shard.param)


def _first_difference(expected, found):
    for name, one, other in zip(("moment", "variance", "param", "out"), results_of(expected), results_of(found)):
        if not same_bits([one], [other]):
            place = int(((one != other) & ~(one.isnan() & other.isnan())).nonzero()[0])
            return name, place, float(one[place]), float(other[place])
    return None


@pytest.mark.parametrize("is_l2", [False, True])
def test_the_form_is_found(device, is_l2):
    found = _form(device, is_l2)
    _tell(f"form of FusedAdam's multiply-adds, is_l2={is_l2}: {found}")
    assert found is not None


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("is_l2", [False, True])
@pytest.mark.parametrize("decay, scale", [(0.1, 0.37), (0.0, None), (0.01, 1e-3), (0.1, None)])
def test_five_steps_are_native(device, is_l2, decay, scale, is_aligned):
    sizes = [size for size in SIZES if size % 16 == 0] if is_aligned else SIZES
    shards = [sample_shard(size, device, 7 * place) for place, size in enumerate(sizes)]
    if not is_aligned:  # parts of buffers that begin anywhere
        shards = [Shard(*(torch.cat([one[:1], one])[1:] for one in shard)) for shard in shards]
    expected, plan = _copies(shards), AdamPlan()
    optimizer = _optimizer(device, is_l2, decay)
    _native_steps(optimizer, expected, scale, 5)
    options = _call(_optimizer(device, is_l2, decay), device).options
    for step in range(1, 6):
        plan.run(shards, options._replace(step=step), scale, _form(device, is_l2))
    for one, other in zip(expected, shards):
        assert _first_difference(one, other) is None, (len(one.grad), _first_difference(one, other))


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5), (0.95, 0.98)])
def test_every_kind_of_bits(device, betas):
    """Any 32 bits as gradient, parameter, moment and variance."""
    generator = torch.Generator(device).manual_seed(3)
    bits = [torch.randint(-(2**31), 2**31, (1 << 22,), device=device, generator=generator) for _ in range(4)]
    parts = [one.to(torch.int32).view(torch.float32) for one in bits]
    shard = Shard(*parts[:3], parts[3].abs(), torch.zeros(1 << 22, dtype=torch.bfloat16, device=device))
    (expected,) = _copies([shard])
    optimizer = _optimizer(device, betas=betas)
    _native_steps(optimizer, [expected], 0.5, 1)
    options = _call(_optimizer(device, betas=betas), device).options
    AdamPlan().run([shard], options._replace(step=1), 0.5, _form(device))
    assert _first_difference(expected, shard) is None, _first_difference(expected, shard)


def _time_us(run, repeats=10):
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


@pytest.mark.parametrize("sizes", [[1 << 28], [8192 * 3584] * 8 + [8192] * 16, [2048 * 768] * 128 + [100_003]])
def test_the_gate_takes_it(device, own_gpus, monkeypatch, sizes):
    from ditron_train.megatron.adam.optimizer import ADAM
    from ditron_train.policy import gate

    shards = [sample_shard(size, device, 1) for size in sizes]
    optimizer = _optimizer(device)
    params = [torch.nn.Parameter(shard.param, requires_grad=False) for shard in shards]
    optimizer.param_groups[0].update(params=params)
    for param, shard in zip(params, shards):
        optimizer.state[param].update(exp_avg=shard.moment, exp_avg_sq=shard.variance)
        param.grad = shard.grad

    def native():
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        clip_grad_by_total_norm_fp32(params, 0.999, 1.0)
        optimizer.step()
        for shard in shards:
            shard.out.copy_(shard.param)

    options, plan = _call(_optimizer(device), device).options, AdamPlan()
    native_us = _time_us(native)
    fused_us = _time_us(lambda: plan.run(shards, options, 0.999, _form(device)))
    rate = 30e-6 * sum(sizes) / fused_us
    _tell(
        f"{len(sizes)} of {sum(sizes)} elements: native {native_us:.0f} us, fused {fused_us:.0f} us, {rate:.2f} TB/s"
    )
    monkeypatch.setenv("DITRON_POLICY", "strict")
    gate.forget("adam")
    assert gate.is_fused(ADAM, _call(_optimizer(device), device))
    gate.forget("adam")


class _Model(torch.nn.Module):
    """Parameters of every kind of size, in bf16 and fp32."""

    def __init__(self):
        super().__init__()
        sizes = (257, 1), (64, 64), (1000,), (33, 7), (512, 512)
        self.weights = torch.nn.ParameterList(torch.randn(*size).cuda().bfloat16() for size in sizes)
        self.bias = torch.nn.Parameter(torch.randn(77).cuda())

    def forward(self):
        return sum(weight.float().sum() for weight in self.parameters())


def _train(features, clip_grad, steps=4):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    import ditron_train.megatron as plugin

    if features:
        plugin.apply(features=features)
    torch.manual_seed(1)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1), ddp, _Model(), disable_bucketing=True
    )
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=clip_grad, bf16=True, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(config, [model])
    seen = []
    try:
        for step in range(steps):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            generator = torch.Generator("cuda").manual_seed(step)
            for param in model.parameters():
                param.main_grad.normal_(generator=generator)
            for group in optimizer.param_groups:
                group["lr"] *= 1.5
            model.finish_grad_sync() if hasattr(model, "finish_grad_sync") else None
            seen.append(torch.tensor(optimizer.step()[1] or 0.0))
        (one,) = optimizer.chained_optimizers
        for param in one.get_parameters():
            seen += [param.detach(), *(one.optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq"))]
        seen += [param.detach() for param in model.parameters()]
    finally:
        plugin.restore()
    return seen


@pytest.mark.parametrize("clip_grad", [1.0, 0.0, 1e6])
def test_megatrons_optimizer(device, monkeypatch, clip_grad):
    from unittest import mock

    from megatron.core import parallel_state

    from ditron_train.megatron.adam import optimizer as own

    monkeypatch.setenv("DITRON_POLICY", "force")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    native = _train(None, clip_grad)
    step = mock.Mock(side_effect=own._step_fused)
    monkeypatch.setattr(own, "_step_fused", step)
    fused = _train("adam", clip_grad)
    parallel_state.destroy_model_parallel()
    assert len(native) == len(fused) and step.call_count == 3  # the first makes the states
    assert all(same_bits([one], [other]) for one, other in zip(native, fused))
