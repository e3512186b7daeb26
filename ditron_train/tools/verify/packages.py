"""Every op of a subpackage against stock Megatron, as its `BenchCase` says: a row compares every bit before it is
timed, so a short run of each is the check."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.arguments import refuse
from ditron_train.tools.cases import ModelSizes, Shape
from ditron_train.tools.cases.ep_layers import layers_of_model
from ditron_train.tools.catalog import PACKAGES, cases_of, megatron_groups
from ditron_train.tools.fp8.recipes import unsupported_reason_aligned
from ditron_train.tools.op_rows import add_row
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession
from ditron_train.tools.timing import Contender
from ditron_train.tools.verify.cases import Case
from ditron_train.tools.verify.outcome import Stress
from ditron_train.tools.verify.result_table import Report
from ditron_train.tp.choices import Op


def parse_packages(text: str | None) -> list[str]:
    """Names between commas, or ``all``, which leaves out ``tp``: the linear layers, compared in any case, have its ops
    in them, and ask the policy whether NCCL adds in an order that they can repeat. ``adam`` is left out as well, since
    it needs an optimizer that may not be installed.

    Raises:
        SettingError: An unknown name.
    """
    if text == "all":
        return [room for room in PACKAGES if room not in ("tp", "adam")]
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    unknown = sorted(set(names) - set(PACKAGES))
    if unknown:
        raise SettingError(f"--packages knows {', '.join(PACKAGES)}, not {', '.join(unknown)}")
    return names


def check_packages(packages: Sequence[str], model: ModelSizes, world_size: int, fp8: str | None = None) -> None:
    """Refuses what cannot be, before anything is launched.

    Raises:
        SettingError: The model does not divide over the ranks.
    """
    for room in packages:
        for case in cases_of(room, fp8):
            for shape in case.shapes_of_model(model, world_size):
                refuse(case.unsupported_shape(shape, world_size))


class _UnderStress:
    """A benchmark's sink: compares what is measured again and again, and gives its rows to the report with what that
    found."""

    def __init__(self, report: Report, stress: Stress, seed: int) -> None:
        self._report, self._stress = report, stress
        self._late = np.random.default_rng(seed)
        self._equal, self._compared = True, 0

    def meet(self, session: BenchSession, contenders: Mapping[str, Contender]) -> None:
        """Compares ``native`` and ``fused``, as often as the command line asks for beyond the benchmark's own
        comparison."""
        extra = self._stress.repeat if self._stress.straggler_ms else self._stress.repeat - 1
        if not {"native", "fused"} <= contenders.keys():
            return
        for turn in range(extra):
            native = list(_tensors(contenders["native"](turn)))
            self._stress.delay(session, self._late)
            fused = list(_tensors(contenders["fused"](turn)))
            self._equal &= session.equal(fused, native)
            self._compared += 1

    def add_row(self, row: Row) -> None:
        """The benchmark's row, equal if every comparison was."""
        self._report.add_row(replace(row, bitwise_equal=row.bitwise_equal and self._equal), 1 + self._compared)
        self._equal, self._compared = True, 0


def _tensors(result: object) -> Iterable[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)


def _layer_rows(room: str, session: BenchSession, model: ModelSizes, fp8: str | None) -> Iterator[Row]:
    """Of what is more than one op."""
    if room == "pp" and fp8 is None:
        from ditron_train.tools.bench.megatron_pp import step_rows

        yield from step_rows(session)
    elif room == "ep":
        from ditron_train.tools.bench.megatron_ep import layer_rows

        with megatron_groups("expert", session):
            for layer in layers_of_model(model, session.world_size):
                yield from layer_rows(session, layer, fp8)


def verify_packages(
    packages: Sequence[str],
    model: ModelSizes,
    report: Report,
    stress: Stress,
    seed: int,
    session: BenchSession,
    fp8: str | None = None,
) -> None:
    """Compares every op of the subpackages at a model's shapes under ``stress``, times it shortly, and adds a row to
    ``report`` (collective); with ``fp8`` those that a subpackage has in this recipe."""
    for room in packages:
        quick, before = _quick(report, stress, seed), len(report.rows)
        for groups, cases in groupby(cases_of(room, fp8), key=lambda case: case.groups):
            with megatron_groups(groups, session):
                for case in cases:
                    for shape in case.shapes_of_model(model, session.world_size):
                        add_row(quick, case, shape, with_peers=False)
        for row in _layer_rows(room, quick, model, fp8):
            quick.add(row)
        report.compared[room] = len(report.rows) - before


def _quick(report: Report, stress: Stress, seed: int) -> BenchSession:
    """One whose rows go to ``report``."""
    return BenchSession("verify", argparse.Namespace(repetitions=2, warmup=1), _UnderStress(report, stress, seed))


def check_fp8_case(case: Case, world_size: int, fp8: str) -> None:
    """Refuses a layer whose sizes the recipe does not take.

    Raises:
        SettingError: Sizes of a rank are not multiples of what the recipe needs.
    """
    op: Op = "ag_gemm" if case.kind == "column" else "gemm_rs"
    why = unsupported_reason_aligned(op, _shape(case), world_size, fp8)
    if why is not None:
        raise SettingError(f"{case.name}: {why}")


def _shape(case: Case) -> Shape:
    return Shape(case.name, {"m": case.m, "n": case.n, "k": case.k})


def verify_fp8_layers(cases: Sequence[Case], report: Report, stress: Stress, seed: int, fp8: str) -> None:
    """The linear layers of ``cases`` in a recipe: results, gradients and the state of scales, as rows of ``report``
    (collective, inside Megatron's groups)."""
    layers = {layer.row: layer for layer in cases_of("tp", fp8)}
    quick = _quick(report, stress, seed)
    for case in cases:
        add_row(quick, layers[f"{case.kind}_linear"], _shape(case), with_peers=False)
