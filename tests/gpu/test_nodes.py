"""Sums over nodes that the ranks pose: the process group's own reduce-scatter, bit for bit, forward and backward.

Two ranks are nodes of one rank each, and NCCL's own: two numbers have one sum, in either order. Of more ranks each
node has two, whose memory is a node's own, and the order counts.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ditron_train.symm.nodes import NodeGroups, forget_nodes
from ditron_train.tp.linear import column_linear, row_linear
from ditron_train.tp.nodes import get_nodes_tp_context

ROWS, K, N = 256, 512, 384  # of a rank; K and N of the layer's part


@pytest.fixture
def context(device, monkeypatch):
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    ranks_per_node = 2 if dist.get_world_size() > 2 else 1
    place = ("simulated", str(dist.get_rank() // ranks_per_node), "0")
    monkeypatch.setattr("ditron_train.symm.nodes.node_of_process", lambda: place)
    forget_nodes()
    yield get_nodes_tp_context(dist.group.WORLD, device)
    forget_nodes()


@pytest.fixture
def sends(monkeypatch):
    """What this rank starts along its rail."""
    found, start = [], NodeGroups.start_along_rail
    monkeypatch.setattr(NodeGroups, "start_along_rail", lambda *args: (found.append(1), start(*args))[1])
    return found


def _reduce_scatter(partial):
    out = partial.new_empty(len(partial) // dist.get_world_size(), partial.shape[1])
    dist.reduce_scatter_tensor(out, partial.contiguous())
    return out


def _gather(x):
    out = x.new_empty(len(x) * dist.get_world_size(), x.shape[1])
    dist.all_gather_into_tensor(out, x)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linears_over_nodes(context, device, all_equal, sends, dtype):
    """Products of these weights are exact, so that each result is a sum over ranks in one order; gradients of weights
    are cuBLAS's."""
    rank, world = context.rank, context.world_size
    generator = torch.Generator(device).manual_seed(rank)
    weight = torch.zeros(N, K, device=device).fill_diagonal_(2.0 ** (rank % 3)).to(dtype).requires_grad_()
    # Rows once, and a sum for each node but the last; a node's first rank begins one more, with its neighbour's.
    nodes = context.nodes
    expected_sends = 2 * (nodes.num_nodes - 1) + (nodes.local_size > 1 and nodes.local == 0)

    def values(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    for layer, rows, rows_out in ((column_linear, ROWS, ROWS * world), (row_linear, ROWS * world, ROWS)):
        x, grad_y = values(rows, K).requires_grad_(), values(rows_out, N)
        with torch.no_grad():
            if layer is column_linear:
                expected = _gather(x) @ weight.t(), _reduce_scatter(grad_y @ weight), grad_y.t() @ _gather(x)
                product = (ROWS * world, K, N)
            else:
                expected = _reduce_scatter(x @ weight.t()), _gather(grad_y) @ weight, _gather(grad_y).t() @ x
                product = (ROWS * world, N, K)
        assert context.sums_by_rails(*product[:2], dtype) and context.ring_step(*product[:2], dtype) == 1
        for call in range(2):
            x.grad = weight.grad = None
            del sends[:]
            y = layer(x, weight, context=context)
            y.backward(grad_y)
            for found, one in zip((y.detach(), x.grad, weight.grad), expected, strict=True):
                assert all_equal(found, one)
            if call > 0:  # at the first nodes also tell each other whether they have the memory
                assert all_equal(torch.tensor(len(sends)), torch.tensor(expected_sends))  # on every rank, or none
    context.synchronize()
