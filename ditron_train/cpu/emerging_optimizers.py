"""Stands in for ``emerging_optimizers`` 0.1.0, which is not on PyPI, so that Megatron's native Muon can be the
reference.

What megatron-core 0.16.1 takes from it is written here from the published equations, in torch's operators alone.
Install it before ``megatron.core.optimizer.muon`` is imported; where the real package is installed, nothing is
changed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.optim.newton_schulz import CoefficientType, fp32_matmul_precision, muon_scale, step_coefficients

__all__ = ["OrthogonalizedOptimizer", "install", "is_stand_in"]

_PACKAGE = "emerging_optimizers"


def install() -> bool:
    """Makes ``import emerging_optimizers`` work; returns whether the stand-in is what it gives. Idempotent.

    Raises:
        RuntimeError: megatron-core's Muon was imported before without it.
    """
    if is_stand_in():
        return True
    if importlib.util.find_spec(_PACKAGE) is not None:
        return False
    if "megatron.core.optimizer.muon" in sys.modules:
        raise RuntimeError("megatron.core.optimizer.muon was imported before emerging_optimizers was there")
    package: Any = types.ModuleType(_PACKAGE)
    optimizers: Any = types.ModuleType(f"{_PACKAGE}.orthogonalized_optimizers")
    utilities: Any = types.ModuleType(f"{_PACKAGE}.orthogonalized_optimizers.muon_utils")
    package.orthogonalized_optimizers = optimizers
    package.is_ditron_stand_in = True
    optimizers.OrthogonalizedOptimizer = OrthogonalizedOptimizer
    optimizers.get_muon_scale_factor = muon_scale
    optimizers.muon_utils = utilities
    utilities.newton_schulz_tp = _newton_schulz_tp
    for module in (package, optimizers, utilities):
        module.__path__ = []  # a package, so that its submodules are found in sys.modules
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, loader=None, is_package=True)
        sys.modules[module.__name__] = module
    return True


def is_stand_in() -> bool:
    """Whether the stand-in is installed in this process."""
    return getattr(sys.modules.get(_PACKAGE), "is_ditron_stand_in", False)


def _newton_schulz(
    x: torch.Tensor,
    steps: int,
    coefficient_type: CoefficientType,
    transpose: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Of a whole matrix; with ``group`` of this rank's columns (behind ``transpose``), sums of all ranks added up."""
    transpose = x.shape[0] > x.shape[1] if transpose is None else transpose
    x = x.mT if transpose else x
    if group is None:
        x = torch.nn.functional.normalize(x, p=2, dim=(-2, -1), eps=1e-7)  # type: ignore[arg-type]
    else:
        x = x / _sum_over(group, (x * x).sum()).sqrt().clamp_min(1e-7)
    if torch.get_float32_matmul_precision() == "medium":
        x = x.to(torch.bfloat16)
    for a, b, c in step_coefficients(coefficient_type, steps):
        gram = x @ x.mT if group is None else _sum_over(group, x @ x.mT)
        polynomial = torch.addmm(gram, gram, gram, alpha=c, beta=b)
        x = torch.addmm(x, polynomial, x, alpha=1.0, beta=a)
    x = x.to(torch.float32)
    return x.mT if transpose else x


def _sum_over(group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x, group=group)
    return x


def _newton_schulz_tp(
    x: torch.Tensor,
    steps: int,
    coefficient_type: CoefficientType,
    tp_group: dist.ProcessGroup,
    partition_dim: int | None = None,
    mode: str = "duplicated",
) -> torch.Tensor:
    """Whole where the matrix is not cut; else gathered, computed on every rank and cut again, or (``distributed``) as
    it is cut."""
    if partition_dim is None:
        return _newton_schulz(x, steps, coefficient_type)
    if mode == "distributed":
        return _newton_schulz(x, steps, coefficient_type, transpose=partition_dim == 0, group=tp_group)
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather(shards, x.contiguous(), group=tp_group)
    whole = _newton_schulz(torch.cat(shards, dim=partition_dim), steps, coefficient_type)
    return whole.chunk(len(shards), dim=partition_dim)[dist.get_rank(tp_group)]


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum whose direction is replaced by what ``orthogonalize`` makes of it, matrix by matrix."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum_beta: float,
        *,
        use_nesterov: bool,
        weight_decay: float,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
    ) -> None:
        self.weight_decay_method = weight_decay_method
        self.fp32_matmul_prec = fp32_matmul_prec
        self.use_nesterov = use_nesterov
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        super().__init__(params, dict(lr=lr, momentum_beta=momentum_beta, weight_decay=weight_decay))

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Orthogonalizes a direction; subclasses split it or gather it."""
        return self.scaled_orthogonalize_fn(grad)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter with a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, group)
        return loss

    def _step_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad, decay, lr = param.grad, group["weight_decay"], group["lr"]
        assert grad is not None
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        if decay != 0 and self.weight_decay_method == "l2":
            grad = grad.add(param, alpha=decay)
        elif decay != 0:
            param.add_(param, alpha=-decay * lr)
        momentum = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum_beta"])
        direction = grad.lerp(momentum, group["momentum_beta"]) if self.use_nesterov else momentum
        with fp32_matmul_precision(self.fp32_matmul_prec):
            update = self.orthogonalize(param, direction)
        param.add_(update, alpha=-lr)
