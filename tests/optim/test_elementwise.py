"""Elementwise kernels in the interpreter, on values for which every rounding is exact, against torch's operators."""

from __future__ import annotations

import pytest
import torch
import triton

from ditron_train.optim.elementwise import momentum_step
from ditron_train.optim.kernels import momentum_kernel, normalize_kernel, update_kernel
from ditron_train.runtime.device import is_interpreter
from tests.support import quick_interpreter

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    quick_interpreter.install()


def dyadic(*shape, seed):
    """Multiples of 1/4 below 8: products with multiples of 1/8 and their sums are exact in fp32."""
    return torch.randint(-32, 32, shape, generator=torch.Generator().manual_seed(seed)).float() / 4


@pytest.mark.parametrize("decay", ["decoupled", "l2", "none"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("beta", [0.75, 0.25])
def test_momentum_kernel_equals_torch(decay, nesterov, beta):
    param, momentum, grad = (dyadic(37, 5, seed=seed) for seed in range(3))
    expected_param, expected_momentum = param.clone(), momentum.clone()
    expected = momentum_step(
        expected_param, expected_momentum, grad.clone(), lr=1.0, weight_decay=0.0 if decay == "none" else 0.125,
        decay_method="l2" if decay == "l2" else "decoupled", momentum_beta=beta, use_nesterov=nesterov,
    )  # fmt: skip
    direction = torch.empty_like(grad) if nesterov else momentum
    momentum_kernel[(triton.cdiv(grad.numel(), 64),)](
        param, momentum, grad, direction, grad.numel(), 0.125 if decay == "l2" else -0.125, 1 - beta, beta,
        DECAY=decay, MOMENTUM_SMALL=1 - beta < 0.5, NESTEROV=nesterov, NESTEROV_SMALL=beta < 0.5, BLOCK=64,
    )  # fmt: skip
    assert torch.equal(param, expected_param)
    assert torch.equal(momentum, expected_momentum)
    assert torch.equal(direction, expected)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("norm", [3.7, 0.0, 1e-9, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalize_kernel_divides_and_transposes(transpose, norm, dtype):
    direction, norm = torch.randn(70, 33, generator=torch.Generator().manual_seed(1)), torch.tensor([[norm]])
    out = torch.empty((33, 70) if transpose else (70, 33), dtype=dtype)
    normalize_kernel[(6,)](direction, norm, out, 70, 33, 33, out.stride(0), 1e-7, transpose, 32, 32)
    expected = (direction / norm.clamp_min(1e-7)).to(dtype)
    assert torch.equal(out.nan_to_num(9.0), (expected.t() if transpose else expected).nan_to_num(9.0))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("groups, first, rows", [(1, 0, 24), (3, 0, 4), (3, 4, 2)])
def test_update_kernel_changes_the_rows_of_its_component_alone(transpose, groups, first, rows):
    param = dyadic(24, 20, seed=1)
    expected = param.clone().view(groups, 24 // groups, 20)
    whole = param.view(groups, 24 // groups, 20)[:, first : first + rows]
    x = dyadic(groups * rows, 20, seed=2).bfloat16()
    expected[:, first : first + rows].add_((x.float() * 0.5 * 2.0).view(groups, rows, 20), alpha=-0.125)
    stored = x.t().contiguous() if transpose else x
    update_kernel[(triton.cdiv(groups * rows, 16) * 2,)](
        whole, stored, groups * rows, 20, rows, whole.stride(0), whole.stride(1), stored.stride(0), 0.5, 2.0, -0.125,
        transpose, 16, 16,
    )  # fmt: skip
    assert torch.equal(param, expected.view(24, 20))
