"""The other rooms' ops against native: their benchmarks compare every bit before they time, so a short run of each is
the check."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch

from ditron_train.policy import ModelSizes
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.catalog import ROOMS as CATALOG
from ditron_train.tools.catalog import megatron_groups, specs_of
from ditron_train.tools.op_rows import op_row
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession
from ditron_train.tools.timing import Contender
from ditron_train.tools.verify.outcome import Stress
from ditron_train.tools.verify.result_table import Report

__all__ = ["ROOMS", "check_rooms", "parse_rooms", "room_words", "verify_rooms"]

_PUBLISHED_EXPERTS = 128
_QUICK = ("--repetitions", "2", "--warmup", "1")


def parse_rooms(text: str | None) -> list[str]:
    """Names between commas, or ``all``.

    Raises:
        SettingError: An unknown name.
    """
    if text == "all":
        return [room for room in CATALOG if room != "tp"]
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    unknown = sorted(set(names) - set(CATALOG))
    if unknown:
        raise SettingError(f"--rooms knows {', '.join(CATALOG)}, not {', '.join(unknown)}")
    return names


def _divides(what: str, number: int, by: int) -> None:
    if number % by:
        raise SettingError(f"{number} {what} do not divide by {by}")


def _ep(model: ModelSizes, world_size: int, on_gpu: bool) -> list[str]:
    if world_size < 2:
        raise SettingError("--rooms ep takes 2 ranks or more: torchrun --nproc-per-node N -m ditron_train verify")
    if model.experts is None:  # a published layer; without a GPU the benchmark has one alone
        if on_gpu:
            _divides("experts over the ranks (--num-experts names others)", _PUBLISHED_EXPERTS, world_size)
        return ["--no-deterministic", *(("--model", "facts") if on_gpu else ())]
    _divides("experts over the ranks", model.experts, world_size)
    sizes = (model.tokens, model.hidden, model.expert_ffn, model.experts, model.topk)
    return ["--no-deterministic", "--shape", *map(str, sizes)]


#: Words for each room's benchmark: the model's sizes; what takes long and compares nothing more is left out.
ROOMS: Mapping[str, Callable[[ModelSizes, int, bool], list[str]]] = {"ep": _ep}


def room_words(rooms: Sequence[str], model: ModelSizes, world_size: int, on_gpu: bool) -> dict[str, list[str]]:
    """Command line of each room's benchmark for a model.

    Raises:
        SettingError: The model does not divide over the ranks.
    """
    return {room: ROOMS[room](model, world_size, on_gpu) for room in rooms}


def check_rooms(rooms: Sequence[str], model: ModelSizes, world_size: int, on_gpu: bool) -> None:
    """Refuses what cannot be, before anything is launched.

    Raises:
        SettingError: The model does not divide over the ranks.
    """
    room_words([room for room in rooms if room in ROOMS], model, world_size, on_gpu)
    for room in rooms:
        for spec in specs_of(room):
            for shape in spec.shapes_of_model(model, world_size):
                why = spec.why_not_shape(shape, world_size)
                if why is not None:
                    raise SettingError(why)


class _UnderStress:
    """A benchmark's sink: compares what is measured again and again, and gives its rows to the report with what that
    found."""

    def __init__(self, report: Report, stress: Stress, seed: int) -> None:
        self._report, self._stress = report, stress
        self._late = np.random.default_rng(seed)
        self._equal, self._compared = True, 0

    def meet(self, session: BenchSession, contenders: Mapping[str, Contender]) -> None:
        """Compares ``native`` and ``ditron``, as often as the command line asks for beyond the benchmark's own
        comparison."""
        extra = self._stress.repeat if self._stress.straggler_ms else self._stress.repeat - 1
        if not {"native", "ditron"} <= contenders.keys():
            return
        for turn in range(extra):
            native = list(_tensors(contenders["native"](turn)))
            self._stress.delay(session, self._late)
            ours = list(_tensors(contenders["ditron"](turn)))
            self._equal &= session.equal(ours, native)
            self._compared += 1

    def add_row(self, row: Row) -> None:
        """The benchmark's row, equal where every comparison was."""
        self._report.add_row(replace(row, bitwise_equal=row.bitwise_equal and self._equal), 1 + self._compared)
        self._equal, self._compared = True, 0


def _tensors(result: object) -> Iterable[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)


def _layer_rows(room: str, session: BenchSession) -> Iterator[Row]:
    """Of what is more than one op."""
    if room == "pp":
        from ditron_train.tools.bench.megatron_pp import step_rows

        yield from step_rows(session)


def verify_rooms(
    rooms: Sequence[str], model: ModelSizes, report: Report, stress: Stress, seed: int, session: BenchSession
) -> None:
    """Compares every op of the rooms at a model's shapes under ``stress``, times it shortly, and adds a row to
    ``report`` (collective)."""
    for room in rooms:
        sink = _UnderStress(report, stress, seed)
        quick = BenchSession("verify", argparse.Namespace(repetitions=2, warmup=1), sink)
        for groups, specs in groupby(specs_of(room), key=lambda spec: spec.groups):
            with megatron_groups(groups, session):
                for spec in specs:
                    for shape in spec.shapes_of_model(model, session.world_size):
                        quick.add(op_row(quick, spec, shape, with_peers=False))
        for row in _layer_rows(room, quick):
            quick.add(row)
    words = room_words(
        [room for room in rooms if room in ROOMS], model, session.world_size, session.device.type == "cuda"
    )
    for room, options in words.items():
        module = importlib.import_module(f"ditron_train.tools.bench.{room}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        module.run(parser.parse_args([*_QUICK, *options]), _UnderStress(report, stress, seed))
