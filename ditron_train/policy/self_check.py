"""Whether kernels may run with libraries that are newer than all tested versions.

If a library is, a self-check of the ranks comes first, when Megatron makes its groups and at the first op of a group:

1. Each rank launches a probe kernel in the four ways that ops are launched: through Triton, directly, as a recorded
   call and as its repetition. Results are compared with torch's.
2. The ranks of a node make a small piece of symmetric memory, and hand values over to each other: program to program
   and rank to rank, by releases and acquires.

If anything fails on any rank, every op of that group runs natively, and one log line says why. With tested libraries
nothing is checked.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import torch
import torch.distributed as dist
from triton.tools.tensor_descriptor import TensorDescriptor

from ditron_train.lang.self_check import Terms, handover_kernel, scale_kernel
from ditron_train.runtime.device import kernel_target, with_index
from ditron_train.runtime.errors import PeerTimeoutError
from ditron_train.runtime.groups import GroupCache, unwrapped
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.versions import newer_libraries
from ditron_train.symm import Channel, SymmetricArena
from ditron_train.symm.exchange import abort_next_exchange, exchange
from ditron_train.symm.groups import make_group
from ditron_train.symm.transport import node_of_process

_ROWS, _COLUMNS, _BLOCK_ROWS = 32, 64, 16
_ROUNDS, _BLOCK, _LAUNCHES = 16, 1024, 3

_verdicts: GroupCache[tuple[dist.ProcessGroup | None, str], str | None] = GroupCache()


def self_check(group: dist.ProcessGroup | None, device: torch.device, turns: int = 1) -> str | None:
    """Why no kernel of this package may run in ``group`` on ``device``, or None; the same on every rank.

    Collective over ``group`` the first time if a library is not a tested version; every rank has the same libraries
    (``check_ranks_agree``). The result for the job's WORLD holds in all groups. Without a group it is the result for
    WORLD or, if there is none, of launches by this process alone.

    Raises:
        PeerTimeoutError: A rank did not arrive within ``turns`` deadlines (``symm.exchange``).
    """
    group = unwrapped(group)
    device = with_index(device)
    key, of_job = (group, str(device)), (dist.group.WORLD if dist.is_initialized() else None, str(device))
    if of_job in _verdicts and (group is None or _verdicts[of_job] is not None):
        return _verdicts[of_job]
    if key not in _verdicts:
        newer = newer_libraries()
        _verdicts[key] = _checked(newer, group, device, turns) if newer else None
    return _verdicts[key]


def forget_self_checks() -> None:
    """Drops the results: the next call checks again."""
    _verdicts.clear()


def _checked(newer: list[str], group: dist.ProcessGroup | None, device: torch.device, turns: int) -> str | None:
    failure = _agreed(group, "launching a kernel", _launch_failure(device), turns)
    if failure is None and group is not None:
        failure = _agreed(group, "handing values over", _handover_failure(group, device))
    libraries = ", ".join(newer)
    if failure is None:
        log_once(f"self-check {libraries}", f"the self-check beside {libraries} passed", name="policy")
        return None
    reason = f"the self-check beside {libraries}, other than what was tried, failed: {failure}"
    log_once(reason, f"everything natively: {reason}", name="policy", level=logging.WARNING)
    return reason


def _agreed(group: dist.ProcessGroup | None, step: str, failure: str | None, turns: int = 1) -> str | None:
    """The failures of all ranks in one sentence, or None."""
    failures = [failure] if group is None else exchange(group, failure, turns)
    failed = [f"rank {rank}: {words}" for rank, words in enumerate(failures) if words is not None]
    return f"{step} ({'; '.join(failed)})" if failed else None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _launch_failure(device: torch.device) -> str | None:
    """What went wrong when this rank launched ``scale_kernel``, or None."""
    try:
        target = kernel_target(device)
        x = torch.empty(_ROWS, _COLUMNS, dtype=torch.bfloat16, device=device)
        factor = torch.arange(_COLUMNS, dtype=torch.float32, device=device)
        terms = Terms(factor, 0.5 * factor)
        out = torch.empty(_ROWS, _COLUMNS, dtype=torch.float32, device=device)
        launch = KernelLaunch(scale_kernel, _ROWS // _BLOCK_ROWS, {"ROWS": _BLOCK_ROWS, "COLUMNS": _COLUMNS})
        arguments = (TensorDescriptor(x, list(x.shape), list(x.stride()), [_BLOCK_ROWS, _COLUMNS]), terms, out)
        for turn, way in enumerate(("through Triton", "directly", "recorded", "repeated")):
            # Whole numbers below 2**8 are exact in bf16, and their products and sums in fp32.
            x.copy_((torch.arange(x.numel(), device=device).view_as(x) + 7 * turn) % 256)
            out.fill_(-1.0)
            with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
                stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
                if turn < 3 or not launch.repeat("self-check", stream):
                    launch(*arguments, _COLUMNS, key="self-check" if turn == 2 else None)
            if not torch.equal(out, x.float() * terms.factor + terms.offset):
                return f"a kernel for {target} launched {way} gives wrong results"
    except Exception as error:  # whatever an untried library may raise
        return _words(error)
    return None


def _handover_failure(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What went wrong when the ranks of this node ran ``handover_kernel``, or None (collective over ``group``)."""
    nodes = exchange(group, node_of_process())
    members = [rank for rank, node in enumerate(nodes) if node == nodes[dist.get_rank(group)]]
    try:
        neighbours = group if len(members) == len(nodes) else make_group(group, members, "ditron_train self-check")
        return _hand_over(neighbours, device)
    except Exception as error:  # whatever an untried library may raise
        return _words(error)


