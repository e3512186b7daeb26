"""One call of a linear layer, as the policy and the tools see it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ditron_train.tp.nodes import NodesTPContext


class LinearCall(NamedTuple):
    """One call of a linear layer on this rank.

    Attributes:
        x: Input ``[s, b, K]`` or ``[tokens, K]``: of ``column`` the local part of the sequence.
        weight: This rank's ``[N, K]``.
        group: Tensor parallel group.
        is_frozen: Whether the weight needs no gradient: dgrad of ``column``, which nothing hides then, is another
            kernel.
        grad_y: Gradient of the result, for comparisons.
        bias: What is added inside the product of ``column``, in front of its rounding (Transformer Engine's layers).
        is_forward: Of what is compared: whether it is the forward pass alone.
        instead_of: Of what is compared: the fused path by this context takes the place of Megatron's.
    """

    x: torch.Tensor
    weight: torch.Tensor
    group: dist.ProcessGroup
    is_frozen: bool = False
    grad_y: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    is_forward: bool = False
    instead_of: NodesTPContext | None = None
