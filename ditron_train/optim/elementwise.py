"""The elementwise work around orthogonalisation: one fused pass on a GPU, torch's own operators elsewhere. Equal
bits.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal, cast

import torch
from torch.optim.adamw import adamw

from ditron_train.gemm.ops import on_device
from ditron_train.optim.kernels import momentum_kernel, update_kernel
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import kept_launch

DecayMethod = Literal["decoupled", "independent", "l2"]


_BLOCK = 2048


_TILE = 64


_SMALL_WEIGHT = 0.5  # below it torch.lerp starts from its first argument, else from its second


def _is_fusible(*tensors: torch.Tensor) -> bool:
    return all(t.device.type == "cuda" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def momentum_step(
    param: torch.Tensor,
    momentum: torch.Tensor,
    grad: torch.Tensor,
    *,
    lr: float,
    weight_decay: float,
    decay_method: DecayMethod,
    momentum_beta: float,
    use_nesterov: bool,
) -> torch.Tensor:
    """Weight decay and momentum, in place; returns the direction to orthogonalise.

        decoupled:   p = p - weight_decay * lr * p        independent: p = p - weight_decay * p
        l2:          g = g + weight_decay * p
        m = lerp(m, g, 1 - momentum_beta);  direction = lerp(g, m, momentum_beta) with nesterov, else m

    Args:
        param: Changed in place by decoupled and independent decay.
        momentum: Changed in place.
        grad: Left as it is, by l2 decay too.
        lr: Learning rate.
        weight_decay: 0 for none.
        decay_method: One of the formulas above.
        momentum_beta: How much of the momentum stays.
        use_nesterov: Whether to look ahead.

    Returns:
        The direction, of ``grad``'s type; ``momentum`` itself without nesterov (do not write to it).
    """
    decay_alpha = {"decoupled": -weight_decay * lr, "independent": -weight_decay, "l2": weight_decay}[decay_method]
    if not _is_fusible(param, momentum, grad) or grad.numel() == 0:
        if weight_decay != 0 and decay_method == "l2":
            grad = grad.add(param, alpha=decay_alpha)
        elif weight_decay != 0:
            param.add_(param, alpha=decay_alpha)
        momentum.lerp_(grad, 1 - momentum_beta)
        return grad.lerp(momentum, momentum_beta) if use_nesterov else momentum

    direction = torch.empty_like(grad) if use_nesterov else momentum
    decay = "none" if weight_decay == 0 else "l2" if decay_method == "l2" else "decoupled"
    launch = kept_launch(
        momentum_kernel,
        -(-grad.numel() // _BLOCK),
        grad.device.index,
        DECAY=decay,
        MOMENTUM_SMALL=abs(1 - momentum_beta) < _SMALL_WEIGHT,
        NESTEROV=use_nesterov,
        NESTEROV_SMALL=abs(momentum_beta) < _SMALL_WEIGHT,
        BLOCK=_BLOCK,
    )
    scalars = (float(decay_alpha), float(1 - momentum_beta), float(momentum_beta))
    with on_device(grad.device):
        launch(param, momentum, grad, direction, grad.numel(), *scalars)
    return direction


def apply_update(
    param: torch.Tensor, x: torch.Tensor, *, transposed: bool, scale: float, extra_scale: float, lr: float
) -> None:
    """p = p - lr * ((x * scale) * extra_scale), in place.

    Args:
        param: [rows, columns], or [groups, rows / groups, columns] if the rows of a component are interleaved with
            others' (a view of the whole weight); unit inner stride.
        x: The orthogonal factor, [rows, columns], or [columns, rows] if ``transposed``.
        transposed: See ``x``.
        scale: Of the shape, ``muon_scale``.
        extra_scale: Of the user.
        lr: Learning rate.
    """
    if param.numel() == 0:
        return
    whole = param if param.dim() == 3 else param.unsqueeze(0)
    num_groups, rows_per_group, columns = whole.shape
    if x.stride(1) != 1 and x.stride(0) == 1:  # a transposed view of what the kernel can read
        x, transposed = x.mT, not transposed
    if param.device.type != "cuda" or param.dtype != torch.float32 or param.stride(-1) != 1 or x.stride(1) != 1:
        update = (x.mT if transposed else x).to(torch.float32) * scale * extra_scale
        whole.add_(update.reshape(whole.shape).to(param.dtype), alpha=-lr)
        return
    rows = num_groups * rows_per_group
    num_programs = -(-rows // _TILE) * -(-columns // _TILE)
    strides = (whole.stride(0), whole.stride(1), x.stride(0))
    constants = dict(TRANSPOSE=transposed, BLOCK_M=_TILE, BLOCK_N=_TILE)
    launch = kept_launch(update_kernel, num_programs, x.dtype, param.device.index, **constants)
    with on_device(param.device):
        launch(whole, x, rows, columns, rows_per_group, *strides, float(scale), float(extra_scale), float(-lr))


def adamw_step(
    group: dict[str, Any], state: MutableMapping[torch.Tensor, dict[str, Any]], params: list[torch.Tensor]
) -> None:
    """One step of AdamW on ``params``, which have gradients, with the hyperparameters of their param group.

    Args:
        group: Names ``adamw_betas``, ``adamw_eps``, ``lr`` and ``weight_decay``.
        state: The optimizer's, by parameter; made here if a parameter has none yet.
        params: Updated in place; an empty list is allowed.

    Raises:
        NotSupportedError: A sparse gradient.
    """
    if not params:
        return
    if any(cast(torch.Tensor, param.grad).is_sparse for param in params):
        raise NotSupportedError("AdamW does not take sparse gradients")
    for param in params:
        own = state[param]
        if "exp_avg" not in own:
            own["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            own["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            own["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    beta1, beta2 = group["adamw_betas"]
    adamw(
        params,
        [cast(torch.Tensor, param.grad) for param in params],
        [state[param]["exp_avg"] for param in params],
        [state[param]["exp_avg_sq"] for param in params],
        [],
        [state[param]["step"] for param in params],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["adamw_eps"],
        maximize=False,
    )
