"""The plan's NumPy twin by property, against the native order computed as megatron-core computes it; shapes that are
refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.ep.handle import HostCounts, LayoutShape
from ditron_train.runtime.errors import NotSupportedError
from tests.ep.layout_twin import plan_on_host


@st.composite
def routings(draw):
    world_size, local = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    experts = world_size * local
    topk = draw(st.integers(1, experts))
    seed = draw(st.integers(0, 10_000))
    generator = np.random.default_rng(seed)
    maps = []
    for _ in range(world_size):
        routed = np.zeros((draw(st.integers(0, 20)), experts), bool)
        for row in routed:
            row[generator.choice(experts, draw(st.integers(0, topk)), replace=False)] = True
        maps.append(routed)
    return maps, LayoutShape(world_size, experts, topk, num_chunks=4, min_chunk_tokens=2, min_chunk_bytes=0)


def native_rows(maps, shape):
    """(source, token, expert) of every row at each rank: permute by expert, all-to-all by rank, sort chunks by
    expert."""
    local = shape.experts_per_rank
    sent = [
        [
            [(s, int(t), e) for e in range(d * local, (d + 1) * local) for t in np.flatnonzero(routed[:, e])]
            for d in range(shape.world_size)
        ]
        for s, routed in enumerate(maps)
    ]
    result = []
    for rank in range(shape.world_size):
        received = [row for source in range(shape.world_size) for row in sent[source][rank]]
        result.append(sorted(received, key=lambda row: row[2]))  # stable: sources and tokens stay in order
    return result


@given(routings())
@settings(max_examples=150, deadline=None)
def test_the_plan_is_a_bijection_in_native_order(case):
    maps, shape = case
    plans = plan_on_host(maps, shape)
    for rank, (plan, rows) in enumerate(zip(plans, native_rows(maps, shape))):
        assert [tuple(row) for row in plan.row_token.tolist()] == rows
        assert sorted(plan.entries[:, 0].tolist()) == list(range(len(rows)))
        slots = sorted({int(slot) for p in plans for slot in p.dest_slots[:, rank] if slot >= 0})
        assert slots == list(range(len(slots)))
        for row, slot, place in plan.entries.tolist():
            source, token, expert = rows[row]
            assert slot == (token if source == rank else plans[source].dest_slots[token, rank])
            assert (place // shape.topk, plans[source].expert_ids[token, place % shape.topk]) == (token, expert)
    places = {
        (rows[entry[0]][0], entry[2])
        for plan, rows in zip(plans, native_rows(maps, shape))
        for entry in plan.entries.tolist()
    }
    assert len(places) == sum(int(routed.sum()) for routed in maps)


@given(routings())
@settings(max_examples=50, deadline=None)
def test_counts_are_read_back_from_messages(case):
    maps, shape = case
    w, local = shape.world_size, shape.experts_per_rank
    messages = np.zeros((w, shape.message_words), np.int32)
    for source, routed in enumerate(maps):
        padded = np.zeros((shape.ranks, shape.slots), np.int32)
        padded[:w, :local] = routed.sum(0).reshape(w, local)
        messages[source, : shape.columns] = padded.reshape(-1)
        messages[source, shape.columns : shape.columns + w] = routed.reshape(len(routed), w, local).any(2).sum(0)
        messages[source, shape.columns + shape.ranks] = len(routed)
        messages[source, shape.columns + shape.ranks + 1] = max(routed.sum(1), default=0)
    host = HostCounts.from_messages(messages, shape)
    assert np.array_equal(host.counts, [routed.sum(0) for routed in maps])
    assert host.rows(shape).tolist() == [len(plan.row_token) for plan in plan_on_host(maps, shape)]
    assert host.tokens.tolist() == [len(routed) for routed in maps]
    rows = sum(routed.sum(0) for routed in maps)
    assert host.min_rows == min(rows[rows > 0], default=2**31 - 1)
    assert host.widest == max((int(n) for routed in maps for n in routed.sum(1)), default=0)


@pytest.mark.parametrize(
    "world_size, experts, topk, words", [(4, 6, 2, "do not divide"), (2, 4, 5, "top-k 5"), (2, 0, 1, "0 experts")]
)
def test_refused_shapes(world_size, experts, topk, words):
    with pytest.raises(NotSupportedError, match=words):
        LayoutShape(world_size, experts, topk)


@given(st.integers(0, 200_000), st.sampled_from([0, 1, 4096, 14336, 1 << 20]))
def test_chunks_cover_all_tokens(num_tokens, row_bytes):
    shape = LayoutShape(8, 64, 8)
    chunk = shape.chunk_tokens(num_tokens, row_bytes)
    assert chunk & (chunk - 1) == 0 and chunk * shape.num_chunks >= num_tokens
