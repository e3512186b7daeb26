"""``PipelineContext``: what the messages of one pipeline group need, kept across steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ditron_train.pp import paths
from ditron_train.pp.channel import PipelineChannel
from ditron_train.pp.endpoints import Receiver, Sender
from ditron_train.pp.kernel_channel import KernelChannel
from ditron_train.pp.mailbox import MAX_LEASES, Mailbox
from ditron_train.pp.messages import BACKWARD, FORWARD
from ditron_train.pp.network import NetworkLanes
from ditron_train.pp.nvshmem_channel import NvshmemChannel, NvshmemPuts, NvshmemSlots, make_nvshmem_arena
from ditron_train.pp.nvshmem_endpoints import NvshmemReceiver, NvshmemSender
from ditron_train.pp.slots import LastingSizes, Slots
from ditron_train.runtime.device import with_index
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.flight_recorder import records_of
from ditron_train.runtime.groups import GroupCache, check_member, unwrapped
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.runtime.versions import pip_command
from ditron_train.stream import driver
from ditron_train.symm.arena import get_arena
from ditron_train.symm.exchange import exchange, on_all_ranks
from ditron_train.symm.groups import make_group
from ditron_train.symm.transport import node_of_process

_BACKWARD_LEASES = 3  # a gradient is let go of when the next one arrives
_ALIGNMENT_BYTES = 256


def first_of_crossings(nodes: Sequence[int]) -> frozenset[int]:
    """Of the stages' nodes: stages whose next one is on another node, no stage in two of these pairs."""
    firsts: set[int] = set()
    for stage in range(len(nodes) - 1):
        if nodes[stage] != nodes[stage + 1] and stage - 1 not in firsts:
            firsts.add(stage)
    return frozenset(firsts)


