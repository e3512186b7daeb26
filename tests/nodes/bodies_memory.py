"""What ranks of simulated nodes run of which one has too little symmetric memory."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from ditron_train.runtime import logs
from ditron_train.runtime.errors import ArenaError
from ditron_train.symm.groups import make_group
from ditron_train.symm.nodes import NodeGroups
from ditron_train.tp.nodes import ag_gemm_over_nodes, gemm_rs_over_nodes, get_nodes_tp_context

_CPU = torch.device("cpu")
_ROWS, _K, _N = 6, 24, 16


@contextlib.contextmanager
def _capped(ranks, num_bytes):
    """``ranks`` may have ``num_bytes`` of symmetric memory for a group."""
    if dist.get_rank() in ranks:
        os.environ["DITRON_ARENA_BYTES"] = str(num_bytes)
    try:
        yield
    finally:
        os.environ.pop("DITRON_ARENA_BYTES", None)


def _everybody(name):
    return make_group(dist.group.WORLD, list(range(dist.get_world_size())), name)


def _peak_bytes(group):
    """Of symmetric memory that this rank's node has for a group over nodes, whose context is made where it is not."""
    return get_nodes_tp_context(group, _CPU).inner.arena.num_bytes


def linear_of_a_node_without_memory(kind, lacking, capped):
    """Why a layer is native where the ``capped`` ranks, a node, have no memory for the ``lacking`` part of it, and
    what is logged; with memory again, the next shape is by the fused path, with the bits of stock Megatron."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
    import ep_workers as workers

    from ditron_train.megatron.tp.linear_call import LinearCall
    from ditron_train.megatron.tp.spec import COLUMN, ROW
    from ditron_train.policy import fused_results, gate, native_results

    spec, world, rank = (COLUMN if kind == "column" else ROW), dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    weight = torch.zeros(_N, _K).fill_diagonal_(2.0 ** (rank % 3))  # products are exact
    with workers.groups():
        group = _everybody(f"{kind} {lacking}")

        def call_of(rows):
            x_rows, y_rows = (rows, rows * world) if kind == "column" else (rows * world, rows)
            x, grad_y = (torch.randn(*shape, generator=generator) for shape in ((x_rows, _K), (y_rows, _N)))
            return LinearCall(x, weight, group, grad_y=grad_y)

        call, num_bytes = call_of(_ROWS), 3000
        if lacking != "context":
            context = get_nodes_tp_context(group, _CPU)
            if lacking == "backward":  # the forward pass has what it needs
                op = ag_gemm_over_nodes if kind == "column" else gemm_rs_over_nodes
                op(call.x, weight, context=context)
            num_bytes = _peak_bytes(group)
        logs.forget_decisions()
        with _capped(capped, num_bytes):
            answer = gate.answer_for(spec, call)
        logged = logs.decisions()
        assert answer.context is None
        native_results(spec, call)  # all ranks come to it
        call = call_of(_ROWS + 1)
        fused = gate.answer_for(spec, call).context
        assert fused.inner is get_nodes_tp_context(group, _CPU).inner
        for expected, found in zip(native_results(spec, call), fused_results(spec, call, fused), strict=True):
            assert torch.equal(expected, found)
    return answer.reason, logged


def ops_of_a_node_without_memory(capped, given_back):
    """What each op raises where the ``capped`` ranks, a node, have no room for it; all ranks go on from there with
    this shape and an earlier one, once there is room.

    Args:
        given_back: Memory itself is missing, whose lack is seen when what the earlier shape had is given back: nor is
            there room for that one then.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    weight = torch.zeros(_N, _K).fill_diagonal_(2.0 ** (rank % 3))
    errors = []
    for op, lead in ((ag_gemm_over_nodes, 1), (gemm_rs_over_nodes, world)):
        group = _everybody(op.__name__)
        context = get_nodes_tp_context(group, _CPU)
        small, large = (torch.randn(rows * lead, _K) for rows in (2, 64))
        before = op(small, weight, context=context)
        lacking = _without_allocations(capped, context) if given_back else _capped(capped, _peak_bytes(group))
        with lacking:
            for x in (large, small if given_back else large):
                try:
                    op(x, weight, context=context)
                except ArenaError as error:
                    errors.append(str(error))
        _assert_same(op(small, weight, context=context), before)
        rows = op(large, weight, context=context)
        with mock.patch.object(NodeGroups, "start_telling", side_effect=AssertionError("all have room")):
            _assert_same(op(large, weight, context=context), rows)
    return errors


@contextlib.contextmanager
def _without_allocations(ranks, context):
    """``ranks`` cannot allocate symmetric memory of a node."""
    transport, error = type(context.inner.arena.transport), ArenaError("there is no memory")
    with (
        mock.patch.object(transport, "allocate", side_effect=error)
        if dist.get_rank() in ranks
        else contextlib.nullcontext()
    ):
        yield


def _assert_same(found, expected):
    if isinstance(expected, tuple):
        found, expected = found[0], expected[0]
    assert torch.equal(found, expected)
