"""Forward, and forward and backward, of one of Megatron's layers, on the same values native and fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ditron_train.tools.fp8.recipes import fp8_context
from ditron_train.tools.results import Pass

Run = Callable[[Any], list[torch.Tensor]]


class LayerPasses:
    """The passes of layers of one ``config``.

    Args:
        config: Says whether they run in FP8.
        x: Their input.
        grad: What comes back to their output.
        options: More arguments of a call.
    """

    def __init__(self, config: Any, x: torch.Tensor, grad: torch.Tensor, **options: Any) -> None:
        self._config, self.x, self._grad, self._options = config, x, grad, options

    def forward(self, layer: Any) -> list[torch.Tensor]:
        """The output, without gradients."""
        with torch.no_grad(), fp8_context(self._config):
            return [layer(self.x, **self._options)[0]]

    def forward_backward(self, layer: Any) -> list[torch.Tensor]:
        """The output, and the gradients of the input and of the parameters that are trained."""
        leaf = self.x.detach().requires_grad_()
        with fp8_context(self._config):
            y, _ = layer(leaf, **self._options)
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, [leaf, *trained], self._grad)]

    def both(self) -> Iterator[tuple[Pass, Run]]:
        """Each pass, by its direction."""
        yield "forward", self.forward
        yield "forward_backward", self.forward_backward


def contenders(run: Run, layers: Mapping[str, Any]) -> dict[str, Callable[[int], list[torch.Tensor]]]:
    """What a session times: a pass of each layer, by its name."""
    return {name: lambda index, one=layer: run(one) for name, layer in layers.items()}
