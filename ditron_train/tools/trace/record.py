"""Records one call of an op, or of a layer, natively and fused: Chrome traces.

The host is ahead of the device, as in training, and the ranks begin together: the device waits a little in front of
the call, then for all ranks. Neither is shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ditron_train.runtime.errors import NotSupportedError, SettingError
from ditron_train.runtime.files import export_trace
from ditron_train.runtime.versions import pip_command
from ditron_train.tools.arguments import check_folder, refuse
from ditron_train.tools.cases import BenchCase, Shape
from ditron_train.tools.catalog import PACKAGES, cases_of, megatron_groups
from ditron_train.tools.nothing_compared import require_compared
from ditron_train.tools.op_rows import OpCalls, parts_of, shapes_for
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.tables import terminal
from ditron_train.tools.trace.phases import at_best, show_phases
from ditron_train.tools.trace.timeline import read_chrome_trace

_WARMUP = 3
_HEAD_START_CYCLES = 40_000_000  # about 20 ms of the GPU's clock: what a layer's launches take while they are recorded

Contenders = Mapping[str, Callable[[int], list[torch.Tensor]]]


def record_op(
    op: str, shape: tuple[int, int, int] | None, folder: Path, fp8: str | None = None, model: str | None = None
) -> int:
    """Writes ``<op>-native.json``, ``<op>-fused.json``, which Perfetto and chrome://tracing read.

    Rank 0 is recorded while all ranks run. Collective; returns the exit status. A recipe ``fp8`` and a ``model``, at
    whose shape the op is recorded, are part of the files' names.

    Raises:
        SettingError: A shape that does not divide over the ranks or that the op does not take, a model that the op has
            no shape of, a folder that cannot be written, or an op that is not in FP8.
        NotSupportedError: What the op needs (a GPU, megatron-core, Transformer Engine) is not there.
    """
    case = _cases(fp8).get(op)
    if fp8 is not None and case is None and op not in _FP8_LAYERS:
        raise SettingError(f"--fp8 {fp8}: {op} is not in FP8; {', '.join([*_cases(fp8), *_FP8_LAYERS])} are")
    if shape is not None and not (case and takes_shape(case)):
        raise SettingError(f"--shape is of ag_gemm and gemm_rs; {op} has one of its own")
    if model is not None and (case is None or shape is not None):
        what = "--shape and --model are two shapes" if case is not None else f"--model is of ops; {op} is a layer"
        raise SettingError(what)
    check_folder(folder)
    with bench_session("trace", argparse.Namespace()) as session:
        make: Callable[..., Any]
        if case is None:
            make, needs, feature = _LAYERS[op]
            make = partial(make, fp8=fp8) if fp8 is not None else make
        else:
            make, needs, feature = partial(_op_at_shape, case=case, model=model), (), None
        for need in needs:
            need(session, op)
        with make(session, op=op, shape=shape) as (title, contenders):
            if feature is not None:
                bits = session.equal_layer(feature, contenders["fused"], contenders["native"])
                require_compared({op: bits is not None}, "no fused call ran in the layer (the log says why)")
            stem = "-".join([op, *([f"fp8-{fp8}"] if fp8 else []), *([_as_file_name(model)] if model else [])])
            return _record(session, title, stem, {name: contenders[name] for name in ("native", "fused")}, folder)


def _as_file_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", model).strip("-")


def _gpu(session: BenchSession, op: str) -> None:
    if session.device.type != "cuda":
        raise NotSupportedError(f"{op} is recorded on GPUs only")


def _module(name: str, words: str) -> Callable[[BenchSession, str], None]:
    def need(session: BenchSession, op: str) -> None:
        if importlib.util.find_spec(name.split(".")[0]) is None or importlib.util.find_spec(name) is None:
            raise NotSupportedError(f"{op} needs {words}")

    return need


_megatron = _module("megatron.core", f"megatron-core: {pip_command('megatron-core')}")
_te = _module("transformer_engine", f"Transformer Engine: {pip_command('transformer-engine')}")


@contextmanager
def _op_at_shape(
    session: BenchSession, op: str, shape: tuple[int, int, int] | None, *, case: BenchCase[Any, Any], model: str | None
) -> Iterator[tuple[str, Contenders]]:
    """An op at its first shape or that of ``model``, a GEMM of a linear layer at ``shape``."""
    on_gpu = session.device.type == "cuda"
    chosen = case.traced_shape(session.world_size, on_gpu)
    if shape is not None:
        chosen = Shape("custom", dict(zip("mnk", shape, strict=True)))
    if model is not None:
        chosen = shapes_for(case, argparse.Namespace(model=[model]), session.world_size, on_gpu)[0]
    refuse(case.unsupported_shape(chosen, session.world_size))
    sizes = ", ".join(f"{name} {size}" for name, size in chosen.sizes.items())
    with megatron_groups(case.groups, session), case.surroundings(chosen):
        calls = OpCalls(session, case, chosen)
        is_native = case.asks_gate and calls.no_row_reason is not None
        require_compared({op: not is_native}, str(calls.no_row_reason))
        yield f"{case.row}, {sizes}", calls.both()


@contextmanager
def _tp_layer(session: BenchSession, op: str, shape: None, fp8: str | None = None) -> Iterator[tuple[str, Contenders]]:
    from ditron_train.tools.bench.megatron_tp import layer_contenders, megatron_world

    is_split = op == "layer"
    words = "LLaMA-70B layer, forward and backward" + ("" if is_split else ", without sequence parallelism")
    with megatron_world(session):
        yield words, layer_contenders(session, fp8, is_split=is_split)


@contextmanager
def _attention(
    session: BenchSession, op: str, shape: None, fp8: str | None = None
) -> Iterator[tuple[str, Contenders]]:
    from ditron_train.tools.bench.megatron_sp import attention_contenders

    with attention_contenders(session, fp8) as contenders:
        yield "Ulysses attention of 64 heads, 16384 tokens, forward and backward", contenders


@contextmanager
def _moe(session: BenchSession, op: str, shape: None, fp8: str | None = None) -> Iterator[tuple[str, Contenders]]:
    from ditron_train.tools.bench.megatron_ep import moe_contenders

    with moe_contenders(session, fp8) as contenders:
        yield "MoE layer, forward and backward", contenders


#: Layers by name: what makes the contenders, what it needs, and the feature.
_LAYERS: dict[str, tuple[Callable[..., Any], tuple[Callable[..., None], ...], str]] = {
    "layer": (_tp_layer, (_gpu, _megatron), "tp"),
    "layer_ar": (_tp_layer, (_gpu, _megatron), "tp"),
    "attention_layer": (_attention, (_gpu, _megatron, _te), "sp"),
    "moe_layer": (_moe, (_megatron,), "ep"),
}


#: Those of them whose linear layers Transformer Engine computes.
_FP8_LAYERS = tuple(name for name in _LAYERS if name != "layer_ar")


def _cases(fp8: str | None = None) -> dict[str, BenchCase[Any, Any]]:
    """Every op with rows of its own, by the name in them."""
    return {case.row: case for room in PACKAGES for cases in parts_of(cases_of(room, fp8)).values() for case in cases}


def takes_shape(case: BenchCase[Any, Any]) -> bool:
    """Whether ``--shape M N K`` is of this op."""
    return {name for shape in case.shapes(1, False) for name in shape.sizes} == set("mnk")


def traced_ops() -> list[str]:
    """What ``--op`` takes."""
    return list(dict.fromkeys([*_cases(), *_LAYERS]))


def _record(
    session: BenchSession, title: str, stem: str, contenders: dict[str, Callable[[int], object]], folder: Path
) -> int:
    timelines = {}
    for name, contender in contenders.items():
        path = folder / f"{stem}-{name}.json"
        _profile(session, f"ditron_train {stem}" if name == "fused" else f"native {stem}", contender, path)
        if session.rank == 0:
            timelines[name] = read_chrome_trace(path)
    if session.rank == 0:
        terminal().print(f"{title}, {session.world_size} ranks", highlight=False)
        if all(timelines.values()):
            show_phases("rank 0", timelines["native"], timelines["fused"], "the call")
            terminal().print(at_best(timelines["native"], timelines["fused"]), highlight=False)
        terminal().print(f"written: {folder / stem}-native.json, {stem}-fused.json")
    return 0


def _profile(session: BenchSession, label: str, contender: Callable[[int], object], path: Path) -> None:
    """Runs ``contender`` a few times and records one call on rank 0."""
    on_gpu = session.device.type == "cuda"
    barrier = torch.zeros(1, device=session.device)
    for index in range(_WARMUP if on_gpu else 1):
        contender(index)

    def call() -> None:
        if on_gpu:
            torch.cuda._sleep(_HEAD_START_CYCLES)
            dist.all_reduce(barrier)
        contender(0)
        if on_gpu:
            torch.cuda.synchronize(session.device)

    if on_gpu:
        torch.cuda.synchronize(session.device)
    dist.barrier()
    if session.rank != 0:
        call()
    else:
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            with record_function(label):
                call()
        export_trace(profiler, path)
    dist.barrier()
