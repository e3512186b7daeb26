"""Which ranks' rows are computed together while those of others travel."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LEAST_PRODUCT_US = 100.0  # what the host takes to launch one beside what else a rank's rows need
_MARGIN = 1.25  # transfers take longer than by the rates: products run beside them


def groups_in_turn(order: Sequence[int], product_us: float, transfer_us: float) -> list[list[int]]:
    """The ranks of ``order`` in consecutive groups, whose rows are multiplied together.

    Each product takes the host, and ends with programs that have nothing left to do. So a group has as many ranks as
    can come while the groups before it are multiplied, and one at least.

    Args:
        order: Ranks in the order in which their rows come, the first one's being there. Where results leave, the last
            one's first.
        product_us: Of the rows of one rank.
        transfer_us: Of the rows of one rank.
    """
    least = math.ceil(min(_LEAST_PRODUCT_US / product_us, len(order))) if product_us > 0 else len(order)
    transfer_us *= _MARGIN
    groups, waiting = [list(order[:least])], list(order[least:])
    there_us = transfer_us * (len(groups[0]) - 1)
    done_us = there_us + product_us * len(groups[0])
    while waiting:
        room_us = done_us - there_us
        number = len(waiting) if room_us >= transfer_us * len(waiting) else max(least, int(room_us / transfer_us))
        groups.append(waiting[:number])
        waiting = waiting[number:]
        there_us += transfer_us * len(groups[-1])
        done_us = max(done_us, there_us) + product_us * len(groups[-1])
    return groups
