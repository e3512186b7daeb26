"""How long the device has nothing to do because the host has not launched it yet.

The host waits for the device where a microbatch begins, since Megatron's ``get_batch`` copies from pageable memory,
and in each layer of experts forward, until it knows how many rows each gets. From there it has to get ahead again: a
part of the model takes no less than the host needs to launch it.

    forward, a short layer   host    |- layer 1 -|- layer 2 -|
                             device  .....|- 1 -|.....|- 2 -|      late in each layer
    backward                 host    |- 2 -|- 1 -|
                             device  |--- 2 ---|--- 1 ---|         ahead
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass

from ditron_train.costs import Estimate
from ditron_train.ep.cost_model import host_us as experts_host_us
from ditron_train.runtime.rates import MachineRates
from ditron_train.tools.predict.layers import Groups, Parts
from ditron_train.tools.predict.megatron_arguments import Job

# Of a layer's launches forward, by traces: norm, QKV projection and rotation; attention and output projection; the
# rest.
_FRONT, _CORE, _FEED_FORWARD = 0.5, 0.15, 0.35
_FRONT_PARTS, _CORE_PARTS = ("qkv", "rope"), ("attention", "proj", "heads")
_BACKWARD = 0.5  # of the host's time forward: autograd launches from C++
# Collectives of a column and a row parallel layer: with sequence parallelism a gather and a sum, backward two gathers
# and a sum, of which one gather is the row parallel one's; without it one sum. Of heads by Ulysses: q, k, v, attended.
_GATHERED, _GATHERED_AGAIN, _SUMMED, _HEADS = (1, 1), (2, 1), (0, 1), (3, 1)
_PRODUCTS, _GRADIENTS = 2, 4  # of an expert, forward and backward; gradients of rows and of weights
_MOST_LAYERS = 256  # are gone through one by one; more are like these
_FUSED_PRODUCTS = 1  # of those forward, in one kernel of ours together with the rows' return


@dataclass(frozen=True)
class Launched:
    """A part of a microbatch.

    Attributes:
        host_us: What the host needs to launch it.
        device_us: What the device takes for it.
        waits: Whether the host waits for the device before it.
    """

    host_us: float
    device_us: float
    waits: bool = False


def idle_us(parts: Iterable[Launched]) -> float:
    """How long the device waits for the host in parts that run one behind another, from a point where the host has
    waited for the device. What the host launches comes evenly over its time."""
    host = device = busy = 0.0
    for part in parts:
        if part.waits:
            host = max(host, device)
        begins = max(host, device)
        host += part.host_us
        device = max(begins + part.device_us, host)
        busy += part.device_us
    return device - busy


@dataclass(frozen=True)
class Side:
    """One of the two paths of a job.

    Attributes:
        job: What is trained.
        groups: Where ranks are.
        rates: Of the machine.
        ours: Whether it is ours; Megatron's else.
    """

    job: Job
    groups: Groups
    rates: MachineRates
    ours: bool

    def late_us(self, forward: Parts, backward: Parts, ends: Estimate) -> float:
        """What the device waits for the host in one microbatch.

        Args:
            forward, backward: A layer's parts, as of `layer_parts`.
            ends: Embedding, output layer and loss together.
        """
        num_layers = math.ceil(self.job.num_layers / self.job.pp)
        counted = min(num_layers, _MOST_LAYERS)
        first, second = self._layer(forward, backward=False), self._layer(backward, backward=True)[::-1]
        if self.job.words.get("recompute_granularity") == "full":
            second = first + second
        begins = Launched(self.rates.host_microbatch_us, 0.0)
        loss = Launched(self.rates.host_microbatch_us, self._device_us([ends]))
        return max(num_layers / _MOST_LAYERS, 1.0) * idle_us([begins, *first * counted, loss, *second * counted])

    def _device_us(self, parts: Iterable[Estimate]) -> float:
        return sum(one.ditron_us if self.ours else one.native_us for one in parts)

    def _is_fused(self, parts: Parts, *names: str) -> bool:
        """Whether one of these parts runs by the fused path: where that is off or not faster, both take as long."""
        return self.ours and any(name in parts and parts[name].ditron_us < parts[name].native_us for name in names)

    def _layer(self, parts: Parts, *, backward: bool) -> list[Launched]:
        """One pass of a layer, in the order of forward."""
        rates, captured, is_dense = self.rates, self._captured(), self.job.model.experts is None
        shares = [_FRONT_PARTS, _CORE_PARTS, ("experts",)]
        named = [self._device_us(one for name, one in parts.items() if name in share) for share in shares]
        front_us, core_us, experts_us = named
        rest_us = self._device_us(parts.values()) - sum(named)
        launches = [share * rates.host_layer_us * (_BACKWARD if backward else 1.0)
                    for share in (_FRONT, _CORE, _FEED_FORWARD)]  # fmt: skip
        column, row = self._collectives(parts, backward)
        launches[0] += column * rates.host_collective_us
        launches[1] += row * rates.host_collective_us
        if is_dense:
            launches[2] += (column + row) * rates.host_collective_us
        for index, us in enumerate(self._heads(parts)):
            launches[index] += us
        found = [Launched(launches[0], front_us), Launched(launches[1], core_us), Launched(launches[2], rest_us)]
        if "attn" in captured:
            found[:2] = [Launched(rates.host_graph_us, front_us + core_us)]
        if "mlp" in captured:  # with attention in one graph where that is captured, too
            found[-1] = Launched(0.0 if "attn" in captured else rates.host_graph_us, rest_us)
        if not is_dense:
            found.append(Launched(self._experts_us(parts, backward), experts_us, waits=not backward))
        return found

    def _collectives(self, parts: Parts, backward: bool) -> tuple[int, int]:
        """That stand beside a column and beside a row parallel layer."""
        if self.groups.tp.ranks == 1 or self._is_fused(parts, "qkv", "proj", "fc1", "fc2"):
            return 0, 0
        if not self.groups.sequence_parallel:
            return _SUMMED[::-1] if backward else _SUMMED
        return _GATHERED_AGAIN if backward else _GATHERED

    def _heads(self, parts: Parts) -> tuple[float, float]:
        """The host's time for exchanges of heads before and behind the attention."""
        groups = self.groups
        if groups.cp.ranks == 1 or not groups.ulysses or (groups.fuses_heads and self._is_fused(parts, "qkv", "proj")):
            return 0.0, 0.0
        return _HEADS[0] * self.rates.host_collective_us, _HEADS[1] * self.rates.host_collective_us

    def _captured(self) -> Set[str]:
        """Which blocks of a layer run as CUDA graphs, by the names of ``--cuda-graph-scope``; experts never do."""
        if self.job.words.get("cuda_graph_impl", "none") == "none":
            return frozenset()
        blocks = {"attn"} if self.job.model.experts is not None else {"attn", "mlp"}
        scope = self.job.words.get("cuda_graph_scope")
        return blocks if scope is None else blocks & set(scope.split())

    def _experts_us(self, parts: Parts, backward: bool) -> float:
        """The host's time for router, dispatch and combine, and for each product of each expert of a rank."""
        fuses, experts = self._is_fused(parts, "experts") and self.groups.ep.nodes == 1, self.job.model.experts
        products = _GRADIENTS if backward else _PRODUCTS - (_FUSED_PRODUCTS if fuses else 0)
        assert experts is not None
        products_us = products * experts / self.groups.ep.ranks * self.rates.host_grouped_us
        return experts_host_us(self.rates, 1.0)[1 if fuses else 0] + products_us
