"""What the workers of the exchanges' tests run, on each rank."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_train.runtime.errors import PeerTimeoutError
from ditron_train.symm import exchange as module
from ditron_train.tp import TPContext
from tests.support.patience import Lateness

CPU = torch.device("cpu")


def _timeout_of(call: Callable[[], object], timeout_s: float = 1.0) -> tuple[int, str]:
    """Who is missing, and the words."""
    least, module._LEAST_TIMEOUT_S = module._LEAST_TIMEOUT_S, timeout_s
    os.environ["DITRON_TIMEOUT_S"] = str(timeout_s)
    try:
        call()
    except PeerTimeoutError as error:
        return error.missing_rank, str(error)
    finally:
        module._LEAST_TIMEOUT_S = least
        del os.environ["DITRON_TIMEOUT_S"]
    raise AssertionError("nobody was missing")


def overlapping_groups_in_sequence() -> tuple[list, list[str]]:
    """What each group's ranks said, and the keys that are left in the store of the largest."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lists = [list(range(world)), [0, 1], list(range(1, world))]
    groups = [dist.new_group(ranks) for ranks in lists]
    logged = []
    for repeat in range(10):
        logged = [module.exchange(group, (repeat, rank)) for group, ranks in zip(groups, lists) if rank in ranks]
    dist.barrier()
    keys = module._rendezvous_of_groups[groups[0]].store
    words = [*map(str, range(world)), "arrived", "outcome"]
    return logged, [f"{number}/{word}" for number in range(12) for word in words if keys.check([f"{number}/{word}"])]


def a_rank_does_not_come() -> tuple[int, str] | None:
    group = dist.new_group(list(range(dist.get_world_size())))
    answer = None
    if dist.get_rank() != 2:
        answer = _timeout_of(lambda: module.exchange(group, "here"))
    dist.barrier()
    return answer


def a_rank_does_not_come_in_three_turns() -> tuple[int, str] | None:
    """As ``a_rank_does_not_come``, where the others wait three deadlines."""
    group = dist.new_group(list(range(dist.get_world_size())))
    answer = None
    if dist.get_rank() != 2:
        answer = _timeout_of(lambda: module.exchange(group, "here", turns=3), 0.5)
    dist.barrier()
    return answer


def a_rank_comes_too_late() -> tuple[int, float, float, list[str]]:
    """Who was missing, how long it took to hear that, how much of it a busy machine took, and what all said when they
    met afterwards."""
    group = dist.new_group(list(range(dist.get_world_size())))
    if dist.get_rank() == 2:
        dist.barrier()
    with Lateness() as lateness:
        start_s = time.monotonic()
        missing, _ = _timeout_of(lambda: module.exchange(group, "nobody hears this"), 3.0)
        seconds = time.monotonic() - start_s
    if dist.get_rank() != 2:
        dist.barrier()
    return missing, seconds, lateness.seconds, module.exchange(group, f"rank {dist.get_rank()}")


def a_step_that_meets_nobody() -> tuple[int, float, float] | None:
    """Who was missing from a step that all ranks do together, how long it took to say so, and how much of that a busy
    machine took."""
    group, answer = dist.new_group(list(range(dist.get_world_size()))), None
    if dist.get_rank() != 2:
        with Lateness() as lateness:
            start_s = time.monotonic()
            missing, _ = _timeout_of(
                lambda: module.on_all_ranks(group, "rendezvous", lambda: module.exchange(group, "here")), 2.5
            )
            seconds = time.monotonic() - start_s
        answer = missing, seconds, lateness.seconds
    dist.barrier()
    return answer


def groups_of_different_sizes() -> tuple[int, str]:
    """Rank 0 was given the group of the first two ranks, the others that of all."""
    pair, everyone = dist.new_group([0, 1]), dist.new_group(list(range(dist.get_world_size())))
    answer = _timeout_of(lambda: TPContext(pair if dist.get_rank() == 0 else everyone, CPU))
    dist.barrier()
    return answer


