"""Messages to a neighbour whose memory cannot be addressed (another node), and messages larger than
a slot (receive buffer).

They go through point-to-point operations of ``torch.distributed`` on groups of their own, one a lane so that the two
directions between the same two ranks never match each other's messages, limited to one block of NCCL if torch
offers the option. All operations that one call makes on a lane go out as one batch, so a ring of stages cannot
deadlock.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.pp.messages import LANE_NAMES, MAX_DIMS, Header
from ditron_train.runtime.logs import log_once
from ditron_train.stream.events import current_stream
from ditron_train.symm.groups import make_group

_MAX_CTAS = 1
_MAX_HELD = 1


def _options(group: dist.ProcessGroup) -> Any:
    """Options of a communicator that takes one SM; None if the backend has no such option."""
    if dist.get_backend(group) != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "config"):
        return None
    options.config.max_ctas = _MAX_CTAS
    return options


class NetworkWork:
    """One batch on a lane. ``wait`` has the current stream wait for it (gloo: blocks)."""

    def __init__(self, works: list[Any], tensors: list[torch.Tensor]) -> None:
        self._works = works
        self._waited_on: torch.cuda.Stream | None = None
        self.tensors = tensors  # kept until the batch is complete

    def wait(self) -> None:
        """Has the current stream wait for the batch."""
        works, self._works = self._works, []  # gloo's wait once
        for work in works:
            work.wait()
        for tensor in self.tensors:  # they may have been allocated on another stream, which does not wait
            if tensor.device.type == "cuda":
                stream = current_stream(tensor.device)
                tensor.record_stream(stream)
                if self._waited_on not in (None, stream):
                    stream.wait_stream(self._waited_on)
                self._waited_on = self._waited_on or stream

    def is_completed(self) -> bool:
        """Whether the batch is over (no wait)."""
        return all(work.is_completed() for work in self._works)


class NetworkLanes:
    """The two lanes of a pipeline group through the network (constructed collectively).

    Attributes:
        groups: One process group a lane.

    Args:
        group: The pipeline group; its backend serves.
        device: Where the tensors are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        everyone = list(range(len(self._ranks)))
        self.groups = [make_group(group, everyone, f"ditron_pp_{name}", _options(group)) for name in LANE_NAMES]
        for lane_group in self.groups:  # makes the communicators now, while all ranks are here
            dist.barrier(lane_group)
        self._held: deque[NetworkWork] = deque()
        log_once("pp network", f"pp: communicators of their own for the network, {_MAX_CTAS} block each", name="pp")

    def batch(
        self, lane: int, send: tuple[torch.Tensor, int] | None, receive: tuple[torch.Tensor, int] | None
    ) -> NetworkWork:
        """Starts a send to and a receive from group ranks on a lane; what is sent is kept until it is out."""
        group = self.groups[lane]
        operations = []
        if send is not None:
            operations.append(dist.P2POp(dist.isend, send[0], self._ranks[send[1]], group))
        if receive is not None:
            operations.append(dist.P2POp(dist.irecv, receive[0], self._ranks[receive[1]], group))
        tensors = [entry[0] for entry in (send, receive) if entry is not None]
        work = NetworkWork(dist.batch_isend_irecv(operations), tensors)
        if send is not None:
            self._hold(work)
        return work

    def _hold(self, work: NetworkWork) -> None:
        self._held.append(work)
        while len(self._held) > len(LANE_NAMES) * (1 + _MAX_HELD):
            self._held.popleft().wait()

    def release_sent(self) -> None:
        """Drops what is known to be sent (no wait)."""
        while self._held and self._held[0].is_completed():
            self._held.popleft()

    def exchange_headers(self, lane: int, send: tuple[Header, int] | None, receive_from: int | None) -> Header | None:
        """Tells a neighbour on another node what is coming and learns the same; blocks the host."""

        def words_of(header: Header | None) -> torch.Tensor:
            words = [0] * (MAX_DIMS + 4) if header is None else header.to_words()
            return torch.tensor(words, dtype=torch.int64, device=self._device)

        incoming = None if receive_from is None else (words_of(None), receive_from)
        self.batch(lane, None if send is None else (words_of(send[0]), send[1]), incoming).wait()
        return None if incoming is None else Header.from_words(incoming[0].tolist())
