"""Layout of the control block that kernels get, and of the record that survives them.

Control block: int64 words in device memory, one block a channel. Record: int64 words in memory that the host reads
without a sync (pinned if there is a GPU): a kernel that gives up writes it once, the first writer wins by a
compare-and-swap on the abort word, and from then on every wait of the channel returns at once. The host keeps a record
of its own (``Channel.record_timeout``) and never writes into this one.
"""

from __future__ import annotations

import torch

#: Types by the number that stands for them in signatures and headers.
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)

CONTROL_ABORT = 0
CONTROL_TIMEOUT_NS = 1
CONTROL_RECORD_ADDRESS = 2
CONTROL_RANK = 3
CONTROL_WORLD_SIZE = 4
CONTROL_WORDS = 8

RECORD_STATE = 0  # 0: nothing happened; 1: the other words are complete
RECORD_KIND = 1
RECORD_PEER = 2
RECORD_CHUNK = 3
RECORD_EXPECTED = 4
RECORD_SEEN = 5
RECORD_TURNS = 6  # deadlines that the wait took: kernels leave 0, their waits take one
RECORD_WORDS = 8

KIND_TIMEOUT = 1
KIND_MISMATCH = 2
KIND_OVERFLOW = 3
KIND_REFUSED = 4

READY_WORDS = 16  # one rank's start signal: the epoch, then 15 words of signature
TICKET_UNIT_LOG2 = 10  # a launch takes 2**10 tickets whatever its grid is (so at most 1024 programs)
TICKET_ROLES = 4  # two kernels of one op that count launches separately, two counters of the op


def cyclic_difference(a: int, b: int) -> int:
    """``a - b`` as a signed 32-bit number: at least 0 if epoch ``a`` is ``b`` or later."""
    return (a - b + 2**31) % 2**32 - 2**31