def _values(launch: int, rank: int, device: torch.device) -> torch.Tensor:
    """The values that ``rank`` hands over, different ones in each launch: int32 ``[_ROUNDS, _BLOCK]``."""
    count = torch.arange(_ROUNDS * _BLOCK, dtype=torch.int32, device=device).view(_ROUNDS, _BLOCK)
    return count * (2 * launch + 3) + 1009 * rank + launch


def _hand_over(group: dist.ProcessGroup, device: torch.device) -> str | None:
    arena = None
    try:
        arena = SymmetricArena(group, device)
        failure = _hand_over_in(arena)
        arena.quiesce()
        return failure
    except PeerTimeoutError:
        raise
    except Exception:  # the others wait in the next exchange
        with suppress(RuntimeError):  # an error of the store would hide the first one
            abort_next_exchange(group)
        raise
    finally:
        if arena is not None:
            arena.abandon()  # it is no longer used, or something was raised


def _hand_over_in(arena: SymmetricArena) -> str | None:
    num_ranks, device, name = arena.world_size, arena.device, "self-check"
    slots = arena.tensor(name, (num_ranks, _ROUNDS, _BLOCK), torch.int32)
    channel = Channel(arena, name, num_ranks * _ROUNDS)
    pointers, out = channel.pointers(channel.signature(())), torch.zeros_like(slots.local)
    constants = {"ROUNDS": _ROUNDS, "BLOCK": _BLOCK, "TARGET": kernel_target(device)}
    kernel = KernelLaunch(handover_kernel, 2, constants)
    arena.quiesce()  # so that no kernel waits for a rank that failed before this

    def failure_of(launch: int) -> str | None:
        try:
            kernel(pointers, _values(launch, arena.rank, device), slots.addresses, slots.local, out)
            channel.synchronize()
        except Exception as error:  # the others wait for this rank in the exchange
            return _words(error)
        wrong = [peer for peer in range(num_ranks) if not torch.equal(out[peer], _values(launch, peer, device))]
        return f"what ranks {wrong} released was not what was acquired" if wrong else None

    for launch in range(_LAUNCHES):
        failure = failure_of(launch)
        if any(exchange(arena.group, failure)):  # after it all ranks have read their slots
            return failure
    return None
