"""Which path messages between neighbours take: chosen once a context, for neighbours of a node and for those beyond
it.

What each costs: ``docs/measurements/pp.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ditron_train.pp.channel import PipelineChannel
from ditron_train.pp.kernel_channel import MAX_PROGRAMS
from ditron_train.pp.messages import FORWARD
from ditron_train.runtime.errors import DitronError, NotSupportedError, SettingError
from ditron_train.runtime.settings import Settings
from ditron_train.stream import driver, waits_can_be_released
from ditron_train.symm.exchange import exchange

COPY, KERNEL, NVSHMEM, NCCL = "copy", "kernel", "nvshmem", "nccl"
WORDS = {
    COPY: "by copy engine",
    KERNEL: f"by a kernel of at most {MAX_PROGRAMS} programs",
    NVSHMEM: "by NVSHMEM's put-with-signal",
    NCCL: "by the network",
}


@dataclass
class Routes:
    """The paths of the messages of one rank of a pipeline's closed ring.

    Attributes:
        rank: This rank in the group.
        nodes: Number of each rank's node, by group rank.
        inside: Path between neighbours of one node.
        between: Path between neighbours of different nodes.
    """

    rank: int
    nodes: list[int]
    inside: str
    between: str

    def path_to(self, rank: int) -> str:
        """The path of this rank's messages to a neighbour, and of the neighbour's to this rank."""
        return self.inside if self.nodes[rank] == self.nodes[self.rank] else self.between

    def of_ring(self) -> list[str]:
        """The path of every link of the ring."""
        nodes = self.nodes
        return [self.inside if node == nodes[place - 1] else self.between for place, node in enumerate(nodes)]

    def describe(self) -> str:
        """The paths in words, each with the number of links that take it."""
        taken = self.of_ring()
        return ", ".join(f"{taken.count(path)} {words}" for path, words in WORDS.items() if path in taken)

    def target(self, lane: int) -> int:
        """Group rank that this rank's messages of ``lane`` go to."""
        return (self.rank + (1 if lane == FORWARD else -1)) % len(self.nodes)

    def source(self, lane: int) -> int:
        """Group rank that messages of ``lane`` come from."""
        return (self.rank - (1 if lane == FORWARD else -1)) % len(self.nodes)


def asked_by_all(group: dist.ProcessGroup, settings: Settings, node: tuple, turns: int) -> tuple[str, list[tuple]]:
    """``DITRON_PP_PATH`` of all ranks and their nodes, by group rank (collective); ``turns``: as ``exchange``'s.

    Raises:
        SettingError: The ranks do not ask for the same; on every rank alike.
    """
    answers = exchange(group, (settings.pp_path, settings.transport, node), turns)
    if len({entry[:2] for entry in answers}) > 1:
        raise SettingError(f"ranks differ in DITRON_PP_PATH or DITRON_TRANSPORT: {[entry[:2] for entry in answers]}")
    return settings.pp_path, [entry[2] for entry in answers]


def inter_node_path(requested: str, transport: str) -> str:
    """To another node: NVSHMEM if it is asked for, also as what symmetric memory comes from, else NCCL."""
    return NVSHMEM if requested == NVSHMEM or (requested != NCCL and transport == "nvshmem") else NCCL


def streams_can_signal(channel: PipelineChannel, group: dist.ProcessGroup, requested: str) -> bool:
    """Whether streams of all ranks can write and await flags, so that copy engines alone carry messages (collective).

    Raises:
        NotSupportedError: They cannot, and ``DITRON_PP_PATH=copy`` says that they have to.
    """
    device = channel.arena.device
    if device.type != "cuda":
        return True
    refused = None
    if not (channel.flags_in_host or waits_can_be_released()):
        refused = (
            "CUDA refuses to register shared host memory, and with CUDA_DEVICE_MAX_CONNECTIONS=1 a stream that waits "
            "for a flag in device memory could not be released if its peer died"
        )
    else:
        try:
            stream = torch.cuda.current_stream(device).cuda_stream
            driver.stream_memory_ops(stream, [("write", channel.address(channel.arena.rank, 0), 0)])
            torch.cuda.synchronize(device)
        except DitronError as error:
            refused = f"streams cannot write flags: {error}"
    gathered = [text for text in exchange(group, refused) if text]
    if gathered and requested == COPY:
        raise NotSupportedError(gathered[0])
    return not gathered
