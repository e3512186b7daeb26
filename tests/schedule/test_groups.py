"""Which ranks' rows are computed together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditron_train.schedule import groups_in_turn
from ditron_train.schedule.groups import _LEAST_PRODUCT_US, _MARGIN

TIMES = st.floats(0, 1e4)


@given(st.permutations(range(8)), st.integers(1, 8), TIMES, TIMES)
def test_groups_are_in_order_and_nothing_is_waited_for_that_need_not_be(order, ranks, product_us, transfer_us):
    order = order[:ranks]
    groups = groups_in_turn(order, product_us, transfer_us)
    assert sum(groups, []) == order and all(groups)
    there_us = done_us = waited_us = alone_us = alone_done_us = 0.0
    for place, group in enumerate(groups):
        there_us += _MARGIN * transfer_us * (len(group) - (place == 0))
        waited_us += max(0.0, there_us - done_us)
        done_us = max(done_us, there_us) + product_us * len(group)
    for place in range(ranks):
        there_us = _MARGIN * transfer_us * place
        alone_us += max(0.0, there_us - alone_done_us)
        alone_done_us = max(alone_done_us, there_us) + product_us
    if product_us >= _LEAST_PRODUCT_US:
        assert waited_us <= alone_us + 1e-6 * done_us


@pytest.mark.parametrize(
    "product_us, transfer_us, sizes",
    [
        (1200, 340, [1, 2, 1]),  # 32 experts of 7168 x 4096, their first product
        (700, 340, [1, 1, 2]),
        (600, 680, [1, 1, 1, 1]),
        (30, 24, [4]),  # the host is slower than both
        (60, 24, [2, 2]),
        (1000, 0, [1, 3]),
        (0, 100, [4]),
    ],
)
def test_a_group_has_as_many_as_come_beside_the_ones_before(product_us, transfer_us, sizes):
    assert [len(group) for group in groups_in_turn([2, 3, 0, 1], product_us, transfer_us)] == sizes
