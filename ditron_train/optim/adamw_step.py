"""torch's AdamW, for the parameters that Muon does not take."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, cast

import torch
from torch.optim.adamw import adamw

from ditron_train.runtime.errors import NotSupportedError


def adamw_step(
    group: dict[str, Any], state: MutableMapping[torch.Tensor, dict[str, Any]], params: list[torch.Tensor]
) -> None:
    """One step of AdamW on ``params``, which have gradients, with the hyperparameters of their param group.

    Args:
        group: Names ``adamw_betas``, ``adamw_eps``, ``lr`` and ``weight_decay``.
        state: The optimizer's, by parameter; made here where a parameter has none yet.
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
