"""Which ranks' rows are computed together while those of others travel."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_PRODUCT_US = 100.0  # what the host takes to launch one beside what else a rank's rows need
_MARGIN = 1.25  # transfers take longer than by the rates: products run beside them


def groups_in_sequence(
    order: Sequence[int], product_us: float, transfer_us: float, lost_us: float = 0.0
) -> list[list[int]]:
    """The ranks of ``order`` in consecutive groups, whose rows are multiplied together.

    Each product takes the host, and ends with programs that have nothing left to do. So a group has as many ranks as
    are there when the products before it are done, one at least, and more if their product would be shorter than
    what the host takes; the last group has what is left.

    Args:
        order: Ranks in the order in which their rows come, the first one's being there. If results leave, the last
            one's first.
        product_us: Of the rows of one rank.
        transfer_us: Of the rows of one rank.
        lost_us: What products before the last leave to the next: tiles that have rows of later ranks, too.
    """
    transfer_us *= _MARGIN
    world_size, groups, done_us, first = len(order), [], 0.0, 0

    def of_first_us(ranks: int) -> float:
        return product_us * ranks if ranks == world_size else max(0.0, product_us * ranks - lost_us)

    while first < world_size:
        end = first + 1
        while end < world_size:
            is_there = transfer_us * end <= done_us
            if not is_there and of_first_us(end) - of_first_us(first) >= _LEAST_PRODUCT_US:
                break
            end += 1
        groups.append(list(order[first:end]))
        done_us = max(done_us, transfer_us * (end - 1)) + of_first_us(end) - of_first_us(first)
        first = end
    return groups
