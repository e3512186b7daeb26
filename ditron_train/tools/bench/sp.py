"""Benchmark of Ulysses sequence parallelism: both projections with their exchanges, and a whole attention layer.

Native is GEMM and all-to-alls as Transformer Engine's attention does them; the other column is the same with one
all-to-all for q, k and v. All of them, the GEMM alone and the exchange alone are measured in one run on the same
inputs.
"""

from __future__ import annotations

import argparse
from typing import Any

from ditron_train.runtime.logs import get_logger
from ditron_train.tools.arguments import add_common_arguments, add_shape_argument
from ditron_train.tools.cases import BenchCase
from ditron_train.tools.catalog import cases_of
from ditron_train.tools.fp8.recipes import add_fp8_argument, check_fp8
from ditron_train.tools.op_rows import add_row, parts_of, planned_rows
from ditron_train.tools.session import BenchSession, bench_session


def _parts() -> dict[str, list[BenchCase[Any, Any]]]:
    """Ops by ``--part``; a layer is no op."""
    return {**parts_of(cases_of("sp")), "layer": []}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench sp``."""
    add_common_arguments(parser, parts=_parts())
    text = "instead of workloads.json's (may be repeated; default without a GPU: 64 16 8 8)"
    add_shape_argument(parser, text, "SEQLEN HEADS GROUPS HEAD_SIZE")
    add_fp8_argument(parser, "the layer in this recipe, next to the bf16 rows of the same file")


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: A shape does not divide over the ranks.
        NotSupportedError: FP8 without Transformer Engine.
    """
    check_fp8(arguments.fp8, "bench sp")
    of_part = _parts() if arguments.fp8 is None else {"layer": []}
    with bench_session("sp", arguments) as session:
        parts = {name: cases for name, cases in of_part.items() if name in (arguments.part or of_part)}
        planned = planned_rows([case for cases in parts.values() for case in cases], arguments, session)
        if "layer" in parts and session.device.type == "cuda":
            _layer_rows(session, arguments.fp8)
        for case, shape in planned:
            add_row(session, case, shape)
            session.save()
        return session.finish()


def _layer_rows(session: BenchSession, fp8: str | None) -> None:
    try:
        from megatron.core.extensions.transformer_engine import HAVE_TE
    except ImportError:
        HAVE_TE = False
    if not HAVE_TE:
        get_logger("bench").warning(
            "no rows for the attention layer: megatron-core or Transformer Engine is not installed"
        )
        return
    from ditron_train.tools.bench.megatron_sp import attention_rows

    for row in attention_rows(session, fp8):
        session.add(row)
        session.save()
