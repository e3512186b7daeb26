"""Tuning tables, choices and the cost model, without processes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Hashable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ditron_train.costs.products import gemm_us
from ditron_train.data import load_workloads
from ditron_train.data import tuning_table as tuning
from ditron_train.data.device_profiles import default_rates
from ditron_train.data.tuning_table import (
    TuningTable,
    active_table,
    forget_tables,
    read_table,
    shape_class,
    shipped_name,
)
from ditron_train.gemm import GemmConfig
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.cases.tp_gemm import GemmCase, GemmOp
from ditron_train.tools.timing import Timing
from ditron_train.tools.tune import search
from ditron_train.tools.tune.rates import Observed, fit_rates
from ditron_train.tools.tune.search import Result, ShapeClass
from ditron_train.tools.tune.tp_space import GemmSpace
from ditron_train.tp.choices import (
    Choice,
    GatherPlan,
    Machine,
    Problem,
    _last_tile_us,
    choose,
    collective_us,
    default_choice,
    entry_of,
    first_rows,
    modelled_choice,
    predict,
    prefers_native,
    tile_variants,
    transfer_variants,
    wire_bytes,
    with_library,
)

H200 = Machine("NVIDIA H200", "sm_90", 132)
RATES = default_rates("sm_90")
TILE = GemmConfig(128, 256, 64, num_warps=8, num_stages=4)

tiles = st.integers(1, 64).map(lambda count: 128 * count)
ops = st.sampled_from(["ag_gemm", "gemm_rs"])
worlds = st.sampled_from([1, 2, 4, 8])
plans = st.one_of(
    st.builds(GatherPlan, st.just("copy"), num_chunks=st.sampled_from([1, 2, 4])),
    st.builds(GatherPlan, st.just("push"), push_programs=st.integers(1, 32)),
)
configs = st.sampled_from([TILE, dataclasses.replace(TILE, num_stages=3), dataclasses.replace(TILE, block_n=128)])
choices = st.builds(
    Choice,
    configs,
    plans,
    st.sampled_from([16, 32, 64]),
    scatter=st.sampled_from(["store", "copy"]),
    by_library=st.booleans(),
)
problems = st.builds(
    lambda op, m, n, k, world: Problem(op, m * world, n, k, "nt", torch.bfloat16, world),
    ops,
    tiles,
    tiles,
    tiles,
    worlds,
)


@pytest.fixture(autouse=True)
def _no_tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DITRON_TUNING", "off")
    forget_tables()
    yield
    forget_tables()


def _use(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> None:
    path.write_text(text)
    monkeypatch.setenv("DITRON_TUNING", str(path))
    forget_tables()


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_classes_hold_sizes_within_half_an_octave(a: int, b: int) -> None:
    first, second = (int(shape_class(size, 1, 1).split("x")[0]) for size in (a, b))
    assert a <= first <= max(1.5 * a, a + 1)
    assert shape_class(first, 1, 1) == f"{first}x1x1"
    if a <= b:
        assert first <= second


def test_published_shapes_of_four_ranks_make_few_classes() -> None:
    shapes = load_workloads()["ag_gemm"]["shapes"]
    assert len({shape_class(s["M"], s["N"] // 4, s["K"]) for s in shapes}) == 4
    assert shape_class(8192, 2752, 4096) == "8192x3072x4096"


@given(problems, choices)
def test_an_entry_reads_back_as_it_was(problem: Problem, choice: Choice) -> None:
    table = TuningTable(H200.device, {"torch": "2.11"}, RATES)
    table.put(problem.table_op, problem.world_size, problem.shape_class, entry_of(problem, choice))
    read = tuning.parse_table(table.to_text(), "here")
    assert read == table
    entry = read.find(problem.table_op, problem.world_size, problem.shape_class)
    back = entry_of(problem, dataclasses.replace(choice, source="table"))
    assert entry == back
    assert read.find(problem.table_op, problem.world_size + 1, problem.shape_class) is None


def test_the_users_table_is_chosen_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("gemm_rs", 8192, 4096, 2752, "nt", torch.bfloat16, 4)
    before = choose(problem, H200)
    table = TuningTable(H200.device)
    wanted = Choice(dataclasses.replace(TILE, group_m=4), reduce_rows=64, use_native=True)
    table.put(problem.table_op, 4, problem.shape_class, entry_of(problem, wanted))
    _use(monkeypatch, tmp_path / "t.json", table.to_text())
    assert choose(problem, H200) == dataclasses.replace(wanted, source="table")
    _use(monkeypatch, tmp_path / "former.json", table.to_text().replace("reduce_rows", "fold_rows"))
    assert choose(problem, H200) == dataclasses.replace(wanted, source="table")
    assert before.source == "model" and before.config == TILE
    assert prefers_native("gemm_rs", 8192, 4096, 2752, "nt", torch.bfloat16, 4, H200.device)
    assert not prefers_native("gemm_rs", 8192, 4096, 2752, "nt", torch.bfloat16, 2, H200.device)
    assert choose(dataclasses.replace(problem, m=65536), H200).source == "model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "not a tuning table of this version"),
        ('{"format": "ditron_train tuning 0"}', "not a tuning table of this version"),
        ('{"format": "ditron_train tuning 1", "device": "NVIDIA H200"}', "make it anew"),
        (
            '{"format": "ditron_train tuning 1", "device": "NVIDIA H200", '
            '"made_with": {}, "rates": {"gemm": 1}, "choices": {}}',
            "anew",
        ),
        (
            '{"format": "ditron_train tuning 1", "device": "NVIDIA H200", '
            '"made_with": {}, "rates": null, "choices": {"4 ranks": 1}}',
            "anew",
        ),
        (
            '{"format": "ditron_train tuning 1", "device": "NVIDIA B200", '
            '"made_with": {}, "rates": null, "choices": {}}',
            "made on NVIDIA B200",
        ),
    ],
)  # fmt: skip
def test_a_bad_table_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    _use(monkeypatch, tmp_path / "bad.json", text)
    with pytest.raises(SettingError, match=message) as error:
        active_table(H200.device)
    assert "bad.json" in str(error.value)


def test_a_table_of_no_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    monkeypatch.setenv("DITRON_TUNING", str(tmp_path / "pipe.json"))
    for read in (lambda: active_table(H200.device), tuning.named_table, tuning.check_table):
        with pytest.raises(SettingError, match="pipe.json: it is no regular file"):
            read()


def test_a_missing_file_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DITRON_TUNING", str(tmp_path / "none.json"))
    with pytest.raises(SettingError, match="none.json: No such file"):
        active_table(H200.device)


@pytest.mark.parametrize(
    "change",
    [{"tile": "128x256"}, {"tile": "100x256x64"}, {"stages": 0}, {"reduce_rows": 48}, {"warps": 3}, {"group_m": None}],
)
def test_a_bad_entry_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]) -> None:
    problem = Problem("gemm_rs", 8192, 4096, 2752, "nt", torch.bfloat16, 4)
    table = TuningTable(H200.device)
    table.put(problem.table_op, 4, problem.shape_class, {**entry_of(problem, Choice(TILE)), **change})
    _use(monkeypatch, tmp_path / "t.json", table.to_text())
    with pytest.raises(SettingError, match="4 ranks, gemm_rs nt, 8192x4096x3072"):
        choose(problem, H200)


def test_every_shipped_table_reads_and_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DITRON_TUNING")
    folder = Path(tuning.__file__).parent.parent / "data" / "tuning"
    for path in folder.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        assert shipped_name(device) == path.name
        table = active_table(device)
        assert table is not None and read_table(path, device) == table
        for ranks, ops_of_ranks in table.choices.items():
            for name, shapes in ops_of_ranks.items():
                for shape in shapes:
                    op, layout = name.split()
                    problem = Problem(op, *map(int, shape.split("x")), layout, torch.bfloat16, int(ranks.split()[0]))
                    assert choose(problem, Machine(device, "sm_90", 132)).source == "table"


@given(problems, choices)
def test_predictions_respect_the_limit(problem: Problem, choice: Choice) -> None:
    seen = predict(problem, choice, H200, RATES)
    exchange_us = collective_us(problem, RATES)
    gemm_us = seen.native_us - exchange_us
    assert gemm_us > 0 and (exchange_us == 0) == (problem.world_size == 1)
    limit_us = max(gemm_us, wire_bytes(problem) / (RATES.link_gbps * 1e3))
    assert seen.ditron_us >= limit_us or seen.ditron_us == pytest.approx(limit_us)


@example(
    Problem("gemm_rs", 768, 5760, 128, "nt", torch.bfloat16, 1), Choice(TILE, scatter="copy"), "m", 4
)  # nothing to send
@given(problems, choices, st.sampled_from(["m", "n", "k"]), st.integers(1, 8))
def test_more_work_never_takes_less_time(problem: Problem, choice: Choice, field: str, factor: int) -> None:
    larger = dataclasses.replace(problem, **{field: factor * getattr(problem, field)})
    small, large = (predict(p, choice, H200, RATES) for p in (problem, larger))
    assert large.native_us >= small.native_us * (1 - 1e-9)
    # A program takes every 132nd tile, so what is left when the last rows arrive is a whole number of waves, and where
    # more tiles are in front of those rows it can be one less: more rows or columns may end up to a wave earlier. Not
    # longer sums.
    wave_us = gemm_us(132 * choice.config.block_m, choice.config.block_n, problem.k, choice.config, 132, 132, RATES)
    assert large.ditron_us >= (small.ditron_us - (0.0 if field == "k" else wave_us)) * (1 - 1e-9)


def test_a_program_waits_for_the_rows_of_its_own_tiles() -> None:
    """Two ranks of four tiles, the other's rows come at 12 us: on six programs nobody has two tiles of them to
    compute."""
    tile = dataclasses.replace(TILE, block_m=128, block_n=128)
    problem = Problem("ag_gemm", 4 * 128, 2 * 128, 64, "nt", torch.bfloat16, 2)
    ends_us = {
        programs: _last_tile_us(problem, tile, programs, 10.0, np.array([0.0, 12.0]), 1)
        for programs in (1, 2, 4, 6, 8)
    }
    assert ends_us == {1: 80.0, 2: 40.0, 4: 22.0, 6: 22.0, 8: 22.0}


@given(problems, choices, st.sampled_from(["link_gbps", "nccl_gbps", "gemm_tflops", "memory_gbps", "push_sm_gbps"]))
def test_a_faster_machine_is_never_slower(problem: Problem, choice: Choice, rate: str) -> None:
    faster = dataclasses.replace(RATES, **{rate: 2 * getattr(RATES, rate)})
    assert predict(problem, choice, H200, faster).native_us <= predict(problem, choice, H200, RATES).native_us


@given(problems)
def test_the_model_chooses_what_it_predicts_to_be_quickest(problem: Problem) -> None:
    chosen = choose(problem, H200)
    best = predict(problem, chosen, H200, RATES).ditron_us
    base = default_choice(problem, H200)
    others = [base, *transfer_variants(problem, H200, base), *tile_variants(H200, base)]
    assert all(best <= predict(problem, other, H200, RATES).ditron_us for other in others)
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "hip"])
def test_every_candidate_fits_into_shared_memory(target: str) -> None:
    assert TILE.shared_bytes == 224 << 10  # what the compiler says it takes
    machine = dataclasses.replace(H200, target=target)
    for size in (512, 8192):
        problem = Problem("ag_gemm", size, size, size, "nt", torch.bfloat16, 4)
        base = default_choice(problem, machine)
        variants = tile_variants(machine, base)
        limit = {"sm_80": 99 << 10, "hip": base.config.shared_bytes}.get(target, 227 << 10)
        assert all(choice.config.shared_bytes <= limit for choice in [base, *variants]) and base not in variants
        assert choose(problem, machine).config in [choice.config for choice in [base, *variants]]
        assert len(variants) >= 2


def test_measured_rates_come_back() -> None:
    wanted = dataclasses.replace(RATES, gemm_tflops=500.0, link_gbps=200.0, nccl_gbps=150.0, nccl_latency_us=25.0)
    observed = []
    for n, k in ((2752, 4096), (7168, 8192), (13312, 16384)):
        p = Problem("ag_gemm", 8192, n, k, "nt", torch.bfloat16, 4)
        gemm = gemm_us(p.m, p.n, p.k, default_choice(p, H200).config, 132, 132, wanted)
        observed.append(Observed(p, gemm, collective_us(p, wanted), 9.0 + wire_bytes(p) / (wanted.link_gbps * 1e3)))
    assert fit_rates(observed, H200) == wanted
    assert fit_rates([], H200) == RATES
    assert fit_rates(observed[:1], H200).nccl_gbps == RATES.nccl_gbps  # one size makes no line


class _SimulatedOp(GemmOp):
    """Calls are problems."""

    def problem(self, call: Problem) -> Problem:
        return call


def _simulated_space() -> GemmSpace:
    case = GemmCase("ag_gemm", "nt")
    case.op = _SimulatedOp("ag_gemm", "nt")
    return GemmSpace(case)


class _Trial:
    def __init__(self, problem: Problem) -> None:
        self.calls = [problem]
        self.context = _Context()


class _Context:
    machine = H200


def _shape_class(*problems: Problem) -> ShapeClass:
    return ShapeClass(_simulated_space(), [_Trial(problem) for problem in problems])


def _class_of(*times: dict[Choice, float]) -> ShapeClass:
    sizes = (7168, 7392)[: len(times)]
    shape_class_ = _shape_class(*(Problem("ag_gemm", 8192, n, 8192, "nt", torch.bfloat16, 4) for n in sizes))
    shape_class_.results = [Result(dict(t), native_us=100.0) for t in times]
    return shape_class_


def _best(*times: dict[Choice, float]) -> Choice:
    return _class_of(*times).ranked()[0]


def test_the_best_choice_is_best_over_all_shapes_of_its_class() -> None:
    default = default_choice(Problem("ag_gemm", 8192, 7168, 8192, "nt", torch.bfloat16, 4), H200)
    other, third = (dataclasses.replace(default, gather=GatherPlan("push", push_programs=n)) for n in (8, 16))
    assert _best({default: 90.0, other: 80.0}) == other
    assert _best({default: 90.0, other: 89.5}) == default  # within the noise
    assert _best({default: 90.0, other: 80.0, third: 85.0}, {default: 90.0, other: 99.0, third: 85.0}) == third
    assert _best({other: 80.0}) == other  # the default's bits differed
    assert _best({default: 90.0, other: 80.0}, {default: 90.0}) == default  # other bits at the second shape
    assert _class_of({}).ranked() == [] and _class_of({}).entry()["native"] is True
    slower = _class_of({default: 120.0, other: 110.0}).entry()
    assert slower["native"] is True and slower["push_sms"] == 8 and slower["ditron_us"] == 110.0
    assert _class_of({default: 90.0}).entry()["native"] is False


def test_tiles_are_tried_with_the_two_best_ways_of_moving_data() -> None:
    problem = Problem("ag_gemm", 8192, 1376, 4096, "nt", torch.bfloat16, 8)
    default = default_choice(problem, H200)
    pushes = [dataclasses.replace(default, gather=GatherPlan("push", push_programs=n)) for n in (8, 12, 16)]
    chunks = dataclasses.replace(default, gather=GatherPlan("copy", num_chunks=2))
    shape_class_ = _shape_class(problem)
    first = shape_class_.candidates()
    assert first[0] == default and {*pushes, chunks} < {*first} and len({*first}) == len(first)
    assert dataclasses.replace(modelled_choice(problem, H200), source=default.source) in first
    shape_class_.results = [
        Result({default: 90.0, chunks: 80.0, pushes[0]: 99.0, pushes[1]: 95.0, pushes[2]: 97.0}, native_us=100.0)
    ]
    second = shape_class_.candidates()
    assert second[:2] == [chunks, pushes[1]] and {choice.gather for choice in second} == {
        chunks.gather,
        pushes[1].gather,
    }
    assert {choice.config for choice in second if choice.gather == pushes[1].gather} > {default.config}


def test_products_by_cublas_are_tried_and_have_no_tiles_to_choose() -> None:
    for op in ("ag_gemm", "gemm_rs"):
        problem = Problem(op, 8192, 28672, 8192, "nt", torch.bfloat16, 2)
        default = default_choice(problem, H200)
        by_library = with_library(default)
        assert not modelled_choice(problem, H200).by_library
        seen = predict(problem, by_library, H200, RATES)
        limit = gemm_us(8192, 28672, 8192, TILE, 132, 132, RATES)
        assert limit <= seen.ditron_us < 1.06 * limit  # each rank's rows end in a wave of their own
    for world_size in (1, 2):
        problem = Problem("ag_gemm", 8192, 28672, 8192, "nt", torch.bfloat16, world_size)
        shape_class_ = _shape_class(problem)
        first = shape_class_.candidates()
        assert any(one.by_library for one in first) is (world_size > 1)
        shape_class_.results = [Result({one: 50.0 if one.by_library else 60.0 for one in first}, native_us=100.0)]
        second = shape_class_.candidates()
        assert sum(one.by_library for one in second) == world_size - 1 and len(second) > 3


def test_at_the_end_the_quickest_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quickest in turns need not be so at the clock that the power limit leaves it."""
    problem = Problem("ag_gemm", 8192, 28672, 8192, "nt", torch.bfloat16, 2)
    default = default_choice(problem, H200)
    by_library, third = (dataclasses.replace(default, by_library=True), dataclasses.replace(default, reduce_rows=16))
    shape_class_ = _shape_class(problem)
    shape_class_.results = [
        Result({default: 5600.0, by_library: 5500.0, third: 5650.0}, native_us=6000.0, num_tried=3)
    ]
    measured = []

    def simulated(contenders: dict[Hashable, object], **options: object) -> dict[Hashable, Timing]:
        measured.append((list(contenders), options["repetitions"], options["interleaved"]))
        times = {"native": 6300.0, default: 5700.0, by_library: 5900.0}
        return {name: Timing(times[name], 0.0) for name in contenders}

    monkeypatch.setattr(search, "measure", simulated)
    monkeypatch.setattr(_Trial, "run", lambda self, is_fused: None, raising=False)
    monkeypatch.setattr(_Trial, "case", shape_class_.space.case, raising=False)
    monkeypatch.setattr(_Trial, "shape", None, raising=False)
    session = SimpleNamespace(device=torch.device("cpu"))
    search._sustain(shape_class_, 2, session)
    assert measured == [(["native", by_library, default], 167, False)]
    entry = shape_class_.entry()
    assert "products" not in entry and entry["tried"] == 3
    assert (entry["ditron_us"], entry["native_us"]) == (5700.0, 6300.0)
    shape_class_.results = [Result({default: 560.0, by_library: 550.0}, native_us=600.0, num_tried=2)]
    search._sustain(shape_class_, 2, session)
    assert len(measured) == 1 and shape_class_.entry()["products"] == "cuBLAS"


@pytest.mark.parametrize(
    "num_rows, expected", [(4096, 2048), (2048, 1024), (1024, 1024), (1100, 512), (128, 128), (100, 100)]
)
def test_first_rows_are_half_where_that_takes_fewer_waves(num_rows: int, expected: int) -> None:
    assert first_rows(num_rows, 4096, TILE, H200) == expected  # 16 tiles are a row of tiles: a wave holds 8.25 of them