def groups_of_one_name() -> list[list[str]]:
    """As if a group had been destroyed and another been given its name, and with it its part of the store."""
    group = dist.new_group(list(range(dist.get_world_size())))
    return [module._Rendezvous.of(group).exchange(text) for text in ("old", "new")]


def groups_of_one_name_and_other_ranks() -> list[list[str]]:
    """As if a group of two ranks had been destroyed, and one of three been given its name and its part of the
    store."""
    pair, everyone = dist.new_group([0, 1]), dist.new_group(list(range(dist.get_world_size())))
    part, find_store = (
        dist.PrefixStore("one name", distributed_c10d._get_default_store()),
        distributed_c10d._get_process_group_store,
    )
    distributed_c10d._get_process_group_store = lambda group: part
    try:
        groups = [("old", pair), ("new", everyone)] if dist.get_rank() < 2 else [("new", everyone)]
        return [module._Rendezvous.of(group).exchange(text) for text, group in groups]
    finally:
        distributed_c10d._get_process_group_store = find_store


def a_group_that_never_met() -> tuple[list[str], list[list[str]]]:
    """As ``groups_of_one_name``, but to the first group the last rank never came; two exchanges of the next one."""
    group, last = dist.new_group(list(range(dist.get_world_size()))), dist.get_world_size() - 1
    words = []
    if dist.get_rank() != last:
        before = module._Rendezvous.of(group)
        words = [_timeout_of(lambda: before.exchange("old"))[1] for _ in range(2)]
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.2)  # those that are here earlier find what it said in the first group
    rendezvous = module._Rendezvous.of(group)
    return words, [rendezvous.exchange(text) for text in ("new", "newer")]


def a_rank_is_interrupted() -> tuple[str, float, list[str]]:
    """What the others hear when one rank leaves an exchange before the last has come, how soon, and the next
    exchange."""
    group, rank, words = dist.new_group(list(range(dist.get_world_size()))), dist.get_rank(), "no error"
    rendezvous, start_s = module._Rendezvous.of(group), time.monotonic()
    if rank == 0:
        rendezvous._wait = lambda deadline_s: signal.raise_signal(signal.SIGINT)
    if rank == 2:
        time.sleep(0.3)
    try:
        rendezvous.exchange("interrupted")
    except (PeerTimeoutError, KeyboardInterrupt) as error:
        words = f"{type(error).__name__} {getattr(error, 'missing_rank', '')}"
    finally:
        rendezvous.__dict__.pop("_wait", None)
    return words, time.monotonic() - start_s, rendezvous.exchange(f"rank {rank}")


def a_rank_stays_away() -> tuple[str, float, list[str]]:
    """What the others hear when one rank says that it will not come, how soon, and the next exchange."""
    group, rank, words = dist.group.WORLD, dist.get_rank(), "no error"
    module.exchange(group, None)
    start_s = time.monotonic()
    try:
        if rank == 1:
            time.sleep(0.3)
            module.abort_next_exchange(group)
        else:
            module.exchange(group, "alone")
    except PeerTimeoutError as error:
        words = f"{type(error).__name__} {error.missing_rank}"
    return words, time.monotonic() - start_s, module.exchange(group, f"rank {rank}")


def the_last_is_slow_to_publish() -> tuple[list[str], list[str]]:
    """The deadline passes when all have come and the last of them has not published what they said yet."""
    rendezvous, settle = (
        module._Rendezvous.of(dist.new_group(list(range(dist.get_world_size())))),
        module._Rendezvous._settle_with_all,
    )

    def slowly(self: module._Rendezvous, keys: list[str]) -> object:
        time.sleep(2.0)
        return settle(self, keys)

    os.environ["DITRON_TIMEOUT_S"] = "1"
    least, module._LEAST_TIMEOUT_S = module._LEAST_TIMEOUT_S, 1.0
    if dist.get_rank() == 2:
        time.sleep(0.3)
        module._Rendezvous._settle_with_all = slowly
    try:
        first = rendezvous.exchange("first")
    finally:
        module._Rendezvous._settle_with_all, module._LEAST_TIMEOUT_S = settle, least
        del os.environ["DITRON_TIMEOUT_S"]
    return first, rendezvous.exchange("second")


