"""Records one call of an op, or of a transformer layer, natively and with ours: Chrome traces and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ditron_train.bench.session import BenchSession, bench_session
from ditron_train.bench.tables import terminal
from ditron_train.bench.tp_contenders import Case, op_contenders
from ditron_train.runtime.errors import NotSupportedError, SettingError
from ditron_train.tp import get_context
from ditron_train.trace.show_timeline import draw_timelines, summary
from ditron_train.trace.timeline import computation_us, read_chrome_trace

__all__ = ["record_op"]

_WARMUP = 3
_ON_CPU = (256, 256, 256)


def record_op(op: str, shape: tuple[int, int, int] | None, folder: Path) -> int:
    """Writes ``<op>-native.json``, ``<op>-ditron.json`` (Perfetto and chrome://tracing read them) and ``<op>.png``.

    Rank 0 is recorded while all ranks run. Collective; returns the exit status.

    Raises:
        SettingError: The shape does not divide over the ranks, or the folder cannot be written.
        NotSupportedError: A layer without a GPU or without megatron-core.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"cannot write into {folder}: {error.strerror}") from None
    with bench_session("trace", argparse.Namespace()) as session:
        if op == "layer":
            return _record_layer(session, folder)
        m, n, k = shape or (_ON_CPU if session.device.type == "cpu" else (8192, 28672, 8192))
        split = n if op == "ag_gemm" else k
        if min(m, n, k) < 1:
            raise SettingError(f"{op} {m}x{n}x{k}: sizes have to be above 0")
        if m % session.world_size or split % session.world_size:
            raise SettingError(f"{op} {m}x{n}x{k} does not divide over {session.world_size} ranks")
        dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
        contenders = op_contenders(session, Case(op, "custom", m, n, k), get_context(None, session.device), dtype)
        return _record(session, f"{op} {m} x {n} x {k}", op, {name: contenders[name] for name in ("native", "ditron")}, folder)


def _record_layer(session: BenchSession, folder: Path) -> int:
    if session.device.type != "cuda":
        raise NotSupportedError("a whole layer is recorded on GPUs only")
    try:
        from ditron_train.bench.megatron_tp import layer_contenders, megatron_world
    except ImportError as error:
        raise NotSupportedError(f"a layer needs megatron-core: {error}; pip install 'ditron_train[megatron]'") from None
    with megatron_world(session):
        return _record(session, "LLaMA-70B layer, forward and backward", "layer", layer_contenders(session), folder)


def _record(
    session: BenchSession, title: str, stem: str, contenders: dict[str, Callable[[int], object]], folder: Path
) -> int:
    timelines = {}
    for name, contender in contenders.items():
        path = folder / f"{stem}-{name}.json"
        _profile(session, f"ditron_train {stem}" if name == "ditron" else f"native {stem}", contender, path)
        if session.rank == 0:
            timelines[name] = read_chrome_trace(path)
    if session.rank == 0:
        draw_timelines(f"{title}, {session.world_size} ranks", timelines, folder / f"{stem}.png")
        computation = computation_us(timelines["native"])
        for name, intervals in timelines.items():
            terminal().print(summary(name, intervals, computation))
        terminal().print(f"written: {folder / stem}.png, {stem}-native.json, {stem}-ditron.json")
    return 0


def _profile(session: BenchSession, label: str, contender: Callable[[int], object], path: Path) -> None:
    """Runs ``contender`` a few times and records one call on rank 0."""
    on_gpu = session.device.type == "cuda"
    for index in range(_WARMUP if on_gpu else 1):
        contender(index)
    if on_gpu:
        torch.cuda.synchronize(session.device)
    dist.barrier()
    if session.rank != 0:
        contender(0)
        if on_gpu:
            torch.cuda.synchronize(session.device)
    else:
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            with record_function(label):
                contender(0)
            if on_gpu:
                torch.cuda.synchronize(session.device)
        profiler.export_chrome_trace(str(path))
    dist.barrier()
