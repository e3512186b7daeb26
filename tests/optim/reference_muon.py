"""Muon as its published equations say, in torch's operators alone: what the fast step must equal bit for bit."""

from __future__ import annotations

import torch

QUINTIC = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
]  # fmt: skip


def reference_newton_schulz(grad: torch.Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    transpose = grad.shape[0] > grad.shape[1]
    x = grad.mT if transpose else grad
    x = torch.nn.functional.normalize(x, p=2, dim=(-2, -1), eps=1e-7).to(dtype)
    for a, b, c in QUINTIC * (steps // 5):
        gram = x @ x.mT
        polynomial = torch.addmm(gram, gram, gram, alpha=c, beta=b)
        x = torch.addmm(x, polynomial, x, alpha=1.0, beta=a)
    x = x.to(torch.float32)
    return x.mT if transpose else x


def reference_step(
    param, momentum, grad, *, lr, momentum_beta=0.95, nesterov=True, weight_decay=0.01, decay="decoupled",
    dtype=torch.bfloat16, scale=None, extra=1.0, qkv=None,
):  # fmt: skip
    """In place on ``param`` and ``momentum``."""
    if weight_decay and decay == "decoupled":
        param.add_(param, alpha=-weight_decay * lr)
    elif weight_decay and decay == "independent":
        param.add_(param, alpha=-weight_decay)
    elif weight_decay:
        grad = grad.add(param, alpha=weight_decay)
    momentum.lerp_(grad, 1 - momentum_beta)
    direction = grad.lerp(momentum, momentum_beta) if nesterov else momentum

    def factor(matrix):
        rows, columns = matrix.shape
        s = max(rows, columns) ** 0.5 if scale is None else scale(rows, columns)
        return reference_newton_schulz(matrix, dtype=dtype) * s * extra

    if qkv is None:
        update = factor(direction)
    else:
        groups, columns = direction.shape[0] // sum(qkv), direction.shape[1]
        parts = torch.split(direction.view(groups, sum(qkv), columns), qkv, dim=1)
        parts = [factor(part.reshape(-1, columns)).view(groups, -1, columns) for part in parts]
        update = torch.cat(parts, dim=1).view(direction.shape)
    param.add_(update, alpha=-lr)
