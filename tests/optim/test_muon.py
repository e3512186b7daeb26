"""Muon on CPU: equal to the published equations, with torch's habits, for every kind of parameter and gradient."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import triton
import triton.language as tl

from ditron_train.gemm import matmul_nt
from ditron_train.optim import Muon, muon_scale, newton_schulz, orthogonalize, products, reference
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError
from tests.support import quick_interpreter

needs_interpreter = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    if is_interpreter():
        quick_interpreter.install()


def parameter(*shape, seed=0, dtype=torch.float32):
    param = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100)).to(dtype)
    return param


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (1, 8), (8, 1)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay", ["decoupled", "independent", "l2"])
def test_steps_equal_the_equations(shape, nesterov, decay):
    param = parameter(*shape)
    expected, momentum = param.detach().clone(), torch.zeros(shape)
    optimizer = Muon(
        [param], lr=0.02, use_nesterov=nesterov, weight_decay=0.1, weight_decay_method=decay, extra_scale_factor=0.2
    )
    for seed in range(3):
        param.grad = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        grad = param.grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, grad)
        reference.reference_step(
            expected, momentum, grad, lr=0.02, nesterov=nesterov, weight_decay=0.1, decay=decay, extra=0.2
        )
        assert torch.equal(param, expected)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], momentum)


@pytest.mark.parametrize("qkv", [(8, 4, 4), (16, 2, 2)])
def test_q_k_and_v_are_orthogonalised_apart(qkv):
    param = parameter(3 * sum(qkv), 24)
    expected, momentum = param.detach().clone(), torch.zeros(param.shape)
    optimizer = Muon([param], lr=0.1, split_qkv=True, is_qkv_fn=lambda p: True, qkv_split_shapes=qkv)
    grad = param.grad.clone()
    optimizer.step()
    reference.reference_step(expected, momentum, grad, lr=0.1, qkv=qkv)
    assert torch.equal(param, expected)
    whole = parameter(3 * sum(qkv), 24)
    Muon([whole], lr=0.1, split_qkv=True, is_qkv_fn=lambda p: False, qkv_split_shapes=qkv).step()
    assert not torch.equal(whole, expected)


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
def test_scales(mode):
    assert muon_scale(64, 16, mode) == {"spectral": 8.0, "unit_rms_norm": 2.0, "shape_scaling": 2.0}[mode]
    assert muon_scale(16, 64, mode) == {"spectral": 8.0, "unit_rms_norm": 0.5, "shape_scaling": 1.0}[mode]


def test_newton_schulz_orthogonalises():
    grad = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    singular = torch.linalg.svdvals(orthogonalize(grad, dtype=torch.float32))
    assert singular.min() > 0.6 and singular.max() < 1.3
    u, _, v = torch.linalg.svd(grad, full_matrices=False)
    assert torch.dist(orthogonalize(grad, dtype=torch.float32), u @ v) < 0.35 * 30**0.5


@triton.jit
def _multiply_add(x_ptr, add_ptr, factor, size, BLOCK: tl.constexpr):
    """x * factor + add by the multiply-add of the products' epilogue, which rounds once from Triton 3.9's interpreter
    on."""
    lanes = tl.arange(0, BLOCK)
    x, add = tl.load(x_ptr + lanes, mask=lanes < size), tl.load(add_ptr + lanes, mask=lanes < size)
    tl.store(x_ptr + lanes, tl.fma(x, tl.full(x.shape, factor, tl.float32), add), mask=lanes < size)


@needs_interpreter
def test_half_products_give_the_weights_of_whole_tile_products(monkeypatch, products_rounded_once):
    """50 steps of a small model by the symmetric kernels and by the same tiles computed whole: equal weights."""

    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(24, 36), torch.nn.Tanh(), torch.nn.Linear(36, 8).requires_grad_(False)
        )
        optimizer = Muon(model[0].parameters(), lr=0.02, mode="force", fp32_matmul_prec="highest")
        x = torch.randn(64, 24)
        y = torch.tanh(x @ torch.randn(24, 8) / 5)
        losses = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [p.detach().clone() for p in model.parameters()], losses

    half, losses = train()
    assert losses[-1] < 0.5 * losses[0]
    calls = []

    def whole_gram(x, config=None):
        calls.append("gram")
        block = products._symmetric_config(x.shape[0], x.shape[1], x.dtype, "interpreter", 1)
        return matmul_nt(x, x, config=block)

    def whole_square(a, b, c, config=None):
        calls.append("square")
        block = products._symmetric_config(a.shape[0], a.shape[1], a.dtype, "interpreter", 1)
        result, scaled = matmul_nt(a, a, config=block), a * b  # fp32: no rounding between product and epilogue
        _multiply_add[(1,)](result, scaled, c, result.numel(), BLOCK=2048)
        return result

    monkeypatch.setattr(products, "gram", whole_gram)
    monkeypatch.setattr(products, "scaled_square", whole_square)
    whole, _ = train()
    assert calls.count("gram") == calls.count("square") == 50 * 5
    assert all(torch.equal(a, b) for a, b in zip(half, whole))


def test_training_learns_and_schedulers_and_closures_work():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11))
    groups = [
        {"params": model[0].parameters(), "algorithm": "adamw", "lr": 5e-2},
        {"params": model[1].parameters(), "lr": 2e-2},
    ]
    optimizer = Muon(groups, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    tokens, targets = torch.arange(11), (torch.arange(11) * 3) % 11

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens), targets)
        loss.backward()
        return loss

    losses = []
    for _ in range(30):
        losses.append(float(optimizer.step(closure)))
        scheduler.step()
    assert losses[-1] < 0.2 * losses[0]
    assert set(optimizer.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[model[1].weight]) == {"momentum_buffer"}
    assert set(optimizer.state[model[1].bias]) == {"step", "exp_avg", "exp_avg_sq"}


def test_parameters_that_are_not_matrices_take_torch_adamw():
    shapes = [(5,), (), (2, 3, 4)]
    fused = [parameter(*shape, seed=i) for i, shape in enumerate(shapes)]
    marked = parameter(6, 4, seed=9)
    marked.is_embedding_or_output_parameter = True
    theirs = [copy.deepcopy(p) for p in (*fused, marked)]
    for fused_p, theirs_p in zip((*fused, marked), theirs):
        theirs_p.grad = fused_p.grad.clone()
    optimizer = Muon([*fused, marked], lr=0.01, weight_decay=0.1)
    torch_adamw = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        optimizer.step()
        torch_adamw.step()
    assert all(torch.equal(a, b) for a, b in zip((*fused, marked), theirs))


def test_state_dict_round_trip_continues_bit_for_bit():
    params = [parameter(12, 20, seed=1), parameter(7, seed=2)]
    optimizer = Muon(params, lr=0.05)
    optimizer.step()
    saved, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    optimizer.step()
    again = [torch.nn.Parameter(value) for value in values]
    for new, old in zip(again, params):
        new.grad = old.grad.clone()
    resumed = Muon(again, lr=9.0)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 0.05
    resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(again, params))


def _is_tall(param):
    return param.shape[0] > param.shape[1]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_copies_go_on_bit_for_bit(copied):
    """Behind a scheduler, which puts a step of its own into the optimizer: the copy's step is the copy's."""
    params = [parameter(12, 20, seed=1), parameter(32, 20, seed=3), parameter(7, seed=2)]
    options = dict(num_ns_steps=10, extra_scale_factor=0.2, split_qkv=True, is_qkv_fn=_is_tall)
    optimizer = Muon(params, lr=0.05, qkv_split_shapes=(2, 1, 1), **options)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.after_matrix = lambda param: None
    optimizer.step()
    before = [param.detach().clone() for param in params]
    again = copied(optimizer)
    optimizer.step()
    theirs = again.param_groups[0]["params"]
    assert all(torch.equal(a, b) for a, b in zip(theirs, before)) and again.after_matrix is None
    for fused, their in zip(params, theirs):
        their.grad = fused.grad.clone()
    again.step()
    assert all(torch.equal(a, b) for a, b in zip(theirs, params))


def test_state_of_the_native_optimizer_is_taken_over():
    from ditron_train.cpu.emerging_optimizers import OrthogonalizedOptimizer

    def native_muon(param):
        return OrthogonalizedOptimizer(
            [param],
            0.05,
            0.95,
            use_nesterov=True,
            weight_decay=0.01,
            weight_decay_method="decoupled",
            fp32_matmul_prec="medium",
            scaled_orthogonalize_fn=lambda d: reference.reference_newton_schulz(d) * 20**0.5,
        )

    param = parameter(12, 20, seed=1)
    native = native_muon(param)
    native.step()
    fused_param, native_param = copy.deepcopy(param), copy.deepcopy(param)
    fused, back = Muon([fused_param], lr=1.0), native_muon(native_param)
    fused_param.grad = param.grad.clone()
    fused.load_state_dict(native.state_dict())
    fused.step()
    native.step()
    assert torch.equal(fused_param, param)
    native_param.data.copy_(fused_param)
    native_param.grad = param.grad.clone()
    back.load_state_dict(fused.state_dict())
    back.step()
    native.step()
    assert torch.equal(native_param, param)


def test_gradients_that_users_meet():
    zero, missing, nan, infinite = (parameter(8, 12, seed=i) for i in range(4))
    zero.grad.zero_()
    missing.grad = None
    nan.grad[3, 3] = float("nan")
    infinite.grad[2, 2] = float("inf")
    before = zero.detach().clone(), missing.detach().clone()
    Muon([zero, missing, nan, infinite], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(zero, before[0]) and torch.equal(missing, before[1])
    assert bool(nan.isnan().all())
    expected, momentum = parameter(8, 12, seed=3).detach(), torch.zeros(8, 12)
    reference.reference_step(expected, momentum, infinite.grad, lr=0.1, weight_decay=0.0)
    assert torch.equal(infinite.isnan(), expected.isnan()) and bool(infinite.isnan().any())


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_sparse_gradients_are_refused(algorithm):
    embedding = torch.nn.Embedding(5, 4, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = Muon([{"params": embedding.parameters(), "algorithm": algorithm}])
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(NotSupportedError, match="sparse"):
        optimizer.step()
    assert torch.equal(embedding.weight, before) and not optimizer.state


def test_empty_parameters_and_groups():
    empty, param = torch.nn.Parameter(torch.zeros(0, 5)), parameter(4, 4)
    empty.grad = torch.zeros(0, 5)
    optimizer = Muon([{"params": []}, {"params": [empty, param]}])
    optimizer.step()
    assert len(optimizer.state_dict()["param_groups"]) == 2


@pytest.mark.parametrize("shape", [(0, 5), (12, 0), (0, 0)])
@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
def test_empty_matrices_are_left_as_they_are(shape, mode):
    plain, split = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    plain.grad, split.grad = torch.zeros(shape), torch.zeros(shape)
    options = dict(split_qkv=True, is_qkv_fn=lambda param: param is split, qkv_split_shapes=(2, 1, 1))
    Muon([plain, split], scale_mode=mode, **options).step()


def test_bf16_parameters_are_stepped_in_their_own_type():
    param = parameter(16, 24, dtype=torch.bfloat16)
    expected, momentum = param.detach().clone(), torch.zeros(16, 24, dtype=torch.bfloat16)
    grad = param.grad.clone()
    Muon([param], lr=0.1, weight_decay=0.1).step()
    expected.add_(expected, alpha=-0.1 * 0.1)
    momentum.lerp_(grad, 1 - 0.95)
    update = reference.reference_newton_schulz(grad.lerp(momentum, 0.95).float()) * 24**0.5
    expected.add_(update.bfloat16(), alpha=-0.1)
    assert torch.equal(param, expected)


@pytest.mark.parametrize(
    "options, word",
    [
        (dict(lr=-1.0), "lr"),
        (dict(momentum_beta=1.0), "momentum_beta"),
        (dict(weight_decay=-0.1), "weight_decay"),
        (dict(weight_decay_method="none"), "weight_decay_method"),
        (dict(num_ns_steps=3), "multiple"),
        (dict(num_ns_steps=0), "multiple"),
        (dict(coefficient_type="cubic"), "cubic"),
        (dict(scale_mode="big"), "scale mode"),
        (dict(fp32_matmul_prec="low"), "fp32_matmul_prec"),
        (dict(tp_mode="distributed"), "tp_mode"),
        (dict(split_qkv=True), "split_qkv"),
        (dict(mode="sometimes"), "sometimes"),
    ],
)
def test_bad_options_raise(options, word):
    with pytest.raises(NotSupportedError, match=word):
        Muon([parameter(4, 4)], **options).step()


def test_a_vector_in_a_muon_group_raises_and_leaves_the_optimizer_as_it_was():
    optimizer = Muon([parameter(4, 4)])
    with pytest.raises(NotSupportedError, match="matrices"):
        optimizer.add_param_group({"params": [parameter(4)], "algorithm": "muon"})
    assert len(optimizer.param_groups) == 1


def test_newton_schulz_refuses_what_is_not_an_fp32_matrix():
    for bad in (torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(3, 3).bfloat16()):
        with pytest.raises(NotSupportedError):
            newton_schulz(bad)


def test_polar_express_brings_all_singular_values_near_one():
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(20, 36, generator=generator), full_matrices=False)
    grad = (u * torch.logspace(0, -4, 20)) @ v
    x = orthogonalize(grad, dtype=torch.float32, coefficient_type="polar_express", num_steps=8)
    singular = torch.linalg.svdvals(x)
    quintic = torch.linalg.svdvals(orthogonalize(grad, dtype=torch.float32))
    assert float((singular - 1).abs().max()) < 0.05 < float((quintic - 1).abs().max())


def test_after_matrix_is_called_in_the_order_of_the_groups():
    """Also for a matrix without a gradient, which is passed over; not for a vector, which takes AdamW."""
    params = [parameter(16, 12), parameter(5), parameter(12, 16), parameter(16, 12)]
    params[2].grad, before = None, params[2].detach().clone()
    optimizer, order = Muon(params, lr=0.02), []
    optimizer.after_matrix = lambda param: order.append(next(i for i, p in enumerate(params) if p is param))
    optimizer.step()
    assert order == [0, 2, 3] and torch.equal(params[2].detach(), before)