def one_gives_up_when_the_last_comes() -> str:
    """The first gives up just after the last has looked for an outcome and found none."""
    rendezvous, rank = module._Rendezvous.of(dist.new_group(list(range(dist.get_world_size())))), dist.get_rank()
    if rank == 0:
        rendezvous._wait = lambda deadline_s: rendezvous.store.wait(["1/1"])  # returns None: the deadline has passed
    if rank == 2:
        rendezvous.store.wait(["1/outcome"])
        check, rendezvous.store = rendezvous.store.check, _Answers(rendezvous.store)
        rendezvous.store.check = lambda keys: keys != ["1/outcome"] and check(keys)
    try:
        return str(rendezvous.exchange("here"))
    except PeerTimeoutError as error:
        return str(error)


class _Answers:
    """A store whose methods can be replaced."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def keys_that_a_waiting_rank_looks_up() -> tuple[int, int]:
    """How many checks the first of the ranks made until the last had come, and how many keys they were for."""
    rendezvous, asked = module._Rendezvous.of(dist.new_group(list(range(dist.get_world_size())))), []
    if dist.get_rank() == 0:
        check, rendezvous.store = rendezvous.store.check, _Answers(rendezvous.store)
        rendezvous.store.check = lambda keys: asked.append(len(keys)) or check(keys)
    else:
        time.sleep(0.5)
    rendezvous.exchange("here")
    return len(asked), sum(asked)


def over_a_tcp_store() -> tuple[list[bool], str, list[str]]:
    """Exchanges of ranks that come last in turn, one that a rank does not come to, and the next, over torchrun's
    store."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group, find_store = dist.new_group(list(range(world))), distributed_c10d._get_process_group_store
    port = module.exchange(group, _free_port())[0]
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=60))
    part = dist.PrefixStore("part/", store)
    distributed_c10d._get_process_group_store = lambda group: part
    try:
        rendezvous, right, words = module._Rendezvous.of(group), [], "no error"
        for turn in range(12):
            time.sleep(0.05 * (turn % world == rank))
            values = [bytes([0, 255, turn, peer]) * 1000 for peer in range(world)]
            right.append(rendezvous.exchange(values[rank]) == values)
        if rank != world - 1:
            words = _timeout_of(lambda: rendezvous.exchange("here"))[1]
        dist.barrier()
        if rank == world - 1:
            words = _timeout_of(lambda: rendezvous.exchange("late"))[1]
        return right, words, rendezvous.exchange(f"rank {rank}")
    finally:
        distributed_c10d._get_process_group_store = find_store
        dist.barrier()  # the first rank serves the store


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def somebody_writes_to_the_store(word: bytes) -> list[str]:
    """What each rank hears where ``word`` is in the store as the last rank's value, and then as the outcome."""
    group, rank, heard = dist.new_group(list(range(dist.get_world_size()))), dist.get_rank(), []
    for key in ("1/1", "1/outcome"):
        dist.barrier()
        rendezvous = module._Rendezvous.of(group)
        dist.barrier()
        if rank == 1 and key == "1/1":
            rendezvous.store.set(key, word)
            rendezvous.store, real = _Answers(rendezvous.store), rendezvous.store
            rendezvous.store.set = lambda name, value, real=real: None if name == "1/1" else real.set(name, value)
        elif rank == 1:
            rendezvous.store.set(key, word)
        dist.barrier()
        try:
            heard.append(str(rendezvous.exchange("here")))
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
        dist.barrier()
        rendezvous.store.delete_key("1/outcome") if rank == 0 else None
    return heard
