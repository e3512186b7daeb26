"""What a row of an exchange says of the GPU's multiprocessors, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ditron_train.sp.layouts import output_layout
from ditron_train.sp.transfer_sizes import EXCHANGE_PROGRAMS
from ditron_train.tools.cases.sp import EXCHANGES, ProjectionCall

WORLD_SIZE, ROWS, HEADS, HEAD_SIZE = 2, 8, 4, 16


@pytest.mark.parametrize("case", EXCHANGES, ids=lambda case: case.row)
@pytest.mark.parametrize("num_sms, expected", [(132, EXCHANGE_PROGRAMS), (0, 0)])
def test_multiprocessors_of_an_exchange(case, num_sms, expected):
    """Those of its programs; none where the interpreter runs it."""
    context: Any = SimpleNamespace(
        target="sm_90" if num_sms else "interpreter",
        device=torch.device("cpu"),
        num_sms=num_sms,
        world_size=WORLD_SIZE,
    )
    heads = HEADS if case.op.side.towards_heads else HEADS // WORLD_SIZE
    x, exchange = torch.zeros(ROWS, 1, heads, HEAD_SIZE), SimpleNamespace(world_size=WORLD_SIZE)
    call = ProjectionCall(x, x, output_layout(HEADS, HEAD_SIZE, WORLD_SIZE), exchange, None)
    assert case.comm_sms(call, context) == expected
