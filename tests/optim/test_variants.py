"""Opt-ins that change bits: how near they come to the exact iteration, and that nothing takes them unasked."""

from __future__ import annotations

import importlib

import pytest
import torch

from ditron_train.cpu import interpreter
from ditron_train.optim import Muon, newton_schulz, orthogonalize
from ditron_train.optim.newton_schulz import COEFFICIENTS
from ditron_train.optim.products import symmetric_addmm
from ditron_train.optim.variants import newton_schulz_batched
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError, SettingError
from ditron_train.runtime.settings import get_settings

needs_interpreter = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    if is_interpreter():
        interpreter.install()


def spread_matrix(rows, columns, seed=0):
    """A matrix whose singular values go from 1 down to 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
    return (u * torch.logspace(0, -4, min(rows, columns))) @ v


def distance(x, y):
    return float(torch.linalg.vector_norm(x.double() - y.double()) / torch.linalg.vector_norm(y.double()))


@needs_interpreter
@pytest.mark.parametrize("m", [16, 33, 70])
def test_a_product_of_commuting_matrices_by_half_is_exact(m):
    a = torch.randint(-1, 2, (m, m), generator=torch.Generator().manual_seed(m)).float()
    a = torch.tril(a) + torch.tril(a, -1).t()
    square = a @ a
    result = symmetric_addmm(square, a, square, alpha=0.5, beta=2.0)
    assert torch.equal(result, 2.0 * square + 0.5 * (a @ square)) and torch.equal(result, result.t())


def test_symmetric_addmm_refuses_other_shapes():
    with pytest.raises(NotSupportedError, match="symmetric_addmm"):
        symmetric_addmm(torch.zeros(4, 4), torch.zeros(4, 5), torch.zeros(4, 4), alpha=1.0, beta=1.0)


@pytest.mark.parametrize("shape", [(24, 100), (100, 24), (16, 32)])
@pytest.mark.parametrize("mode", ["strict", pytest.param("force", marks=needs_interpreter)])
@pytest.mark.parametrize("coefficients, num_steps", [("quintic", 5), ("polar_express", 8), ("simple", 7)])
def test_the_gram_form_takes_the_same_steps(shape, mode, coefficients, num_steps, products_rounded_once):
    options = dict(dtype=torch.float32, num_steps=num_steps, coefficient_type=coefficients, mode=mode)
    grad = spread_matrix(*shape)
    by_gram, by_steps = newton_schulz(grad, form="gram", **options), newton_schulz(grad, **options)
    assert not torch.equal(by_gram, by_steps)
    assert distance(by_gram, by_steps) < 2e-3


@pytest.mark.parametrize("seed", range(3))
def test_the_gram_form_in_fp16_is_as_near_the_exact_iteration_as_bf16_steps(seed):
    grad = spread_matrix(48, 160, seed)
    exact = newton_schulz(grad, dtype=torch.float32)
    by_gram = newton_schulz(grad, form="gram")
    assert by_gram.dtype == torch.float16
    assert distance(by_gram, exact) < distance(newton_schulz(grad), exact)


def test_matrices_that_gain_nothing_are_stepped_as_usual():
    grad = spread_matrix(32, 40)
    assert torch.equal(newton_schulz(grad, form="gram"), newton_schulz(grad))
    assert bool((newton_schulz(torch.zeros(8, 32), form="gram") == 0).all())
    with pytest.raises(NotSupportedError, match="cubic"):
        newton_schulz(grad, form="cubic")


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
def test_batched_matrices_come_near_single_ones(shape):
    grads = [spread_matrix(*shape, seed=seed) for seed in range(5)] + [torch.zeros(shape)]
    batch = newton_schulz_batched(grads, COEFFICIENTS["quintic"], dtype=torch.float32)
    for grad, x in zip(grads, batch):
        assert torch.allclose(x, newton_schulz(grad, dtype=torch.float32), atol=1e-4)


def test_polar_express_brings_all_singular_values_near_one():
    grad = spread_matrix(20, 36)
    x = orthogonalize(grad, dtype=torch.float32, coefficient_type="polar_express", num_steps=8)
    singular = torch.linalg.svdvals(x)
    quintic = torch.linalg.svdvals(orthogonalize(grad, dtype=torch.float32))
    assert float((singular - 1).abs().max()) < 0.05 < float((quintic - 1).abs().max())


def _trained(num_steps=4, **options):
    """Weights of matrices of two shapes, one of them with q, k and v, a vector and one without a gradient."""
    shapes = [(16, 12), (24, 12), (16, 12), (12, 16), (24, 12), (5,), (16, 12)]
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i)))
        for i, shape in enumerate(shapes)
    ]
    optimizer = Muon(
        params, lr=0.02, split_qkv=True, is_qkv_fn=lambda p: p.shape[0] == 24, qkv_split_shapes=(4, 2, 2),
        fp32_matmul_prec="highest", **options,
    )  # fmt: skip
    order = []
    optimizer.after_matrix = lambda param: order.append(next(i for i, p in enumerate(params) if p is param))
    for step in range(num_steps):
        for index, param in enumerate(params[:-1]):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + index))
        optimizer.step()
    assert order == [0, 1, 2, 3, 4, 6] * num_steps
    return [param.detach() for param in params]


def test_batched_steps_train_as_single_ones():
    single, batched, none_small = _trained(), _trained(batch_below=1024), _trained(batch_below=3)
    assert all(torch.equal(a, b) for a, b in zip(single, none_small))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(single, batched))
    assert torch.equal(single[5], batched[5]) and torch.equal(single[6], batched[6])


def test_batches_are_split_by_size(monkeypatch):
    monkeypatch.setattr(importlib.import_module("ditron_train.optim.muon"), "_BATCH_ELEMENTS", 2 * 16 * 12)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(_trained(), _trained(batch_below=1024)))


def test_nothing_is_taken_unasked(monkeypatch):
    optimizer = Muon([torch.nn.Parameter(torch.zeros(4, 4))])
    assert (optimizer.form, optimizer.batch_below, optimizer.coefficient_type) == ("steps", 0, "quintic")
    monkeypatch.delenv("DITRON_MUON_OPT_INS", raising=False)
    assert get_settings().muon_opt_ins is None
    monkeypatch.setenv("DITRON_MUON_OPT_INS", "gram, batched")
    assert get_settings().muon_opt_ins == ("gram", "batched")
    monkeypatch.setenv("DITRON_MUON_OPT_INS", "gram,fast")
    with pytest.raises(SettingError, match="polar_express"):
        get_settings()


def test_megatron_takes_the_opt_ins_of_the_setting(monkeypatch):
    pytest.importorskip("megatron.core")
    from ditron_train.megatron.muon.optimizer import DitronTensorParallelMuon

    monkeypatch.setenv("DITRON_MUON_OPT_INS", "gram,batched,polar_express")
    optimizer = DitronTensorParallelMuon([torch.nn.Parameter(torch.zeros(4, 4))], num_ns_steps=8)
    assert (optimizer.form, optimizer.batch_below, optimizer.coefficient_type) == ("gram", 1024, "polar_express")
    monkeypatch.delenv("DITRON_MUON_OPT_INS")
    assert DitronTensorParallelMuon([torch.nn.Parameter(torch.zeros(4, 4))]).form == "steps"
