"""What the workers of the primitives' tests run, on each rank, on the device that ``use`` names (the CPU)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import kernels_lang as kernels  # noqa: E402

from ditron_train.runtime.device import kernel_target  # noqa: E402
from ditron_train.runtime.errors import DitronError  # noqa: E402
from ditron_train.symm import Channel, get_arena  # noqa: E402
from tests.support.patience import Lateness  # noqa: E402

DEVICE = torch.device("cpu")
TARGET = "interpreter"


def use(device: torch.device) -> None:
    """From now on the bodies run there."""
    global DEVICE, TARGET
    DEVICE, TARGET = device, kernel_target(device)


def all_gather(num_elements: int, dtype_name: str, first_epoch: int, repeats: int) -> list[int]:
    """An all-gather made of the primitives, against gloo; returns the epochs that the flags hold at the end."""
    world = dist.get_world_size()
    dtype = getattr(torch, dtype_name)
    arena = get_arena(None, DEVICE)
    name = f"lang.all_gather {dtype_name} {first_epoch}"
    channel = Channel(arena, name, world, signature_fields=("elements",), first_epoch=first_epoch)
    gathered = arena.tensor(name, (world, num_elements), dtype)
    signature = channel.signature((num_elements,))
    for repeat in range(repeats):
        generator = torch.Generator().manual_seed(10 * repeat + dist.get_rank())
        source = torch.randn(num_elements, generator=generator).to(DEVICE, dtype)
        kernels.push_all[(1,)](
            source, gathered.addresses, channel.signals.addresses, channel.ready.addresses, channel.ready.local,
            signature, channel.tickets, channel.control, num_elements, world, 256, TARGET,
        )  # fmt: skip
        wait = kernels.wait_all if repeat % 2 == 0 else kernels.wait_each
        constants = (world, 4, TARGET) if repeat % 2 == 0 else (world, TARGET)
        wait[(1,)](channel.signals.local, channel.tickets, channel.control, *constants)
        channel.synchronize()
        expected = [torch.empty_like(source) for _ in range(world)]
        dist.all_gather(expected, source)
        assert torch.equal(torch.stack(expected), gathered.local)
        dist.barrier()
    return channel.signals.local.tolist()


def different_signatures() -> str:
    """Each rank announces another number of elements; returns the error's words."""
    world, rank = dist.get_world_size(), dist.get_rank()
    arena = get_arena(None, DEVICE)
    channel = Channel(arena, "lang.mismatch", world, signature_fields=("elements",))
    buffer = arena.tensor("lang.mismatch", (world, 64), torch.float32)
    kernels.push_all[(1,)](
        torch.zeros(64, device=DEVICE),
        buffer.addresses,
        channel.signals.addresses,
        channel.ready.addresses,
        channel.ready.local,
        channel.signature((rank,)),
        channel.tickets,
        channel.control,
        64,
        world,
        64,
        TARGET,
    )
    try:
        channel.synchronize()
    except DitronError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def absent_peer() -> tuple[str, dict]:
    """Rank 0 waits for flags that nobody sets; returns the error and its fields."""
    world = dist.get_world_size()
    channel = Channel(get_arena(None, DEVICE), "lang.absent", world)
    if dist.get_rank() != 0:
        return "", {}
    kernels.wait_each[(1,)](channel.signals.local, channel.tickets, channel.control, world, TARGET)
    try:
        channel.synchronize()
    except DitronError as error:
        return type(error).__name__, dict(vars(error))
    return "no error", {}


def waits_without_a_peer(launches: int) -> list[tuple[float, float]]:
    """Rank 0 waits again and again for flags that nobody sets; returns how long each launch took, and how long without
    the lateness of the machine."""
    world, seconds = dist.get_world_size(), []
    channel = Channel(get_arena(None, DEVICE), "lang.waits", world)
    if dist.get_rank() == 0:
        for _ in range(launches):
            with Lateness() as late:
                begun_s = time.monotonic()
                kernels.wait_each[(1,)](channel.signals.local, channel.tickets, channel.control, world, TARGET)
                took_s = time.monotonic() - begun_s
            seconds.append((took_s, took_s - late.seconds))
    return seconds


def shared_memory_calls() -> bool:
    """putmem, getmem, signal_op and barrier_all: each rank writes to the next one and reads it back."""
    world, rank = dist.get_world_size(), dist.get_rank()
    arena = get_arena(None, DEVICE)
    channel = Channel(arena, "lang.shmem", 2)
    buffer = arena.tensor("lang.shmem", (100,), torch.float32)
    source, back = torch.arange(100.0, device=DEVICE) + 1000 * rank, torch.zeros(100, device=DEVICE)
    kernels.put_get[(1,)](
        source, back, buffer.addresses, channel.signals.addresses, channel.signals.local, channel.ready.addresses,
        channel.ready.local, channel.tickets, channel.control, 100, world, 32, TARGET,
    )  # fmt: skip
    channel.synchronize()
    came_from = (rank + world - 1) % world
    assert channel.signals.local.tolist() == [1, 7]
    assert torch.equal(back, source)
    return torch.equal(buffer.local, torch.arange(100.0, device=DEVICE) + 1000 * came_from)
