"""``EPContext``: the symmetric memory and the channels of expert parallelism on one group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ditron_train.ep.layout import HostCounts, LayoutShape
from ditron_train.runtime.device import is_interpreter, kernel_target, num_sms
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.symm.arena import SymmetricArena, SymmetricTensor, get_arena
from ditron_train.symm.channel import Channel

__all__ = ["EPContext", "MoveConfig", "get_ep_context"]

_HEADROOM = 1.125  # routing drifts from step to step: what must grow grows by a little more


@dataclass
class MoveConfig:
    """Launch constants of the two kernels that move tokens. They change the time, never the bits.

    Attributes:
        num_senders: Programs, one a multiprocessor, that push over the links: 12 fill them, more do not help.
        num_programs: All programs of a launch: those above ``num_senders`` place what arrives.
        num_warps: Warps of a program: with 32 the kernels would have to spill registers.
        push_elements: Elements of a tile on its way to the experts.
        return_elements: Elements of a tile on its way back.
        sum_elements: Elements of a tile of sums.
        item_tokens: Tokens that a program sums at a time (a power of two).
    """

    num_senders: int = 16
    num_programs: int = 132
    num_warps: int = 16
    push_elements: int = 16384
    return_elements: int = 32768
    sum_elements: int = 8192
    item_tokens: int = 8


class EPContext:
    """Owns what all MoE layers with the same experts share on ``group`` (collective to make).

    The buffer for rows is one for both directions and for all layers: it lives only inside an op, guarded by the start
    signals. Sizes are exact: the largest need of any rank, which every rank learns from the exchanged counts, so growing
    it needs no agreement.

    Args:
        group: The expert-parallel process group.
        device: CUDA device, or the CPU in the interpreter.
        num_experts: Experts over all ranks.
        topk: Experts of a token at most.

    Raises:
        NotSupportedError: Experts that do not divide by the group, top-k above the experts, no kernels for the device, or
            peers whose memory cannot be addressed (other nodes).
        ArenaError: No symmetric memory, or its cap is exceeded; on every rank alike.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_experts: int, topk: int) -> None:
        self.target = kernel_target(device)
        world_size = dist.get_world_size(group)
        if is_interpreter():
            self.shape = LayoutShape(world_size, num_experts, topk, num_chunks=4, min_chunk_tokens=2)
        else:
            self.shape = LayoutShape(world_size, num_experts, topk)
        if self.shape.columns > 1024:
            raise NotSupportedError(f"expert parallel: {num_experts} experts on {world_size} ranks need more than 1024 columns")
        self.arena: SymmetricArena = get_arena(group, device)
        self.rank = self.arena.rank
        self.device = self.arena.device
        self.move = MoveConfig(num_programs=num_sms(self.device))
        if is_interpreter():
            self.move.num_senders = 1
        name = f"ep_e{num_experts}_k{topk}"
        fields = ("hidden", "dtype", "num_experts", "topk", "kind")
        flags = world_size * self.shape.num_chunks
        self.counts_channel = Channel(self.arena, f"{name}_counts", world_size, signature_fields=fields)
        self.dispatch_channel = Channel(self.arena, f"{name}_dispatch", flags, signature_fields=fields)
        self.combine_channel = Channel(self.arena, f"{name}_combine", flags, signature_fields=fields)
        self.messages = self.arena.tensor(f"{name}/messages", (world_size, self.shape.message_words), torch.int32)
        if 0 in self.messages.host_addresses:
            raise NotSupportedError("expert parallel: the memory of some ranks of the group cannot be addressed from here")

    def check(self) -> None:
        """Raises what any kernel of this context recorded (host memory only)."""
        for channel in (self.counts_channel, self.dispatch_channel, self.combine_channel):
            channel.check()

    def _buffer(self, name: str, num_rows: int, most_rows: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        """At least ``num_rows`` rows, with headroom up to ``most_rows`` if it has to grow; same arguments on every rank."""
        held = self.arena.tensor(name, (1, *row_shape), dtype)
        row_bytes = held.local.numel() * dtype.itemsize
        if held.capacity_bytes < num_rows * row_bytes:
            self.arena.tensor(name, (min(int(num_rows * _HEADROOM) + 1, max(most_rows, num_rows)), *row_shape), dtype)
        return self.arena.tensor(name, (max(num_rows, 1), *row_shape), dtype)

    def rows_buffer(self, num_rows: int, most_rows: int, hidden: int, dtype: torch.dtype) -> SymmetricTensor:
        """The buffer through which tokens and rows travel, ``[num_rows, hidden]``."""
        return self._buffer("ep/rows", num_rows, most_rows, (hidden,), dtype)

    def entries_buffer(self, num_rows: int, most_rows: int) -> SymmetricTensor:
        """Where the entries of a layout arrive, int32 ``[num_rows, 4]``."""
        return self._buffer("ep/entries", num_rows, most_rows, (4,), torch.int32)

    def grads_buffer(self, num_places: int) -> SymmetricTensor:
        """Where gradients of probabilities arrive, fp32 ``[num_places]``."""
        return self._buffer("ep/prob_grads", num_places, num_places, (), torch.float32)

    def reserve(self, host: HostCounts, hidden: int, dtype: torch.dtype) -> tuple[int, int, int]:
        """Makes every buffer that a layout needs large enough (collective where one must grow).

        Returns:
            Slots, entries and places that the largest rank needs.

        Raises:
            ArenaError: They do not fit; on every rank alike.
        """
        tokens = int(host.tokens.sum())
        slots = int(host.dests.sum(0).max())
        entries = int(host.rows(self.shape).max())
        places = int(host.tokens.max()) * self.shape.topk
        self.rows_buffer(max(slots, places), max(tokens, places), hidden, dtype)
        self.entries_buffer(entries, tokens * min(self.shape.topk, self.shape.experts_per_rank))
        self.grads_buffer(places)
        return slots, entries, places


_contexts: dict[tuple[dist.ProcessGroup, torch.device, int, int], EPContext] = {}


def get_ep_context(group: dist.ProcessGroup, device: torch.device, num_experts: int, topk: int) -> EPContext:
    """The one context of these arguments; made at the first call, which is collective."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (group, device, num_experts, topk)
    context = _contexts.get(key)
    if context is None or context.arena.closed:
        context = _contexts[key] = EPContext(group, device, num_experts, topk)
    return context
