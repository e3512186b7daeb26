"""What the workers of the test of second derivatives run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.tp import column_linear, get_tp_context, row_linear


def gradients_of_gradients() -> list[str]:
    """What each layer says to a penalty on its gradient; each has a first gradient afterwards."""
    context = get_tp_context(dist.group.WORLD, torch.device("cpu"))
    words = []
    for layer, weight in ((column_linear, torch.randn(32, 16)), (row_linear, torch.randn(16, 16))):
        x, weight = torch.randn(32, 16, requires_grad=True), weight.requires_grad_()
        try:
            (grad,) = torch.autograd.grad(layer(x, weight, context=context).sum(), x, create_graph=True)
            (grad**2).sum().backward()
            words.append(f"no error, {weight.grad}")
        except NotSupportedError as error:
            words.append(str(error))
        layer(x, weight, context=context).sum().backward()
        assert x.grad is not None and weight.grad is not None
    return words
