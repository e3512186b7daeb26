"""Muon as its published equations say, in torch's operators alone: what the fast step must equal bit for bit.

Tests compare with it and the benchmark calls it native: Megatron takes these formulas from ``emerging_optimizers``,
which is not on PyPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

QUINTIC = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
]  # fmt: skip


def reference_newton_schulz(
    grad: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    coefficients: Sequence[tuple[float, float, float]] = QUINTIC,
    *,
    transpose: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Five quintic steps (or others) on an fp32 matrix with whole products in ``dtype``; fp32, in the shape of
    ``grad``. With ``group``, of this rank's columns (behind ``transpose``), sums of all ranks added up."""
    transpose = grad.shape[0] > grad.shape[1] if transpose is None else transpose
    x = grad.mT if transpose else grad
    if group is None:
        x = torch.nn.functional.normalize(x, p=2, dim=(-2, -1), eps=1e-7)  # type: ignore[arg-type]
    else:
        x = x / _sum_over(group, (x * x).sum()).sqrt().clamp_min(1e-7)
    x = x.to(dtype)
    for a, b, c in coefficients:
        gram = _sum_over(group, x @ x.mT)
        polynomial = torch.addmm(gram, gram, gram, alpha=c, beta=b)
        x = torch.addmm(x, polynomial, x, alpha=1.0, beta=a)
    x = x.to(torch.float32)
    return x.mT if transpose else x


def _sum_over(group: dist.ProcessGroup | None, x: torch.Tensor) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def reference_step(
    param: torch.Tensor,
    momentum: torch.Tensor,
    grad: torch.Tensor,
    *,
    lr: float,
    momentum_beta: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.01,
    decay: str = "decoupled",
    dtype: torch.dtype = torch.bfloat16,
    scale: Callable[[int, int], float] | None = None,
    extra: float = 1.0,
    qkv: Sequence[int] | None = None,
    update_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """One step of one matrix, in place on ``param`` and ``momentum``; options as ``ditron_train.optim.Muon``'s, or
    what orthogonalizes a direction (``update_of``)."""
    if weight_decay and decay == "decoupled":
        param.add_(param, alpha=-weight_decay * lr)
    elif weight_decay and decay == "independent":
        param.add_(param, alpha=-weight_decay)
    elif weight_decay:
        grad = grad.add(param, alpha=weight_decay)
    momentum.lerp_(grad, 1 - momentum_beta)
    direction = grad.lerp(momentum, momentum_beta) if nesterov else momentum

    def factor(matrix: torch.Tensor) -> torch.Tensor:
        rows, columns = matrix.shape
        shape_scale = max(rows, columns) ** 0.5 if scale is None else scale(rows, columns)
        return reference_newton_schulz(matrix, dtype=dtype) * shape_scale * extra

    if update_of is not None:
        update = update_of(direction)
    elif qkv is None:
        update = factor(direction)
    else:
        groups, columns = direction.shape[0] // sum(qkv), direction.shape[1]
        parts = torch.split(direction.view(groups, sum(qkv), columns), list(qkv), dim=1)
        factors = [factor(part.reshape(-1, columns)).view(groups, -1, columns) for part in parts]
        update = torch.cat(factors, dim=1).view(direction.shape)
    param.add_(update, alpha=-lr)


def reference_shards(params: Sequence[torch.Tensor], num_ranks: int) -> list[list[int]]:
    """Indices of each rank's parameters: sorted by size, dealt out back and forth, as layer-wise sharding natively
    does."""
    back_and_forth = [*range(num_ranks), *reversed(range(num_ranks))]
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    for place, index in enumerate(sorted(range(len(params)), key=lambda i: params[i].numel())):
        shards[back_and_forth[place % len(back_and_forth)]].append(index)
    return shards


def reference_layer_wise_step(
    params: Sequence[torch.Tensor], step_one: Callable[[int], None], shards: list[list[int]], group: dist.ProcessGroup
) -> None:
    """Each rank steps its parameters, then all are gathered in flat buffers and copied, as natively."""
    rank = dist.get_rank(group)
    for index in shards[rank]:
        step_one(index)
    flat = _flatten_dense_tensors([params[i] for i in shards[rank]]) if shards[rank] else params[0].new_empty(0)
    gathered = [params[0].new_empty(sum(params[i].numel() for i in shard)) for shard in shards]
    if dist.get_backend(group) == "gloo":  # which has no uneven all-gather
        gathered[rank].copy_(flat)
        for source, buffer in enumerate(gathered):
            dist.broadcast(buffer, dist.get_global_rank(group, source), group=group)
    else:
        dist.all_gather(gathered, flat, group=group)
    for source, (buffer, shard) in enumerate(zip(gathered, shards)):
        if source != rank and shard:
            for received, index in zip(_unflatten_dense_tensors(buffer, [params[i] for i in shard]), shard):
                params[index].copy_(received)
