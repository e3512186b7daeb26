"""Norms of single heads (of q, of k) between the QKV projection and its exchange.

A head's row is normalised alone, so forward normalises what has arrived: norm and exchange may change places. The
gradient of a norm's weight is a sum over rows, though, in an order that follows from which rows a rank has. So
backward computes the norms again on the rows that Megatron's path normalises, those of this rank with all heads, and
runs the modules' own backward there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp.layouts import HeadsLayout, split_by_heads

#: One for each part (q, k, v); None where a part is left as it is.
Norms = Sequence[torch.nn.Module | None]


def parameters_of(norms: Norms) -> list[torch.Tensor]:
    """The parameters of all norms, in the order of ``backward_of_norms``."""
    return [parameter for norm in norms if norm is not None for parameter in norm.parameters()]


@outside_compile
def normalised(parts: Sequence[torch.Tensor], norms: Norms) -> tuple[torch.Tensor, ...]:
    """Each part [..., heads, d] by its norm, whose hooks run; as they are without norms."""
    if not norms:
        return tuple(parts)
    return tuple([part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True)])


@outside_compile
def backward_of_norms(
    mixed: torch.Tensor, grad: torch.Tensor, norms: Norms, layout: HeadsLayout, world_size: int
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Gradients of the projection's result and of the norms' parameters.

    Args:
        mixed: [s / world, b, columns of all heads], what the projection gave on this rank.
        grad: Of the same columns behind the norms; same shape.
        norms: One for each part.
        layout: Columns of one rank.
        world_size: Ranks of the group.

    Returns:
        The gradient [s / world, b, columns], and one for each of ``parameters_of(norms)``, None for a frozen one.
    """
    grouped = grad.view(*grad.shape[:2], world_size * layout.num_groups, -1)
    in_groups = torch.split(grouped, list(layout.widths), dim=3)
    grads = split_by_heads(grad, layout, world_size)
    result = torch.empty_like(grouped)
    of_parameters: list[torch.Tensor | None] = []
    for index, (norm, into) in enumerate(zip(norms, torch.split(result, list(layout.widths), dim=3), strict=True)):
        if norm is None:
            into.copy_(in_groups[index])
            continue
        with torch.enable_grad():
            rows = split_by_heads(mixed, layout, world_size)[index].detach().requires_grad_()
            # The module's own forward, without its hooks: they have run in the forward pass.
            out = norm.forward(rows)
        parameters = list(norm.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        grad_rows, *found = torch.autograd.grad(out, [rows, *trained], grads[index].contiguous())
        into.copy_(grad_rows.view(into.shape))
        left = iter(found)
        of_parameters += [next(left) if parameter.requires_grad else None for parameter in parameters]
    return result.view(grad.shape), of_parameters
