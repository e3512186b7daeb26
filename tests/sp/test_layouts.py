"""Layouts: which rows and columns a rank holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.schedule.keys import chunks_of
from ditron_train.sp.layouts import HeadsLayout, global_rows, output_layout, packed_rows, qkv_layout


@given(st.integers(1, 9), st.integers(1, 20))
def test_the_ranks_rows_are_the_sequence_and_balanced(world_size, half):
    rows = [global_rows(rank, world_size, 2 * half) for rank in range(world_size)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(2 * half * world_size))
    # causal attention costs a row its index: every rank pays the same
    assert len({int(r.sum()) for r in rows}) == 1
    for rank, own in enumerate(rows):
        assert (own[0] // half, own[-1] // half) == chunks_of(rank, world_size)


@given(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 3))
def test_packed_sequences_are_each_cut_for_themselves(world_size, chunks, chunks_behind):
    """Rows of all ranks are the whole, each once; the table is that of every sequence by itself, one behind the
    other."""
    bounds = np.cumsum([0, *(2 * world_size * count for count in (*chunks, chunks_behind))])
    starts = torch.tensor(bounds[:-1], dtype=torch.int32)
    if bounds[-1] == 0:
        return
    table = packed_rows(starts, world_size, int(bounds[-1]) // world_size).numpy()
    assert sorted(table.reshape(-1).tolist()) == list(range(bounds[-1]))
    for rank in range(world_size):
        own = [
            start + global_rows(rank, world_size, (end - start) // world_size)
            for start, end in zip(bounds, bounds[1:])
        ]
        assert table[rank].tolist() == np.concatenate(own).tolist()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 16), st.integers(1, 16))
def test_qkv_layout_is_a_column_slice_of_megatrons_mixed_qkv(
    world_size, groups_per_rank, heads_per_group, head_dim, value_dim
):
    groups = groups_per_rank * world_size
    heads = groups * heads_per_group
    layout = qkv_layout(heads, groups, head_dim, world_size, value_head_dim=value_dim)
    assert layout.num_columns * world_size == heads * head_dim + groups * (head_dim + value_dim)
    assert [layout.num_heads(part) * world_size for part in range(3)] == [heads, groups, groups]
    out = output_layout(heads, value_dim, world_size)
    assert out.num_columns * world_size == heads * value_dim and out.num_heads(0) * world_size == heads


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: qkv_layout(8, 2, 16, 4), "divisible by CP size"),
        (lambda: qkv_layout(6, 6, 16, 4), "divisible by CP size"),
        (lambda: qkv_layout(8, 3, 16, 1), "do not divide by 3 query groups"),
        (lambda: output_layout(6, 16, 4), "divisible by CP size"),
        (lambda: HeadsLayout(1, (16, 8, 8, 8), (8, 8, 8, 8)), "1 to 3 parts"),
        (lambda: HeadsLayout(1, (15,), (8,)), "not whole heads"),
        (lambda: HeadsLayout(0, (16,), (8,)), "empty"),
        (lambda: global_rows(0, 2, 5), "two chunks"),
    ],
)
def test_what_does_not_divide_is_refused(make, words):
    with pytest.raises(NotSupportedError, match=words):
        make()
