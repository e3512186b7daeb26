"""Weight gradients added to ``main_grad`` on the CPU against torch's own sums."""

import pytest
import torch

from ditron_train.gemm.main_grad import add_wgrad
from ditron_train.runtime.errors import NotSupportedError

TOKENS, N, K = 70, 24, 40


def _operands(dtype, *tokens):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*(tokens or (TOKENS,)), width, generator=generator).to(dtype) for width in (K, N)]


def _main_grad(dtype):
    return torch.randn(N, K, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_into_fp32_the_whole_product_is_added_once(dtype):
    x, grad = _operands(dtype)
    main_grad, expected = _main_grad(torch.float32), _main_grad(torch.float32)
    for _ in range(3):
        add_wgrad(x, grad, main_grad)
        expected += grad.float().t() @ x.float()
    assert torch.equal(main_grad, expected)
    if dtype != torch.float32:  # not the path without fusion, which rounds the product first
        assert not torch.equal(main_grad, _main_grad(torch.float32) + 3 * (grad.t() @ x).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_into_halves_the_sum_is_rounded_once(dtype):
    x, grad = _operands(dtype)
    main_grad, before = _main_grad(dtype), _main_grad(dtype)
    address = main_grad.data_ptr()
    add_wgrad(x, grad, main_grad)
    assert torch.equal(main_grad, (before.float() + grad.float().t() @ x.float()).to(dtype))
    assert main_grad.data_ptr() == address


def test_leading_dimensions_are_tokens_in_order():
    x, grad = _operands(torch.bfloat16, 7, 10)
    one, other = _main_grad(torch.float32), _main_grad(torch.float32)
    add_wgrad(x, grad, one)
    add_wgrad(x.reshape(70, K), grad.reshape(70, N), other)
    assert torch.equal(one, other)


def test_a_part_of_a_buffer_is_all_that_changes():
    buffer = torch.zeros(3, N, K)
    x, grad = _operands(torch.bfloat16)
    add_wgrad(x, grad, buffer[1])
    assert buffer[1].any() and not buffer[0].any() and not buffer[2].any()


def test_no_tokens_change_nothing():
    x, grad = _operands(torch.bfloat16, 0)
    main_grad = _main_grad(torch.float32)
    add_wgrad(x, grad, main_grad)
    assert torch.equal(main_grad, _main_grad(torch.float32))


def test_operands_of_a_graph_leave_no_history():
    """Megatron's ``defer_embedding_wgrad_compute`` hands over the output layer's own input behind all backwards."""
    x, grad = _operands(torch.bfloat16)
    main_grad = _main_grad(torch.float32)
    add_wgrad(x.requires_grad_() * 1, grad, main_grad)
    assert not main_grad.requires_grad
    assert torch.equal(main_grad, _main_grad(torch.float32) + grad.float().t() @ x.detach().float())


@pytest.mark.parametrize(
    "types",
    [(torch.bfloat16, torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16, torch.float16),
     (torch.float32, torch.float32, torch.bfloat16)],
)  # fmt: skip
def test_other_types_are_refused(types):
    x, grad = _operands(torch.float32)
    main_grad = _main_grad(types[2])
    with pytest.raises(NotSupportedError, match="is not added to a main_grad of"):
        add_wgrad(x.to(types[0]), grad.to(types[1]), main_grad)
    assert torch.equal(main_grad, _main_grad(types[2]))
