"""From how many rows on two products of an expert are equal."""

from __future__ import annotations

import pytest
import torch

from ditron_train.ep.plan import (
    MOST_ROWS,
    NEVER,
    RowProduct,
    WgradProduct,
    min_rows,
    min_rows_here,
    most_rows_here,
    most_rows_of_call,
    tried_rows,
)

ROWS = torch.arange(2.0 * MOST_ROWS).view(MOST_ROWS, 2)


def _differing_at(*sizes):
    """A product, one element of which is another for experts of these numbers of rows; and the calls of it."""
    calls = []

    def product(batch, splits):
        calls.append(splits)
        out = batch.clone()
        assert len(splits) == 7
        for part, size in zip(out.split(splits), splits):
            assert torch.equal(part, ROWS[:size])
            if size in sizes:
                part[-1, 0] += 1
        return out

    return product, calls


@pytest.mark.parametrize(
    "sizes, expected",
    [((), 1), ((1,), 129), ((16, 128), 129), ((129,), 257), ((257, 400), 513), ((2048,), 2049), ((2051,), NEVER)],
)
def test_the_last_size_that_differs_decides(sizes, expected):
    tried = tried_rows() if 2048 not in sizes else [*range(1, 2049, 89), 2048]
    native, calls = _differing_at(*sizes)
    assert min_rows(native, lambda batch, splits: batch, ROWS, tried, 7, 8192) == expected
    assert [size for splits in calls for size in splits if size] == tried
    assert max(map(sum, calls)) <= 8192


def test_rows_of_a_call():
    found = [most_rows_of_call(row_bytes) for row_bytes in (2 * 2048, 2 * 28672, 1 << 20)]
    assert found == [16384, 4681, MOST_ROWS]


def test_no_memory_to_measure_in(monkeypatch):
    def refuses(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr("ditron_train.ep.plan.order_probe_matrix", refuses)
    assert min_rows_here(RowProduct((24, 24), 1, True), torch.float32, torch.device("cpu")) == NEVER


def test_sizes_that_are_tried():
    assert tried_rows()[:512] == list(range(1, 513)) and max(tried_rows()) > MOST_ROWS - 9
    odd = [size % 16 for size in tried_rows() if size > 512]
    assert set(odd) == set(range(16)), "whatever sizes are multiples of"


@pytest.mark.parametrize("transpose", [True, False], ids=["forward", "dgrad"])
def test_products_that_sum_alike(monkeypatch, transpose):
    """In the interpreter, of few sizes, of small integers: every sum is exact. Then of others than native's."""
    monkeypatch.setattr("ditron_train.ep.plan.tried_rows", lambda: [1, 40])
    monkeypatch.setattr("ditron_train.ep.plan.MOST_ROWS", 40)
    product, cpu = RowProduct((16, 16), 3, transpose), torch.device("cpu")
    added = []

    def native(splits, n, k, dtype, device):
        def multiply(rows, grad, weights):
            added.append(sum(splits))
            return torch.cat([part @ (w.t() if transpose else w) for part, w in zip(rows.split(splits), weights)])

        return {"forward": multiply, "dgrad": multiply}

    monkeypatch.setattr("ditron_train.ep.plan.native_products", native)
    values = torch.randint(-3, 4, (64, 64), generator=torch.Generator().manual_seed(1)).float()
    monkeypatch.setattr(
        "ditron_train.ep.plan.order_probe_matrix", lambda shape, *_, **__: values[: shape[0], : shape[1]].contiguous()
    )
    assert min_rows_here(product, torch.float32, cpu) == 1 and added == [41]
    assert min_rows_here(product, torch.float32, cpu) == 1 and added == [41], "asked once"
    min_rows_here.cache_clear()
    monkeypatch.setattr("ditron_train.ep.plan.native_products", lambda *sizes: other(native(*sizes)))

    def other(products):
        return {name: lambda *args, one=one: one(*args) + 1 for name, one in products.items()}

    assert min_rows_here(product, torch.float32, cpu) == NEVER
    min_rows_here.cache_clear()


@pytest.mark.parametrize("into", [None, torch.float32], ids=["new tensors", "main_grad"])
def test_up_to_how_many_rows_weight_gradients_are_equal(monkeypatch, into):
    """In the interpreter, of few sizes: of native products that are the fused ones, then of ones that differ for some
    numbers of rows, or for none; then without memory."""
    from ditron_train.ep import plan
    from ditron_train.ep.grouped_gemm import group_wgrad, group_wgrad_into, row_tiles

    monkeypatch.setattr(plan, "tried_rows", lambda: [1, 9, 24, 40, 41])
    monkeypatch.setattr(plan, "MOST_ROWS", 41)
    differing, added = set(), []

    def native(a, b, out, dtype, *, layout, m_splits, grad, accumulate, use_split_accumulator):
        assert layout == "NT" and grad and use_split_accumulator and len(m_splits) == len(a) == len(b) == len(out) == 3
        added.append(accumulate)
        rows, gradients, tiles = torch.cat(a), torch.cat(b), row_tiles(torch.tensor(m_splits), sum(m_splits))
        if into is None:
            for one, product in zip(out, group_wgrad(gradients, rows, tiles).unbind(0)):
                one.copy_(product)
        else:
            group_wgrad_into(gradients, rows, tiles, out, overwrites=not accumulate)
        for one, size in zip(out, m_splits):
            one[-1, -1] += size in differing

    monkeypatch.setattr(plan, "grouped_gemm", native)
    product, cpu = WgradProduct((16, 24), 3, into), torch.device("cpu")
    for sizes, expected in (((), 41), ((41, 24), 23), ((1,), 0), ((0,), -1)):
        differing.clear()
        differing.update(sizes)
        assert most_rows_here(product, torch.float32, cpu) == expected
        most_rows_here.cache_clear()
    assert set(added) == ({False} if into is None else {False, True})

    def refuses(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(plan, "grouped_gemm", refuses)
    assert most_rows_here(product, torch.float32, cpu) == 0
    most_rows_here.cache_clear()
