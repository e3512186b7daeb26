"""Ulysses' ops at ever-new lengths: decided once, the same results, buffers that do not grow."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")


def _exchanges_of(most_rows: str) -> tuple[list[bool], list[int], int]:
    with mock.patch.dict(os.environ, DITRON_ROWS=most_rows):
        return _exchanges()


def _exchanges() -> tuple[list[bool], list[int], int]:
    """At each length, packed sequences: whether the exchange is fused and gives what all-to-alls give; bytes of the
    arena; how many decisions were made."""
    from ditron_train.megatron.sp.exchange import AttentionShape, Exchange
    from ditron_train.megatron.sp.spec import ExchangeOp, route_exchange
    from ditron_train.policy import gate

    group, shape = dist.group.WORLD, AttentionShape(4, 2, 8, 8)
    decided, decide = [], ExchangeOp.decide
    ExchangeOp.decide = lambda self, call, context: decided.append(call.rows) or decide(self, call, context)
    gate.forget("sp")
    right, held = [], []
    for rows in (40, 12, 30, 6, 36, 38, 34, 12):
        generator = torch.Generator().manual_seed(rows + dist.get_rank())
        q, k, v = (torch.randn(rows, 1, heads, 8, generator=generator) for heads in (4, 2, 2))
        context = route_exchange(group, shape, q)
        fused, native = (Exchange(group, shape, one).to_heads(q, k, v) for one in (context, None))
        right.append(context is not None and all(map(torch.equal, fused, native)))
        held.append(context.arena.num_bytes)
    gate.forget("sp")
    ExchangeOp.decide = decide
    return right, held, len(decided)


def test_exchanges_of_packed_sequences_are_fused_at_every_length() -> None:
    for right, held, num_decided in run_workers(2, _exchanges_of, "80"):
        assert all(right) and len(set(held)) == 1
        assert num_decided == 1  # on GPUs each range of rows is timed by a decision of its own
