"""Agreement: all ranks of a group learn whether they make the same call, before a buffer may grow for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ditron_train.lang.agree import agree_kernel
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import COMPILE_OPTIONS
from ditron_train.stream.op_context import MAX_KNOWN_SHAPES, OpContext
from ditron_train.symm.channel import Channel
from ditron_train.symm.control import cyclic_difference

_POLL_S = 0.001


def agree(
    context: OpContext, channel: Channel, values: Sequence[int | torch.dtype], *, buffer: tuple[str, int] = ("", 0)
) -> torch.Tensor:
    """The signature of ``values``. If it is new, all ranks compare their signatures (collective).

    Only after that may buffers grow (collectively). A known signature costs a lookup. If lengths vary and ``buffer``,
    a name and the bytes that the call needs, is large enough, there is no comparison here: kernels compare the
    signature that comes with the start signal.

    Raises:
        MismatchError: On every rank, if the ranks differ.
        NotSupportedError: A new signature while a CUDA graph is being captured.
    """
    signature = channel.signature(values)
    key = (channel.op_name, *values)
    if key in context.agreed or (context.varies and 0 < buffer[1] <= context.arena.capacity_bytes(buffer[0])):
        return signature
    if context.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotSupportedError(f"{channel.op_name}: run this shape once before a CUDA graph is captured: {key[1:]}")
    _announce(context, channel, signature, verify=True)
    channel.synchronize()
    if len(context.agreed) >= MAX_KNOWN_SHAPES and not context.arena.graph_captured:
        context.forget_shapes()
    context.agreed.add(key)
    return signature


def _announce(
    context: OpContext, channel: Channel, signature: torch.Tensor, *, verify: bool, sets_flag: bool = False
) -> None:
    agree_kernel[(1,)](
        channel.ready.addresses,
        channel.ready.local,
        signature,
        channel.tickets,
        channel.control,
        channel.signals.addresses,
        NUM_ROLES=2,
        WORLD_SIZE=context.world_size,
        TARGET=context.target,
        VERIFY=verify,
        FLAGS=channel.signals.local.numel() // context.world_size if sets_flag else 0,
        num_warps=1,
        **COMPILE_OPTIONS,
    )


def agree_on_nothing(
    context: OpContext, channels: Sequence[Channel], *, flagged: Channel | None = None, **values: int | torch.dtype
) -> None:
    """A call without rows: the peers' calls have to be without rows, too (collective each time).

    While a CUDA graph is captured nothing is compared: the call has been made before.

    Args:
        channels: All channels that a peer might use for such a call with rows.
        flagged: The channel whose kernels wait for a flag of every source before they compare calls.
        values: Fields of the signature, by name; the others are 0.

    Raises:
        MismatchError: A peer's call has rows; the same on every rank.
        PeerTimeoutError: A peer did not arrive.
    """
    if is_capturing(context.device):
        return
    for channel in channels:
        signature = channel.signature([values.get(name, 0) for name in channel.signature_fields])
        _announce(context, channel, signature, verify=False, sets_flag=channel is flagged)
    compare_calls({channel: channel.epoch for channel in channels}, context.rank)


def compare_calls(channels: Mapping[Channel, int], rank: int) -> None:
    """Waits until all ranks have begun a call on one of ``channels``, and compares these calls.

    A peer with rows uses the channel that its number of rows calls for; a peer without rows has announced itself on
    all channels.

    Args:
        channels: The epoch of this rank's call by channel, each announced.
        rank: This rank.

    Raises:
        MismatchError: A peer's call has rows, or is another one.
        PeerTimeoutError: A peer did not begin a call.
    """
    first = next(iter(channels))
    deadline_s = time.monotonic() + first.timeout_s
    while True:
        for channel, epoch in channels.items():
            if not _absent(channel, epoch):
                signals = channel.start_signals(epoch)  # again: what was read before may be incomplete
                if any(words[1:] != signals[rank][1:] for words in signals):
                    channel.record_mismatch(epoch)
                channel.check()
                return
        if time.monotonic() > deadline_s:
            absent = [_absent(channel, epoch) for channel, epoch in channels.items()]
            everywhere = set.intersection(*map(set, absent))  # empty if peers have taken different channels
            peer = min(everywhere or absent[0])
            epoch = channels[first]
            first.record_timeout(peer=peer, chunk=-1, expected_epoch=epoch, seen_epoch=epoch - 1)
            first.check()
        time.sleep(_POLL_S)


def _absent(channel: Channel, epoch: int) -> list[int]:
    """Ranks that have not begun the call of ``epoch``."""
    signals = channel.start_signals(epoch)
    return [rank for rank, words in enumerate(signals) if cyclic_difference(words[0], epoch) < 0]


def agree_on_rows(context: OpContext, rows: int, flags: torch.Tensor) -> list[bool]:
    """For each of ``flags`` (int32) whether it is nonzero on all ranks (collective; a host sync).

    Raises:
        MismatchError: The ranks call it with other ``rows`` or another number of flags.
        PeerTimeoutError: A peer did not arrive.
    """
    if context.rows_channel is None:
        context.rows_channel = context.add_channel("rows", 1, ("rows", "decisions"))
    channel = context.rows_channel
    _announce(context, channel, channel.signature((rows, flags.numel())), verify=True)
    channel.synchronize()
    channel.signatures.clear()
    dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=context.group)
    return [flag != 0 for flag in flags.tolist()]
