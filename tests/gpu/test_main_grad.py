"""Weight gradients added to ``main_grad`` on a GPU: torch's GEMM, Transformer Engine's and the sum of the product."""

from __future__ import annotations

import pytest
import torch

from ditron_train.gemm import main_grad as module
from ditron_train.gemm.main_grad import add_wgrad
from ditron_train.gemm.order_probe import order_probe_matrix

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("own_gpus"),
]

# (tokens, N, K): layers at TP 1 to 8, and output layers.
SHAPES = [(8192, 5120, 8192), (4096, 1792, 4096), (8192, 1280, 8192), (2048, 32000, 4096), (1000, 1000, 776)]


def _operands(tokens, n, k, dtype, is_order_probe):
    if is_order_probe:
        make = [((tokens, k), 1, "rows"), ((tokens, n), 2, "columns")]
        return [
            order_probe_matrix(shape, dtype, torch.device("cuda"), seed=seed, signed=how) for shape, seed, how in make
        ]
    generator = torch.Generator(device="cuda").manual_seed(1)
    return [torch.randn(tokens, width, dtype=dtype, device="cuda", generator=generator) for width in (k, n)]


@pytest.mark.parametrize("is_order_probe", [False, True], ids=["normal", "order-probe"])
@pytest.mark.parametrize("by", ["torch", "te"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_into_fp32_with_the_bits_of_the_sum(shape, by, is_order_probe, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(module, "product_of_transformer_engine", lambda: None)
    elif module.product_of_transformer_engine() is None:
        pytest.skip("Transformer Engine is not installed")
    tokens, n, k = shape
    x, grad = _operands(tokens, n, k, torch.bfloat16, is_order_probe)
    main_grad = torch.randn(n, k, device="cuda")
    expected = main_grad.clone()
    for _ in range(2):
        add_wgrad(x, grad, main_grad)
        expected += torch.mm(grad.t(), x, out_dtype=torch.float32)
    assert torch.equal(main_grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_into_halves(dtype):
    x, grad = _operands(4096, 1792, 4096, dtype, False)
    main_grad = torch.randn(1792, 4096, device="cuda").to(dtype)
    expected = torch.addmm(main_grad, grad.t(), x)
    add_wgrad(x, grad, main_grad)
    assert torch.equal(main_grad, expected)
