"""Times of communication between ranks, inside a node and across nodes, in us: NCCL's, and copy engines'."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ditron_train.data.rates import MachineRates, NetworkRates

_GBPS = 1e3  # bytes a us


@dataclass(frozen=True)
class Span:
    """Where the ranks of a group are.

    Attributes:
        ranks: All of them.
        per_node: How many of them one node holds.
        network: Between nodes; None if they are on one.
    """

    ranks: int
    per_node: int
    network: NetworkRates | None = None

    def __post_init__(self) -> None:
        assert self.ranks % self.per_node == 0 and (self.network is not None or self.ranks == self.per_node)

    @property
    def nodes(self) -> int:
        """Nodes that hold ranks of the group."""
        return self.ranks // self.per_node


def one_node(ranks: int) -> Span:
    """A group inside one node."""
    return Span(ranks, ranks)


def _ring_gbps(ranks: int, rates: MachineRates) -> float:
    """Of NCCL's rings inside a node, between the measured 2, 4 and 8 ranks along the logarithm."""
    place = min(max(math.log2(max(ranks, 2)) - 1, 0.0), 2.0)
    known = (rates.nccl_pair_gbps, rates.nccl_gbps, rates.nccl_node_gbps, rates.nccl_node_gbps)
    low = int(place)
    return known[low] + (place - low) * (known[low + 1] - known[low])


def ring_us(num_bytes: float, span: Span, rates: MachineRates) -> float:
    """NCCL's all-gather to, or reduce-scatter of, ``num_bytes`` on each rank. Nothing on one rank.

    Across nodes every ring leaves a node by one adapter: all rings together move what the node's adapters do.
    """
    if span.ranks == 1:
        return 0.0
    gbps, latency_us = math.inf, 0.0
    if span.per_node > 1:
        gbps = _ring_gbps(span.per_node, rates)
        latency_us = rates.nccl_latency_us + rates.nccl_hop_us * (span.per_node - 2)
    if span.network is not None and span.nodes > 1:
        gbps = min(gbps, span.per_node * span.network.gpu_gbps * span.network.reached)
        latency_us += max(rates.nccl_latency_us - latency_us, 0.0) + span.network.latency_us * (span.nodes - 1)
    return latency_us + num_bytes * (span.ranks - 1) / span.ranks / (gbps * _GBPS)


def all_to_all_us(num_bytes: float, span: Span, rates: MachineRates) -> float:
    """NCCL's all-to-all of ``num_bytes`` a rank, its own share among them: the links inside and the adapters work
    beside each other. ``num_bytes`` are those of the rank that sends or receives most."""
    if span.ranks == 1:
        return 0.0
    inside = num_bytes * (span.per_node - 1) / span.ranks / (rates.alltoall_gbps * _GBPS)
    latency_us = rates.nccl_latency_us
    outside = 0.0
    if span.network is not None and span.nodes > 1:
        outside = rail_us(num_bytes * (span.ranks - span.per_node) / span.ranks, span.network)
    return latency_us + max(inside, outside)


def rail_us(num_bytes: float, network: NetworkRates) -> float:
    """What one GPU sends to another node, while as much comes from there."""
    return network.latency_us + num_bytes / (network.gpu_gbps * network.reached * _GBPS)


def send_us(num_bytes: float, rates: MachineRates, *, ranks: int, both_ways: bool) -> float:
    """NCCL's send to the next rank inside a node, in the way of nothing; ``both_ways``: while another one receives."""
    if num_bytes >= rates.p2p_large_bytes:
        gbps = rates.p2p_large_gbps
    elif ranks == 2:
        gbps = rates.p2p_pair_gbps
    else:
        gbps = rates.p2p_ring_gbps if both_ways else rates.p2p_gbps
    return rates.p2p_latency_us + num_bytes / (gbps * _GBPS)


def message_us(num_bytes: float, rates: MachineRates) -> float:
    """A message between stages by copy engine."""
    return rates.message_us + num_bytes / (rates.link_gbps * _GBPS)


def copied_us(num_bytes: float, ranks: int, rates: MachineRates) -> float:
    """Copy engines that bring a rank its share of ``num_bytes`` from each other one, a command each."""
    if ranks == 1:
        return 0.0
    return rates.start_us + num_bytes * (ranks - 1) / ranks / (rates.link_gbps * _GBPS) + rates.chunk_us * (ranks - 1)


def beside_us(compute_us: float, exchange_us: float, share: float) -> float:
    """Both started together: the longer one, and ``share`` of the shorter, by which they hold each other up."""
    return max(compute_us, exchange_us) + share * min(compute_us, exchange_us)
