"""A compiler's backend that remembers what it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CountingBackend:
    """Has graphs compiled by ``backend``.

    Attributes:
        num_graphs: How many there were.
        targets: Names of what they call.
        traced: Files of this package that anything in them comes from.
    """

    def __init__(self, backend: str = "eager") -> None:
        from torch._dynamo.backends.registry import lookup_backend

        self._compile = lookup_backend(backend)
        self.num_graphs, self.targets, self.traced = 0, set(), set()

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.num_graphs += 1
        for node in graph.graph.nodes:
            if node.op in ("call_function", "call_method"):
                self.targets.add(getattr(node.target, "__name__", node.target))
            lines = (line.strip() for line in (node.meta.get("stack_trace") or "").splitlines())
            files = {line.split('"')[1] for line in lines if line.startswith('File "')}
            self.traced |= {name for name in files if "/ditron_train/" in name and "/ditron_train/cpu/" not in name}
        return self._compile(graph, inputs, **options)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.compile(function)``, which workers do not have."""
        import torch._dynamo as dynamo

        return dynamo.optimize(self)(function)
