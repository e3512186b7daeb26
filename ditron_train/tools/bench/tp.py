"""Benchmark of tensor parallelism: AG-GEMM, GEMM-RS, GEMM-AR, the backward of the linear layers, a transformer layer.

Native is what Megatron runs (NCCL, then cuBLAS or the reverse; for the backward megatron-core's own function), the
peer is PyTorch's async-TP. All of them, the GEMM alone and the collective alone are measured in one run on the same
inputs. With ``--fp8`` native is Transformer Engine in that recipe, and userbuffers are a peer of the layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.tools.arguments import add_common_arguments, add_shape_argument
from ditron_train.tools.cases import BenchCase, Shape
from ditron_train.tools.cases.tp_gemm import GemmCase, linear_shapes
from ditron_train.tools.catalog import cases_of
from ditron_train.tools.fp8.recipes import add_fp8_argument, check_fp8
from ditron_train.tools.op_rows import OpCalls, add_row, parts_of, shapes_for
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.timing import Timing
from ditron_train.tp.choices import choose, predict, rates_of

#: Transformer layers by ``--part``: whether they have sequence parallelism.
_LAYERS = {"layer": True, "layer_ar": False}


def _parts(fp8: str | None = None) -> dict[str, list[BenchCase[Any, Any]]]:
    """Ops by ``--part``; a layer is no op. In FP8 the linear layers are measured forward and backward, and a layer
    without sequence parallelism is native."""
    parts = parts_of(cases_of("tp", fp8))
    if fp8 is not None:
        parts["backward"] = parts.pop("column_linear") + parts.pop("row_linear")
    return {**parts, **{name: [] for name in _LAYERS if fp8 is None or _LAYERS[name]}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench tp``."""
    add_common_arguments(parser, model_option=False)
    parser.add_argument(
        "--model",
        nargs="?",
        action="append",
        metavar="NAME",
        help="alone: show what the cost model predicts beside what was measured; with a name: only "
        "this model's shapes "
        "(may be repeated)",
    )
    parser.add_argument("--part", action="append", choices=list(_parts()), help="only this part (may be repeated)")
    add_shape_argument(
        parser, "global sizes instead of workloads.json's (may be repeated; default without a GPU: 256 256 256)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, CPU: float32")
    add_fp8_argument(
        parser, "rows of Transformer Engine's layers in this recipe, beside those in bf16 of the same file"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for; returns 1 where bits differ.

    Raises:
        SettingError: No shape is left, one does not divide over the ranks, or --dtype beside --fp8.
        NotSupportedError: FP8 without Transformer Engine.
    """
    fp8: str | None = arguments.fp8
    check_fp8(fp8, "bench tp")
    if fp8 is not None and arguments.dtype:
        raise SettingError("--dtype is of rows without --fp8")
    with bench_session("tp", arguments) as session:
        known = _parts(fp8)
        for name in set(arguments.part or ()) - known.keys():
            get_logger("bench").warning("no rows for %s: in FP8 it is native", name)
        parts = {name: cases for name, cases in known.items() if name in (arguments.part or known)}
        on_gpu = session.device.type == "cuda"
        models = [shape.model for shape in linear_shapes("ag_gemm", session.world_size, True)]
        planned = {
            case.op.name: shapes_for(case, arguments, session.world_size, on_gpu, models=models)
            for cases in parts.values()
            for case in cases
        }
        for name, cases in parts.items():
            if name in _LAYERS or any(case.groups is not None for case in cases):
                _megatron_rows(session, cases, planned, arguments, layer=_LAYERS.get(name) if on_gpu else None)
            else:
                _rows(session, cases, planned, arguments)
        return session.finish()


def _rows(
    session: BenchSession,
    cases: list[BenchCase[Any, Any]],
    planned: Mapping[str, list[Shape]],
    arguments: argparse.Namespace,
) -> None:
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else session.dtype
    predicts = None in (arguments.model or ())
    for case in cases:
        for shape in planned[case.op.name]:
            add_row(session, case, shape, dtype=dtype, more=_predicted if predicts else lambda *seen: {})


def _predicted(calls: OpCalls, timings: Mapping[str, Timing]) -> dict[str, float]:
    """What the cost model says of both paths; nothing of an op that it does not know."""
    if not isinstance(calls.case, GemmCase):
        return {}
    problem, machine = calls.case.op.problem(calls.calls[0]), calls.context.machine
    predicted = predict(problem, choose(problem, machine), machine, rates_of(machine))
    return {"model_native_us": predicted.native_us, "model_us": predicted.ditron_us}


def _megatron_rows(
    session: BenchSession,
    cases: list[BenchCase[Any, Any]],
    planned: Mapping[str, list[Shape]],
    arguments: argparse.Namespace,
    *,
    layer: bool | None,
) -> None:
    """Rows inside Megatron's groups; those of a layer with or without sequence parallelism on GPUs alone: on the CPU
    its bits are those of another GEMM."""
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        get_logger("bench").warning("megatron-core is not installed: no rows for the backward and the layer")
        return
    from ditron_train.tools.bench.megatron_tp import layer_rows, megatron_world

    with megatron_world(session):
        _rows(session, cases, planned, arguments)
        is_alone = layer is False and session.world_size == 1  # nothing is added up
        for row in () if layer is None or is_alone else layer_rows(session, arguments.fp8, is_split=layer):
            session.add(row)
