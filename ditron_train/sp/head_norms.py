"""Norms of single heads (of q, of k) between the QKV projection and its exchange.

A head's row is normalised alone, so forward normalises what has arrived: norm and exchange may change places. The
gradient of a norm's weight is a sum over rows, though, in an order that follows from which rows a rank has. So
backward computes the norms again on the rows that stock Megatron normalises, those of this rank with all heads, and
runs the modules' own backward there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp.layouts import HeadsLayout, split_by_heads

#: One for each part (q, k, v); None if a part is left as it is.
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
        grad: Of the same columns after the norms; same shape.
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
        with torch.enable_grad(), _leaves_of(norm) as parameters:
            rows = split_by_heads(mixed, layout, world_size)[index].detach().requires_grad_()
            # With its hooks, as when activations are computed again: they may change what comes in, out and back.
            out = norm(rows)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        grad_rows, *found = torch.autograd.grad(out, [rows, *trained], grads[index].contiguous())
        into.copy_(grad_rows.view(into.shape))
        left = iter(found)
        of_parameters += [next(left) if parameter.requires_grad else None for parameter in parameters]
    return result.view(grad.shape), of_parameters


@contextlib.contextmanager
def _leaves_of(norm: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Inside, ``norm`` has other parameters of the same memory, which are given: hooks on its own run once, on the
    gradients that autograd gets."""
    own = [(module, module._parameters) for module in norm.modules()]
    leaves = {
        parameter: torch.nn.Parameter(parameter.detach(), parameter.requires_grad) for parameter in norm.parameters()
    }
    try:
        for module, named in own:
            module._parameters = {name: None if one is None else leaves[one] for name, one in named.items()}
        yield list(leaves.values())
    finally:
        for module, named in own:
            module._parameters = named
