"""Which ranks' rows are computed together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditron_train.schedule import groups_in_sequence
from ditron_train.schedule.groups import _LEAST_PRODUCT_US, _MARGIN

TIMES = st.floats(0, 1e4)


def waited_us(sizes, product_us, transfer_us, lost_us):
    """How long products wait for rows."""
    ranks, there_us, done_us, before, total, waited = 0, 0.0, 0.0, 0.0, sum(sizes), 0.0
    for size in sizes:
        ranks += size
        there_us = _MARGIN * transfer_us * (ranks - 1)
        after = product_us * ranks if ranks == total else max(0.0, product_us * ranks - lost_us)
        waited += max(0.0, there_us - done_us)
        done_us, before = max(done_us, there_us) + after - before, after
    return waited


@given(st.permutations(range(8)), st.integers(1, 8), TIMES, TIMES, TIMES)
def test_groups_are_in_order_and_nothing_is_waited_for_that_need_not_be(
    order, ranks, product_us, transfer_us, lost_us
):
    order = order[:ranks]
    groups = groups_in_sequence(order, product_us, transfer_us, lost_us)
    assert sum(groups, []) == order and all(groups)
    if product_us >= _LEAST_PRODUCT_US + lost_us:
        together, alone = (
            waited_us(sizes, product_us, transfer_us, lost_us)
            for sizes in ([len(group) for group in groups], [1] * ranks)
        )
        assert together <= alone + 1e-6 * (product_us + transfer_us) * ranks


@pytest.mark.parametrize(
    "product_us, transfer_us, lost_us, sizes",
    [
        (1200, 340, 0, [1, 2, 1]),  # 32 experts of 7168 x 4096, their first product
        (1200, 340, 300, [1, 2, 1]),
        (1200, 340, 800, [1, 1, 2]),
        (700, 340, 0, [1, 1, 2]),
        (600, 680, 0, [1, 1, 1, 1]),
        (30, 24, 0, [4]),  # the host is slower than both
        (60, 24, 0, [2, 2]),
        (60, 24, 100, [4]),
        (300, 10, 1000, [4]),  # few rows of each rank: no tile is of one alone
        (1000, 0, 0, [4]),
        (0, 100, 0, [4]),
    ],
)
def test_a_group_has_as_many_as_come_beside_the_ones_before(product_us, transfer_us, lost_us, sizes):
    assert [len(group) for group in groups_in_sequence([2, 3, 0, 1], product_us, transfer_us, lost_us)] == sizes