class PipelineContext:
    """Senders and receivers to the neighbours in a pipeline group (constructed collectively).

    The ring is closed: the last stage's next is the first, which interleaved schedules use. How a neighbour is reached
    is chosen here, once (``paths``): through its memory inside a node, by NVSHMEM or the network between nodes.

    Attributes:
        next_rank, previous_rank: Group ranks of the neighbours.
        local_senders, local_receivers: By lane, ends through symmetric memory; None for those through ``network``.
        network: Lanes through ``torch.distributed``; None if nothing needs them.
        sizes: Of messages that did not fit a slot, if all ranks share a node; else None.
        routes: Which path messages to and from each neighbour take.
        first_of_crossings: As the function of this name says of the group's stages.
        slot_bytes: Bytes of the largest message that fits into a slot, the same on every rank; 0 before the first
            ``reserve``.

    Args:
        group: The pipeline group, at least two ranks.
        device: Where the messages are.
        with_network: Make ``network`` although all neighbours are in reach: for messages larger than a slot.
        num_slots: Slots of each direction's ring (``DITRON_PP_SLOTS``).
        num_leases: Slots to lease, unless ``DITRON_PP_LEASES`` says how many; None: what 1F1B needs.
        turns: How many deadlines ranks wait for each other when they come to make the context, or agree on new sizes
            between nodes.

    Raises:
        NotSupportedError: A group of one rank, or a GPU without ``cuda-bindings``.
        ArenaError: No symmetric memory, if only on one of the group's nodes; on every rank alike.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        with_network: bool = False,
        num_slots: int | None = None,
        num_leases: int | None = None,
        turns: int = 1,
    ) -> None:
        check_member(group)
        self._turns = turns
        self.group, self.device = group, with_index(device)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.world_size < 2:
            raise NotSupportedError("a pipeline of one stage has no neighbours to send to")
        if self.device.type == "cuda" and not driver.has_driver():
            raise NotSupportedError(f"pipeline messages need cuda-bindings: {pip_command('cuda-bindings')}")
        self.records = records_of(group.group_name, dist.get_process_group_ranks(group))
        self.next_rank = (self.rank + 1) % self.world_size
        self.previous_rank = (self.rank - 1) % self.world_size
        settings = get_settings()
        requested, nodes = paths.asked_by_all(group, settings, node_of_process(), turns)
        inside = requested if requested in (paths.NVSHMEM, paths.NCCL) else paths.COPY
        between = paths.inter_node_path(requested, settings.transport)
        self.routes = paths.Routes(self.rank, [nodes.index(node) for node in nodes], inside, between)
        self.first_of_crossings = first_of_crossings(self.routes.nodes)
        self.network = None
        if with_network or paths.NCCL in self.routes.of_ring():
            self.network = NetworkLanes(group, self.device)
        self._node_group: dist.ProcessGroup | None = None
        self._nvshmem_channel: NvshmemChannel | None = None
        self._nvshmem_slots: NvshmemSlots | None = None
        self.channel: PipelineChannel | None = None
        self.slots: Slots | None = None
        self.local_senders: list[Sender | None] = [None, None]
        self.local_receivers: list[Receiver | None] = [None, None]
        self.slot_bytes = 0
        self._closed = False
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        num_slots = settings.pp_slots if num_slots is None else num_slots
        if inside == paths.COPY:
            num_leases = num_leases if settings.pp_leases is None else settings.pp_leases
            self._on_all_nodes(
                "making a pipeline's context", partial(self._make_local, num_slots, num_leases, requested)
            )
        if paths.NVSHMEM in self.routes.of_ring():
            self._make_nvshmem(num_slots)
        self.sizes = LastingSizes(self.channel) if self.in_one_node and self.channel is not None else None
        _log_routes(self)

    def _on_all_nodes(self, what: str, step: Callable[[], None]) -> None:
        """``step``, which the ranks of each node do among themselves: if it fails on one node, all ranks are told
        so."""
        if len(set(self.routes.nodes)) == 1:
            step()
        else:
            on_all_ranks(self.group, what, step, (ArenaError, NotSupportedError))

    def _make_local(self, num_slots: int, num_leases: int | None, requested: str) -> None:
        """Symmetric memory, flags and ends among this group's ranks of this node."""
        members = [rank for rank in range(self.world_size) if self.routes.nodes[rank] == self.routes.nodes[self.rank]]
        local_group = self.group
        if len(members) < self.world_size:
            local_group = self._node_group = make_group(self.group, members, "ditron_pp_node")
        if len(members) < 2:
            return
        self.arena = get_arena(local_group, self.device)
        self.channel = PipelineChannel(self.arena, Mailbox(local_group, self.device))
        if requested == paths.KERNEL or not paths.streams_can_signal(self.channel, local_group, requested):
            self.routes.inside = paths.KERNEL
            self.channel = KernelChannel(self.arena, self.channel.mailbox)
        self.slots = Slots(self.arena, num_slots, _leases(num_leases, self.world_size, self.channel))
        place = {member: place for place, member in enumerate(members)}
        for lane in (FORWARD, BACKWARD):
            target, source = self.routes.target(lane), self.routes.source(lane)
            if target in place:
                self.local_senders[lane] = Sender(self.channel, self.slots, lane, place[target])
            if source in place:
                self.local_receivers[lane] = Receiver(self.channel, self.slots, lane, place[source])

    def _make_nvshmem(self, num_slots: int) -> None:
        """Symmetric memory of the whole group, and ends to the neighbours that NVSHMEM reaches."""
        arena = make_nvshmem_arena(self.group, self.device)
        self._nvshmem_channel = NvshmemChannel(arena, NvshmemPuts(self.group))
        self._nvshmem_slots = NvshmemSlots(arena, num_slots)
        for lane in (FORWARD, BACKWARD):
            target, source = self.routes.target(lane), self.routes.source(lane)
            if self.routes.path_to(target) == paths.NVSHMEM:
                self.local_senders[lane] = NvshmemSender(self._nvshmem_channel, self._nvshmem_slots, lane, target)
            if self.routes.path_to(source) == paths.NVSHMEM:
                self.local_receivers[lane] = NvshmemReceiver(self._nvshmem_channel, self._nvshmem_slots, lane, source)

    def placeholder(self, dtype: torch.dtype) -> torch.Tensor:
        """One element, for tensors whose memory is not known yet."""
        if dtype not in self._placeholders:
            with torch.inference_mode(False):  # training comes to it, too
                self._placeholders[dtype] = torch.empty((), dtype=dtype, device=self.device)
        return self._placeholders[dtype]

    @property
    def in_one_node(self) -> bool:
        """Whether all ranks of the group share a mailbox."""
        return len(set(self.routes.nodes)) == 1 and self.channel is not None

    @property
    def closed(self) -> bool:
        """Whether the symmetric memory was given back; the context cannot be used any more."""
        return self._closed or any(
            channel is not None and channel.arena.closed for channel in (self.channel, self._nvshmem_channel)
        )

    def reserve(self, num_bytes: int) -> bool:
        """Makes the slots hold messages of ``num_bytes``; collective over the group, between two steps.

        The largest of what the ranks ask for is taken. All messages sent before must have been received; received
        tensors may still be in use.

        Returns:
            Whether all of them asked for the same.

        Raises:
            MismatchError: Some ranks do not ask for larger slots, so the stages disagree on the size of messages.
            PeerTimeoutError: The same in a group without a mailbox of all ranks.
            ArenaError: The memory is not there, if only on one node; on every rank alike, and the context is closed.
        """
        requested = self._asked_by_all(num_bytes)
        # A slot of no bytes would have no address.
        largest = -(-max(*requested, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        try:
            self._on_all_nodes(f"making room for messages of {largest} bytes", partial(self._grow, largest))
        except ArenaError:
            self._closed = True
            if not self.in_one_node:  # others would hold what they have got for nothing
                self.close()
            raise
        self.slot_bytes = max(self.slot_bytes, largest)
        return len(set(requested)) == 1

    def grow_to_last_sizes(self) -> None:
        """At the first call of each step with lengths that vary (collective): room for the largest messages that went
        by the network for want of it, two steps after them; inside a node, and if every rank's GPU has twice the
        memory that they take. Else the slots stay as they are, and the network sends what does not fit.

        Raises:
            PeerTimeoutError: A rank did not begin the last step in time.
            MismatchError, ArenaError: As ``reserve``.
        """
        largest = 0 if self.sizes is None else self.sizes.of_last_step()
        if largest <= self.slot_bytes:
            return
        if all(self._asked_by_all(int(self._has_memory(largest)))):
            self.reserve(largest)
            return
        self.sizes = None
        words = f"pp on group {self.arena.group_name}: no memory for messages of {largest} bytes"
        log_once(words, f"{words}; those of more than {self.slot_bytes} go by the network")

    def _has_memory(self, num_bytes: int) -> bool:
        """Whether slots of so many bytes leave as much again: in the middle of a job, torch holds what it needs."""
        if self.slots is None or self.arena.device.type != "cuda":
            return True
        return torch.cuda.mem_get_info(self.arena.device)[0] >= 2 * self.slots.total * num_bytes

    def _asked_by_all(self, num_bytes: int) -> list[int]:
        """What every rank of the group asks ``reserve`` for."""
        if not self.in_one_node:
            return exchange(self.group, num_bytes, self._turns)
        assert self.channel is not None
        requested = self.channel.mailbox.values.agree(num_bytes, self.channel.host_timeout_s, self.channel.check)
        if any(value is None for value in requested):
            listed = ", ".join(
                f"rank {rank}: {'not heard' if value is None else value}" for rank, value in enumerate(requested)
            )
            self.channel.fail_mismatch(
                f"pp on group {self.arena.group_name}: not all ranks ask for larger messages within "
                f"{self.channel.host_timeout_s:g} s ({listed} bytes); a rank is dead, or the stages disagree on the "
                "shape"
            )
        return [value for value in requested if value is not None]

    def _grow(self, num_bytes: int) -> None:
        if self._nvshmem_slots is not None and num_bytes > self._nvshmem_slots.num_bytes:
            self._nvshmem_slots.reserve(num_bytes)
        if self.slots is not None and num_bytes > self.slots.num_bytes:
            self.slots.reserve(num_bytes)
            for end in (*self.local_senders, *self.local_receivers):
                if end is not None and end.channel is self.channel:
                    end.forget_leases()

    def close(self) -> None:
        """Gives back the memory and the groups that were made for this context; collective, explicit, at most once
        needed.

        The context must not be used afterwards; `get_pipeline_context` makes a new one.
        """
        for channel in (self.channel, self._nvshmem_channel):
            if channel is not None:
                channel.arena.close()
        for made in (*(self.network.groups if self.network is not None else ()), self._node_group):
            if made is not None:
                dist.destroy_process_group(made)
        self.network = self._node_group = None
        self._closed = True

    def abandon(self) -> None:
        """Gives back the memory without the peers: for a group that has been destroyed."""
        for channel in (self.channel, self._nvshmem_channel):
            if channel is not None:
                channel.arena.abandon()

    def check(self) -> None:
        """Raises what any rank of the node has recorded; compares headers, drops what has been sent and gives leased
        slots back (no wait)."""
        for channel in (self.channel, self._nvshmem_channel):
            if channel is not None:
                channel.check()
        for end in self.local_senders:
            if end is not None:
                end.release_sent()
        for receiver in self.local_receivers:
            if receiver is not None:
                receiver.verify()
                receiver.return_leases()
        if self.network is not None:
            self.network.release_sent()


def _leases(requested: int | None, world_size: int, channel: PipelineChannel) -> tuple[int, int]:
    """Slots to lease, by lane. In 1F1B a stage holds at most as many activations as there are stages; one more is on
    its way, and the model holds on to the last one. nvshmem frees memory though a tensor may be in it."""
    if not channel.flags_in_host or channel.arena.transport.name == "nvshmem":
        return (0, 0)
    forward = min(world_size + 2 if requested is None else requested, MAX_LEASES)
    return (forward, min(forward, _BACKWARD_LEASES))


def _log_routes(context: PipelineContext) -> None:
    routes, channel = context.routes, context.channel
    in_host = channel is not None and channel.flags_in_host
    has_flags = channel is not None or paths.NVSHMEM in routes.of_ring()
    flags = "host" if in_host else "device" if has_flags else "no"
    words = routes.describe()
    log_once(
        f"pp routes {routes.nodes} {words} {flags}",
        f"pp: links of the pipeline's ring: {words}; flags of stage {context.rank} in {flags} memory",
        name="pp",
    )


_contexts: GroupCache[tuple[dist.ProcessGroup, str], PipelineContext] = GroupCache(PipelineContext.abandon)


def get_pipeline_context(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    with_network: bool = False,
    num_leases: int | None = None,
    turns: int = 1,
) -> PipelineContext:
    """The context of a pipeline group on a device; made at the first call, which is collective, and kept.

    ``num_leases`` and ``turns`` count at that call.

    Raises:
        NotSupportedError: The group's context exists without ``network`` and now needs one.
    """
    # "cuda" and "cuda:0" are one: two contexts would share their slots, but not their flags.
    group = unwrapped(group)
    device = with_index(device)
    key = (group, str(device))
    context = _contexts.get(key)
    if context is None or context.closed:
        for stale in [other for other, held in _contexts.items() if held.closed]:
            del _contexts[stale]
        with torch.inference_mode(False):  # an evaluation may come before training
            context = _contexts[key] = PipelineContext(
                group, device, with_network=with_network, num_leases=num_leases, turns=turns
            )
    if with_network and context.network is None:
        raise NotSupportedError(
            "this pipeline group was set up for messages of one size and cannot change to variable ones"
        )
    return context


def close_pipeline_contexts() -> None:
    """Closes every context that `get_pipeline_context` made, in the order in which they were made (collective)."""
    while _contexts:
        _contexts.pop(next(iter(_contexts))).close()
