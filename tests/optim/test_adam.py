"""Adam in one pass: bit for bit the arithmetic of Transformer Engine's kernel without merged multiply-adds (the
interpreter has none), and close to torch's AdamW."""

from __future__ import annotations

import pytest
import torch

from ditron_train.optim.adam import AdamOptions, AdamPlan, Shard, find_form, results_of, sample_shard
from ditron_train.policy.probe import same_bits
from ditron_train.runtime.device import is_interpreter
from tests.support import quick_interpreter
from tests.support.fused_adam import fp32, multi_tensor_adam

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")
CPU = torch.device("cpu")
OPTIONS = AdamOptions(1e-3, (0.9, 0.95), 1e-8, 0.1, step=3)
PLAIN = 2
SIZES = [1, 15, 16, 2047, 2048, 2049, 5000, 4096]


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    quick_interpreter.install()


def _native(shard, options, scale):
    grad = shard.grad if scale is None else shard.grad * fp32(scale)
    o = options
    numbers = o.lr, *o.betas, o.eps, o.step, int(not o.is_l2), 1, o.weight_decay
    multi_tensor_adam(0, None, [[one] for one in (grad, *shard[1:4])], *numbers)
    if shard.out is not None:
        shard.out.copy_(shard.param)


def _shards(sizes=SIZES, out=True):
    shards = [sample_shard(size, CPU, 100 + place) for place, size in enumerate(sizes)]
    return shards if out else [shard._replace(out=None) for shard in shards]


@pytest.mark.parametrize("is_l2", [False, True])
@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("decay, scale", [(0.0, None), (0.1, 0.3), (0.01, 1e-20)])
def test_every_result_is_native(is_l2, out, decay, scale):
    options = OPTIONS._replace(weight_decay=decay, is_l2=is_l2)
    expected, found, plan = _shards(out=out), _shards(out=out), AdamPlan()
    before = [shard.grad.clone() for shard in found]
    for step in range(1, 4):
        for shard in expected:
            _native(shard, options._replace(step=step), scale)
        plan.run(found, options._replace(step=step), scale, PLAIN)
    for one, other in zip(expected, found):
        assert same_bits(results_of(one), results_of(other))
    assert same_bits(before, [shard.grad for shard in found])


def test_addresses_may_change_from_step_to_step():
    plan, expected, found = AdamPlan(), _shards(), _shards()
    for step in range(1, 4):
        found = [Shard(*(one.clone() for one in shard)) for shard in found[1:]] + found[:1]
        expected = expected[1:] + expected[:1]
        for shard in expected:
            _native(shard, OPTIONS._replace(step=step), None)
        plan.run(found, OPTIONS._replace(step=step), None, PLAIN)
    assert all(same_bits(results_of(one), results_of(other)) for one, other in zip(expected, found))


def test_parts_of_buffers_that_are_not_aligned():
    whole = [torch.zeros(5000) for _ in range(4)] + [torch.zeros(5000, dtype=torch.bfloat16)]
    shards, start = [], 3
    for shard in _shards([7, 1000, 2049]):
        parts = [buffer[start : start + len(shard.grad)] for buffer in whole]
        for part, values in zip(parts, shard):
            part.copy_(values)
        shards.append(Shard(*parts))
        start += len(shard.grad) + 1
    expected = [Shard(*(one.clone() for one in shard)) for shard in shards]
    AdamPlan().run(shards, OPTIONS, 0.5, PLAIN)
    for shard in expected:
        _native(shard, OPTIONS, 0.5)
    assert all(same_bits(results_of(one), results_of(other)) for one, other in zip(expected, shards))
    assert float(whole[1][2]) == float(whole[1][start]) == 0.0  # nothing beside them was written


def test_nothing_to_step():
    AdamPlan().run(_shards([0]), OPTIONS, None, PLAIN)


def test_steps_are_close_to_adamw():
    shard = sample_shard(1000, CPU, 5)
    for one in shard[:4]:
        one.normal_(generator=torch.Generator().manual_seed(1))
    param = torch.nn.Parameter(shard.param.clone())
    adamw = torch.optim.AdamW([param], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    shard.moment.zero_(), shard.variance.zero_()
    for step in range(1, 6):
        param.grad = shard.grad * 0.5
        adamw.step()
        AdamPlan().run([shard], OPTIONS._replace(lr=1e-2, step=step), 0.5, PLAIN)
    torch.testing.assert_close(shard.param, param.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shard.variance, adamw.state[param]["exp_avg_sq"])
    assert torch.equal(shard.out, shard.param.bfloat16())


def test_the_form_is_found_by_comparison():
    assert find_form(_native, CPU, OPTIONS) is not None  # all forms are alike in the interpreter

    def other(shard, options, scale):
        _native(shard, options, scale)
        shard.param.mul_(1.0 + 2**-20)

    assert find_form(other, CPU, OPTIONS) is None


@pytest.mark.parametrize("form", [0, 1, 2])
def test_every_form_is_the_same_sum(form):
    one, other = sample_shard(300, CPU, 2), sample_shard(300, CPU, 2)
    AdamPlan().run([one], OPTIONS, None, PLAIN)
    AdamPlan().run([other], OPTIONS, None, form)
    assert same_bits(results_of(one), results_of(other))
