"""Benchmark of Muon: Newton-Schulz iterations on one GPU, and whole steps, sharded by matrices on several.

Native is the published algorithm in torch's operators (cuBLAS products); the peer is ``torch.compile`` of it. The
limit is native's time over the ceiling of symmetry: half of two of the three products determines the other half,
nothing else is saved. TFLOP/s count the operations of the whole algorithm, whoever computes less of it. Iterations are
timed with the host ahead: its cost, several times the device's at small matrices if kernels are launched one by one,
does not count.
"""

from __future__ import annotations

import argparse
from typing import Any

from ditron_train.tools.arguments import add_common_arguments, add_shape_argument, check_sizes, choose_models
from ditron_train.tools.cases import BenchCase, Shape
from ditron_train.tools.cases.muon import MUON_STEP, ORTHOGONALIZE, matrix_shape, step_shape
from ditron_train.tools.catalog import cases_of
from ditron_train.tools.op_rows import add_row, parts_of
from ditron_train.tools.session import BenchSession, bench_session


def _parts() -> dict[str, list[BenchCase[Any, Any]]]:
    return parts_of(cases_of("muon"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench muon``."""
    add_common_arguments(parser, parts=_parts())
    add_shape_argument(parser, "matrices instead of the table's, and instead of a model's layer", "ROWS COLUMNS")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="layers of a model (default: 8, with experts 2; times scale with it)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: A size below 1, or an unknown model.
    """
    with bench_session("muon", arguments) as session:
        check_sizes("--shape", arguments.shape)
        check_sizes("--layers", arguments.layers and [[arguments.layers]])
        cases = [case for part, of_one in _parts().items() if part in (arguments.part or _parts()) for case in of_one]
        known = [
            shape for cases_of_part in _parts().values() for case in cases_of_part for shape in case.shapes(1, True)
        ]
        choose_models(arguments.model, [shape.model.split()[0] for shape in known])
        for case in cases:
            for shape in _shapes(case, arguments, session):
                add_row(session, case, shape)
                session.save()
        return session.finish()


def _shapes(case: BenchCase[Any, Any], arguments: argparse.Namespace, session: BenchSession) -> list[Shape]:
    """The op's own, of the models that are asked for, or what ``--shape`` and ``--layers`` name."""
    shapes = list(case.shapes(session.world_size, session.device.type == "cuda"))
    if arguments.shape and case is ORTHOGONALIZE and session.world_size == 1:
        return [matrix_shape("custom", *sizes) for sizes in arguments.shape]
    if case is MUON_STEP:
        if arguments.shape:
            shapes = [step_shape("custom", arguments.shape, 1)]
        shapes = [
            step_shape(shape.model, shape.options["layer"], arguments.layers or shape.sizes["num_layers"])
            for shape in shapes
        ]
    free = ("custom", "tiny")
    return [
        shape
        for shape in shapes
        if not arguments.model or shape.model in free or shape.model.split()[0] in arguments.model
    ]
