"""GPUs that a job runs on."""

from __future__ import annotations

from dataclasses import dataclass

from ditron_train.costs import Span, one_node
from ditron_train.runtime.profiles import Profile
from ditron_train.runtime.rates import NetworkRates


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, ``per_node`` of them in each of ``nodes``."""

    profile: Profile
    nodes: int
    per_node: int
    network: NetworkRates | None = None

    @property
    def world_size(self) -> int:
        """All GPUs."""
        return self.nodes * self.per_node

    def span(self, ranks: int, stride: int) -> Span:
        """A group of ``ranks`` every ``stride``-th of which counts, as Megatron lays groups out."""
        if ranks == 1:
            return one_node(1)
        per_node = min(max(self.per_node // stride, 1), ranks)
        while ranks % per_node:
            per_node -= 1
        return Span(ranks, per_node, self.network if per_node < ranks else None)
