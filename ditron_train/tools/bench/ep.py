"""Benchmark of expert parallelism: dispatch, combine, the experts' GEMMs and the whole MoE layer, balanced and skewed.

Native is megatron-core's alltoall dispatcher (of gathered experts: its allgather dispatcher's steps; of flex: its flex
dispatcher with DeepEP, or by torch in DeepEP's order if that is missing), with Transformer Engine's fused permutation
and grouped GEMM if TE is installed; without it PyTorch's deterministic mode, whose bits repeat. Both run in one
process on the same inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from ditron_train.runtime.errors import NotSupportedError, SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.versions import pip_command
from ditron_train.tools.arguments import add_common_arguments, add_shape_argument, check_sizes, choose_models, refuse
from ditron_train.tools.cases import BenchCase, Shape
from ditron_train.tools.cases.ep_layers import MoeCase, moe_layer, moe_layers, unsupported_layer, with_routings
from ditron_train.tools.catalog import cases_of, megatron_groups
from ditron_train.tools.fp8.recipes import add_fp8_argument, check_fp8
from ditron_train.tools.op_rows import add_row, parts_of
from ditron_train.tools.session import BenchSession, bench_session


def _parts() -> dict[str, list[BenchCase[Any, Any]]]:
    """Ops by ``--part``: the experts' GEMMs are one part, and a layer is no op."""
    cases = parts_of(cases_of("ep"))
    gemms = [*cases.pop("group_gemm"), *cases.pop("backward")]
    moves = {name: cases.pop(name) for name in ("dispatch", "combine") if name in cases}
    return {**moves, "group_gemm": gemms, **cases, "layer": []}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench ep``."""
    add_common_arguments(parser, parts=_parts())
    text = "instead of workloads.json's: tokens of each rank, experts of all (may be repeated)"
    add_shape_argument(parser, text, "TOKENS HIDDEN FFN EXPERTS TOPK")
    parser.add_argument("--dispatcher", choices=("alltoall", "flex"), default="alltoall", help="the layer's")
    add_fp8_argument(parser, "the layer with its experts in this recipe, next to the bf16 rows of the same file")


def _layers(arguments: argparse.Namespace, session: BenchSession) -> list[Shape]:
    """What the command line asks for, with every routing."""
    world_size = session.world_size
    check_sizes("--shape", arguments.shape)
    layers = [moe_layer("custom", *sizes) for sizes in arguments.shape or ()]
    for layer in layers:
        refuse(unsupported_layer(layer, world_size))
    layers = layers or moe_layers(world_size, session.device.type == "cuda")
    models = [layer.model for layer in layers]
    chosen = [layer for model in choose_models(arguments.model, models) for layer in layers if layer.model == model]
    return with_routings(chosen, deterministic=models[:1])


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: An unknown model, sizes that cannot be, or a single rank, which dispatches nothing.
        NotSupportedError: megatron-core is not installed; FP8 without Transformer Engine.
    """
    check_fp8(arguments.fp8, "bench ep")
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        raise NotSupportedError(f"bench ep needs megatron-core: {pip_command('megatron-core')}") from None
    from ditron_train.tools.bench.megatron_ep import HAVE_TE, layer_rows

    of_part = _parts() if arguments.fp8 is None else {"layer": []}
    parts = {name: cases for name, cases in of_part.items() if name in (arguments.part or of_part)}
    cases = [case for some in parts.values() for case in some]
    with bench_session("ep", arguments) as session, megatron_groups("expert", session):
        if session.world_size < 2:
            raise SettingError("bench ep takes 2 ranks or more: torchrun --nproc-per-node N -m ditron_train bench ep")
        if not HAVE_TE:
            get_logger("bench").info(
                "Transformer Engine is not installed: native runs in PyTorch's deterministic mode"
            )
        for layer in _layers(arguments, session):
            for case, shape in _of_layer(cases, layer):
                add_row(session, case, shape)
            for row in layer_rows(session, layer, arguments.fp8, arguments.dispatcher) if "layer" in parts else ():
                session.add(row)
            session.save()
            if session.device.type == "cuda":
                torch.cuda.empty_cache()
        for case in cases:
            for shape in (
                () if isinstance(case, MoeCase) else case.shapes(session.world_size, torch.cuda.is_available())
            ):
                add_row(session, case, shape)
        return session.finish()


def _of_layer(cases: list[BenchCase[Any, Any]], layer: Shape) -> Iterator[tuple[BenchCase[Any, Any], Shape]]:
    """Ops and their shapes in a layer, those of one shape together."""
    shapes = {case.op.name: case.shapes_of_layer(layer) for case in cases if isinstance(case, MoeCase)}
    gemms = [case for case in cases if len(shapes.get(case.op.name, ())) > 1]
    for case in cases:
        if case not in gemms:
            yield from ((case, shape) for shape in shapes.get(case.op.name, ()))
    for index in range(max((len(shapes[case.op.name]) for case in gemms), default=0)):
        yield from ((case, shapes[case.op.name][index]) for case in gemms)
