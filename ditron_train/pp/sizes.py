"""``LastingSizes``: how slots come to hold messages of lengths that vary, of which nobody says the largest beforehand.

What does not fit a slot goes by the network. Every rank says at the first call of a step which was the largest of
those so far, and hears at the first call of the next step what all said at the last: as all of them began that step,
none is waited for but where a step sends one way alone, and each hears the same. So slots grow two steps behind the
first message that did not fit.
"""

from __future__ import annotations

from ditron_train.pp.channel import PipelineChannel


class LastingSizes:
    """Of the messages of a group inside a node, the largest that did not fit a slot.

    Args:
        channel: Of the group, whose mailbox all of its ranks share.
    """

    def __init__(self, channel: PipelineChannel) -> None:
        self._channel = channel
        self._largest = self._steps = 0

    def note(self, num_bytes: int) -> None:
        """A message of this rank did not fit."""
        self._largest = max(self._largest, num_bytes)

    def of_last_step(self) -> int:
        """At the first call of a step, on every rank: the largest that any of them had noted at the first call of the
        last step; 0 where there was none.

        Raises:
            PeerTimeoutError: A rank did not begin the last step in time.
        """
        mailbox, largest = self._channel.mailbox, 0
        if self._steps:
            largest = max(self._said_by(rank) for rank in range(mailbox.world_size))
        self._steps += 1
        mailbox.say(self._largest)
        return largest

    def _said_by(self, rank: int) -> int:
        """What a rank said at the last step, which its host may still have to begin."""
        mailbox = self._channel.mailbox
        self._channel.wait_on_host(lambda: mailbox.said(rank) is not None, peer=rank, chunk=self._steps - 1)
        return mailbox.said(rank) or 0
