"""Runs a function on ranks of simulated nodes (``tests/nodes/simulated_nodes.py``): own network, host name and
``/dev/shm`` each.

    assert run_on_nodes(2, 2, body, 10) == [0, 10, 20, 30]

As ``tests.support.processes``; ranks of a node share memory, and what crosses nodes passes a limited link. Tests are
skipped, with the reason, if a machine forbids namespaces.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.patience import HANG_S
from tests.support.processes import WorkerPool

RATE_MBIT = 400.0  # an eighth, or less, of what gloo moves inside a node


@functools.lru_cache
def _simulated_nodes() -> ModuleType:
    path = Path(__file__).parents[1] / "nodes" / "simulated_nodes.py"
    spec = importlib.util.spec_from_file_location("simulated_nodes", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.lru_cache
def unsupported_reason_nodes() -> str | None:
    """Why this machine cannot pose nodes, or None."""
    return _simulated_nodes().unsupported_reason()


class NodesPool(WorkerPool):
    """Live processes on simulated nodes, which are neighbours in one gloo group.

    Attributes:
        nodes: To slow down.
    """

    def __init__(self, num_nodes: int, ranks: int, env: Mapping[str, str] | None, rate_mbit: float) -> None:
        if unsupported_reason_nodes() is not None:
            pytest.skip(unsupported_reason_nodes())
        self.nodes = _simulated_nodes().SimulatedNodes(num_nodes, rate_mbit)

        def of_rank(rank: int) -> dict[str, str]:
            node, local = divmod(rank, ranks)
            own = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks)}
            return {**own, **self.nodes.environment(node), "DITRON_TEST_NODE": str(self.nodes.holder(node))}

        try:
            super().__init__(num_nodes * ranks, env, of_rank)
        except BaseException:
            self.nodes.close()
            raise

    def close(self) -> None:
        """As ``WorkerPool.close``; the namespaces end, too."""
        super().close()
        self.nodes.close()


_pools: dict[tuple[int, int], NodesPool] = {}


def run_on_nodes(
    num_nodes: int,
    ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = HANG_S,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """As ``run_workers``, on ``ranks`` processes of each node."""
    pool = _pools.get((num_nodes, ranks))
    if pool is None or not pool.is_alive:
        if pool is not None:
            pool.close()
        pool = _pools[num_nodes, ranks] = NodesPool(num_nodes, ranks, None, RATE_MBIT)
    return pool.values(fn, args, timeout_s, env)


@contextlib.contextmanager
def nodes_pool(
    num_nodes: int, ranks: int, *, env: Mapping[str, str] | None = None, rate_mbit: float = RATE_MBIT
) -> Iterator[NodesPool]:
    """Fresh processes, whose nodes the caller may slow down meanwhile."""
    with NodesPool(num_nodes, ranks, env, rate_mbit) as pool:
        yield pool


@atexit.register
def _shut_down() -> None:
    while _pools:
        _pools.popitem()[1].close()
