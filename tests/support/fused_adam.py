"""Stands for Transformer Engine's FusedAdam if that is not installed: its arithmetic, with torch's operators."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch


def fp32(value: float) -> float:
    """The nearest fp32 number."""
    return ctypes.c_float(value).value


def _root(values: torch.Tensor) -> torch.Tensor:
    """Rounded to nearest, as torch's is not on every CPU."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def multi_tensor_adam(
    chunk_size: int, flag: Any, lists: Any, lr: float, beta1: float, beta2: float, eps: float, step: int, mode: int,
    bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """As Transformer Engine's, without merged multiply-adds: on lists of gradients, parameters, and both moments."""
    corrections = [fp32(1 - fp32(beta) ** step) if bias_correction else 1.0 for beta in (beta1, beta2)]
    lr, eps, weight_decay, beta1, beta2 = map(fp32, (lr, eps, weight_decay, beta1, beta2))
    rest1, rest2 = fp32(1 - beta1), fp32(1 - beta2)
    for g, p, m, v in zip(*lists):
        if not mode:
            g = g + weight_decay * p
        m.copy_(beta1 * m + rest1 * g)
        v.copy_(beta2 * v + rest2 * g * g)
        update = (m / corrections[0]) / (_root(v / corrections[1]) + eps)
        if mode:
            update = update + weight_decay * p
        p.copy_(p - lr * update)


class FusedAdam(torch.optim.Optimizer):
    """As Transformer Engine's, with fp32 parameters and states."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, bias_correction: bool = True, adam_w_mode: bool = True, capturable: bool = False,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.adam_w_mode, self.capturable, self.master_weights = int(adam_w_mode), capturable, False
        self.multi_tensor_adam = multi_tensor_adam

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        """One step; a group without parameters does not count it."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            lists: list[list[torch.Tensor]] = [[], [], [], []]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                if p.grad is not None:
                    for one, tensor in zip(lists, (p.grad, p, state["exp_avg"], state["exp_avg_sq"])):
                        one.append(tensor)
            values = group["lr"], *group["betas"], group["eps"], group["step"], self.adam_w_mode
            self.multi_tensor_adam(
                2048 * 32, None, lists, *values, int(group["bias_correction"]), group["weight_decay"]
            )
