"""What ranks do in the tests of faults: one of them dies at a place that the campaign has found."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from ditron_train.pp import mailbox
from ditron_train.runtime.errors import PeerTimeoutError
from ditron_train.symm import exchange as agreements
from ditron_train.symm import shm_transport
from ditron_train.symm.exchange import exchange

CPU = torch.device("cpu")
LEAST_S = 3.0


def _die(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_with_a_file(room: str) -> list[str]:
    """The first rank dies with its file of shared memory made and not yet mapped by the others; the others say which
    of its files are left."""
    agreements._LEAST_TIMEOUT_S = LEAST_S
    pids = exchange(dist.group.WORLD, os.getpid())
    module = shm_transport if room == "symm" else mailbox
    right = module.map_file

    def make_and_die(path: str, num_bytes: int, create: bool) -> object:
        mapped = right(path, num_bytes, create)
        if create and dist.get_rank() == 0:
            _die()
        return mapped

    module.map_file = make_and_die
    try:
        if room == "symm":
            shm_transport.ShmTransport().allocate(dist.group.WORLD, CPU, 4096)
        else:
            mailbox.Mailbox(dist.group.WORLD, CPU)
    except PeerTimeoutError:
        return [name for name in os.listdir(shm_transport.FOLDER) if str(pids[0]) in name.split("-")]
    return ["nothing was raised"]


def last_one_dies_before_it_publishes() -> tuple[float, float, int]:
    """The first rank comes last to an agreement and dies before it tells the others; how long they take for this one
    and for the next, and whom that one misses."""
    agreements._LEAST_TIMEOUT_S = LEAST_S
    exchange(dist.group.WORLD, 0)
    if dist.get_rank() == 0:
        time.sleep(0.5)
        agreements._Rendezvous._settle_with_all = _die
    begun_s = time.monotonic()
    exchange(dist.group.WORLD, 1)
    first_s = time.monotonic() - begun_s
    try:
        exchange(dist.group.WORLD, 2)
    except PeerTimeoutError as error:
        return first_s, time.monotonic() - begun_s - first_s, error.missing_rank
    return first_s, 0.0, -1


def layout_times_out() -> str:
    """A wait for counts gave up: the movement that follows raises at once."""
    from ditron_train.ep import get_ep_context

    context = get_ep_context(dist.group.WORLD, CPU, 4, 2)
    context.counts_channel.record_timeout(peer=1, chunk=0, expected_epoch=1, seen_epoch=0)
    try:
        context.enter_move(context.dispatch_channel)
    except PeerTimeoutError as error:
        return error.op
    return "nothing was raised"
