"""Calls of an op without rows: nothing is moved, but all ranks learn whether the others' calls are without rows,
too."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ditron_train.symm.channel import Channel
from ditron_train.symm.control import cyclic_difference

_POLL_S = 0.001


def compare_calls(channels: Mapping[Channel, int], rank: int) -> None:
    """Waits until all ranks have begun a call on one of ``channels``, and compares what they begun.

    A peer with rows has taken the channel that its number of rows asks for; one without has announced itself on all.

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
                signals = channel.start_signals(epoch)  # again: what was read before may be half of it
                if any(words[1:] != signals[rank][1:] for words in signals):
                    channel.record_mismatch(epoch)
                channel.check()
                return
        if time.monotonic() > deadline_s:
            absent = [_absent(channel, epoch) for channel, epoch in channels.items()]
            everywhere = set.intersection(*map(set, absent))  # empty where peers have taken different channels
            peer = min(everywhere or absent[0])
            epoch = channels[first]
            first.record_timeout(peer=peer, chunk=-1, expected_epoch=epoch, seen_epoch=epoch - 1)
            first.check()
        time.sleep(_POLL_S)


def _absent(channel: Channel, epoch: int) -> list[int]:
    """Ranks that have not begun the call of ``epoch``."""
    signals = channel.start_signals(epoch)
    return [rank for rank, words in enumerate(signals) if cyclic_difference(words[0], epoch) < 0]
