"""Benchmark of tensor parallelism: AG-GEMM, GEMM-RS, GEMM-AR, the backward of the linear layers, a transformer layer.

Native is what Megatron runs (NCCL, then cuBLAS or the reverse; for the backward megatron-core's own function), the
peer is PyTorch's async-TP. All of them, the GEMM alone and the collective alone are measured in one run on the same
inputs. With ``--fp8`` native is Transformer Engine in that recipe, and userbuffers are a peer of the layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ditron_train.runtime.logs import get_logger
from ditron_train.tools.arguments import add_common_arguments, add_shape_argument
from ditron_train.tools.cases import BenchCase, Shape
from ditron_train.tools.cases.tp_gemm import linear_shapes
from ditron_train.tools.catalog import cases_of
from ditron_train.tools.fp8.recipes import add_fp8_argument, check_fp8
from ditron_train.tools.op_rows import add_row, parts_of, shapes_for
from ditron_train.tools.session import BenchSession, bench_session

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
    add_common_arguments(parser, parts=_parts())
    add_shape_argument(
        parser, "global sizes instead of workloads.json's (may be repeated; default without a GPU: 256 256 256)"
    )
    add_fp8_argument(
        parser, "rows of Transformer Engine's layers in this recipe, in addition to the bf16 rows of the file"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for; returns 1 if bits differ.

    Raises:
        SettingError: No shape is left, or one does not divide over the ranks.
        NotSupportedError: FP8 without Transformer Engine.
    """
    fp8: str | None = arguments.fp8
    check_fp8(fp8, "bench tp")
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
                _megatron_rows(session, cases, planned, arguments.fp8, layer=_LAYERS.get(name) if on_gpu else None)
            else:
                _rows(session, cases, planned)
        return session.finish()


def _rows(session: BenchSession, cases: list[BenchCase[Any, Any]], planned: Mapping[str, list[Shape]]) -> None:
    for case in cases:
        for shape in planned[case.op.name]:
            add_row(session, case, shape)


def _megatron_rows(
    session: BenchSession,
    cases: list[BenchCase[Any, Any]],
    planned: Mapping[str, list[Shape]],
    fp8: str | None,
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
        _rows(session, cases, planned)
        is_alone = layer is False and session.world_size == 1  # nothing is added up
        for row in () if layer is None or is_alone else layer_rows(session, fp8, is_split=layer):
            session.add(row)
