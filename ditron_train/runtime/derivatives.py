"""What backward passes of this package do not compute, said where it is asked for."""

from __future__ import annotations

import torch

from ditron_train.runtime.errors import NotSupportedError


def refuse_second_derivatives(op: str) -> None:
    """The first line of every backward: it computes gradients that have none of their own, which a loss of gradients
    would silently leave out.

    Args:
        op: Whose backward, in words.

    Raises:
        NotSupportedError: The backward runs with ``create_graph=True``; on every rank alike, before it moves anything.
    """
    if torch.is_grad_enabled():
        raise NotSupportedError(
            f"{op}: second derivatives (create_graph=True) are not computed here; use Megatron's own layers for them"
        )
