"""Measures what estimates need of this machine and writes a profile for ``predict`` (under torchrun).

GEMMs, attention, passes over memory, products and casts in FP8, NCCL's collectives and messages, copy engines: a
minute or two. The rates that they show are fitted; the others stay those of the nearest profile.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import ditron_train
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.nvidia_driver import driver_version
from ditron_train.runtime.profiles import Profile, known_rates, machine_of, profile_of_device
from ditron_train.runtime.provenance import nccl_version
from ditron_train.tools.arguments import add_count
from ditron_train.tools.bench.profile_fp8 import fp8_calls, fp8_library
from ditron_train.tools.predict.fit import fit_profile
from ditron_train.tools.predict.rows import estimate_of
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tp import get_tp_context, start_all_gather

_GEMMS = ((8192, 1792, 4096), (8192, 3584, 8192), (8192, 8192, 4096), (4096, 4096, 4096), (8192, 14336, 8192))
_ATTENTION = ((4096, 16), (8192, 8), (16384, 8))
_CHANNELS = 128
_FP8_TENSORS = ((8192, 8192), (8192, 28672))
_MB = (8, 64, 256)
_SMALL_GEMMS, _SMALL_ATTENTION, _SMALL_MB = ((64, 64, 64), (64, 64, 128)), ((64, 2),), (0.125, 0.25)  # on the CPU

Call = Callable[[int], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench profile``."""
    parser.add_argument(
        "--output",
        dest="profile",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="profile to write (default %(default)s)",
    )
    add_count(parser, "repetitions", "timed calls", on_gpu=15, on_cpu=2)
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="calls before them (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measures and writes the profile.

    Raises:
        SettingError: Its folder cannot be written.
    """
    parent = arguments.profile.absolute().parent
    if not os.access(parent, os.W_OK):
        raise SettingError(
            f"cannot write the profile {arguments.profile}: there is no such folder, or it is read-only"
        )
    with bench_session("profile", arguments) as session:
        rows = _rows(session)
        if session.rank == 0:
            fit_profile(_start(session), rows, estimate_of, farthest=math.inf).save(arguments.profile)
            get_logger("bench").info(
                "written: %s (python -m ditron_train predict --device %s)", arguments.profile, arguments.profile
            )
    return 0


def _start(session: BenchSession) -> Profile:
    """The nearest profile under this machine's name."""
    device = session.device
    machine = machine_of(device)
    known = profile_of_device(machine.device)
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30 if on_gpu else 1.0
    made_with = {
        "ditron_train": ditron_train.__version__,
        "torch": torch.__version__,
        "nccl": nccl_version() or "",
        "driver": driver_version() or "",
        "ranks": str(session.world_size),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    start = known or Profile(machine, known_rates(machine), memory)
    return replace(start, memory_gib=round(memory, 1), about="Measured by bench profile", made_with=made_with)


def _rows(session: BenchSession) -> list[Row]:
    on_gpu = session.device.type == "cuda"
    calls = _products(session, on_gpu) | _passes(session, on_gpu)
    library = fp8_library(session.device)
    if library is not None:
        shapes = (_GEMMS, _FP8_TENSORS) if on_gpu else (((64, 64, 128),), ((64, 128), (128, 128)))
        calls |= fp8_calls(session, library, *shapes)
    if session.world_size > 1:
        calls |= _exchanges(session, on_gpu)
    rows = []
    for (op, direction, sizes), call in calls.items():
        timing = session.measure({"native": call})["native"]
        timings = {"native": timing, "ditron": timing}
        rows.append(session.row(op, direction, "profile", dict(sizes), timings, True))  # type: ignore[arg-type]
        if session.rank == 0:
            get_logger("bench").info("%s %s: %.1f us", op, dict(sizes), timing.median_us)
    return rows


Key = tuple[str, str, tuple[tuple[str, int], ...]]


def _products(session: BenchSession, on_gpu: bool) -> dict[Key, Call]:
    """GEMMs, and attention in both directions."""
    calls: dict[Key, Call] = {}
    for m, n, k in _GEMMS if on_gpu else _SMALL_GEMMS:
        x, weight = (session.values(shape, session.dtype, seed) for seed, shape in enumerate(((m, k), (n, k))))
        key = ("gemm_nt", "forward", (("m", m), ("n", n), ("k", k)))
        calls[key] = lambda index, x=x, weight=weight: torch.matmul(x, weight.t())
    for length, heads in _ATTENTION if on_gpu else _SMALL_ATTENTION:
        shape = (1, heads, length, _CHANNELS)
        query, keys, value = (session.values(shape, session.dtype, seed).requires_grad_() for seed in range(3))
        grad = session.values(shape, session.dtype, 3)
        out = _attend(query, keys, value)
        sizes = (("seqlen", length), ("heads", heads), ("head_size", _CHANNELS))
        calls["attention", "forward", sizes] = lambda index, q=query, k=keys, v=value: _attend(q, k, v)
        calls["attention", "backward", sizes] = lambda index, out=out, parts=(query, keys, value), grad=grad: (
            torch.autograd.grad(out, parts, grad, retain_graph=True)
        )
    return calls


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention, by cuDNN where it can: Transformer Engine takes that one, too."""
    wanted = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(wanted, set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _passes(session: BenchSession, on_gpu: bool) -> dict[Key, Call]:
    """Copies in order, and with heads in another order; the bytes are read and written."""
    calls: dict[Key, Call] = {}
    for mb in _MB if on_gpu else _SMALL_MB:
        num_bytes = int(mb * 2**20)
        x = session.values((num_bytes // (64 * 128 * session.dtype.itemsize), 64, 128), session.dtype, 0)
        out, turned = torch.empty_like(x), torch.empty_like(x.movedim(1, 0).contiguous())
        sizes = (("num_bytes", 2 * x.nbytes),)
        calls["memory_pass", "forward", sizes] = lambda index, x=x, out=out: out.copy_(x)
        calls["memory_reorder", "forward", sizes] = lambda index, x=x, out=turned: out.copy_(x.movedim(1, 0))
    return calls


def _exchanges(session: BenchSession, on_gpu: bool) -> dict[Key, Call]:
    """NCCL's all-gather, reduce-scatter, all-to-all and ring of messages; a gather by copy engines."""
    calls: dict[Key, Call] = {}
    world, rank = session.world_size, session.rank
    context = get_tp_context(dist.group.WORLD, session.device)
    for mb in _MB if on_gpu else _SMALL_MB:
        width = 1024
        rows = max(int(mb * 2**20) // (width * session.dtype.itemsize * world), 1)
        whole = session.values((rows * world, width), session.dtype, 0)
        part, other = session.values((rows, width), session.dtype, 1), torch.empty_like(whole)
        sizes = (("num_bytes", whole.nbytes),)
        calls["all_gather", "forward", sizes] = lambda index, whole=whole, part=part: dist.all_gather_into_tensor(
            whole, part
        )
        if on_gpu:  # gloo has no such one
            calls["reduce_scatter", "forward", sizes] = lambda index, whole=whole, part=part: (
                dist.reduce_scatter_tensor(part, whole)
            )
        calls["all_to_all", "forward", sizes] = lambda index, whole=whole, other=other: dist.all_to_all_single(
            other, whole
        )
        calls["copied_gather", "forward", sizes] = lambda index, part=part: start_all_gather(
            part, context=context
        ).wait()

        def send(index: int, whole: torch.Tensor = whole, other: torch.Tensor = other) -> None:
            ahead, behind = (rank + 1) % world, (rank - 1) % world
            operations = [dist.P2POp(dist.isend, whole, ahead), dist.P2POp(dist.irecv, other, behind)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        calls["nccl_send", "forward", sizes] = send
    return calls
