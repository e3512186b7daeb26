"""``bench ep`` on CPU processes: rows of parts and routings, bits equal, unknown models refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.bench import ep
from ditron_train.tools.cases import Shape, ep_gemm
from ditron_train.tools.cases.ep_moves import busiest_link, repeating
from ditron_train.tools.nothing_compared import NothingComparedError
from ditron_train.tools.results import read_results
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    ep.add_arguments(parser)
    return ep.run(parser.parse_args([*words, "--repetitions", "1", "--warmup", "0"]))


def test_rows_of_parts_and_routings(tmp_path: Path) -> None:
    assert run_workers(2, _run, "--part", "dispatch", "--part", "layer", "--output", str(tmp_path)) == [0, 0]
    (path,) = tmp_path.glob("*/ep.json")
    stamp, rows = read_results(path)
    assert stamp.count == 2
    each = [("dispatch", "forward"), ("moe_layer", "forward"), ("moe_layer", "forward_backward")]
    models = ("small", "small, Zipf 1", "small, deterministic")
    assert [(row.model, row.op, row.direction) for row in rows] == [(model, *row) for model in models for row in each]
    assert all(row.bitwise_equal and row.native_us > 0 for row in rows)


def test_rows_of_the_flex_dispatcher(tmp_path: Path) -> None:
    parts = ("--part", "flex_dispatch", "--part", "flex_combine", "--part", "layer", "--dispatcher", "flex")
    assert run_workers(2, _run, *parts, "--output", str(tmp_path)) == [0, 0]
    (path,) = tmp_path.glob("*/ep.json")
    rows = read_results(path)[1]
    assert {row.op for row in rows} == {"flex_dispatch", "flex_combine", "moe_layer"}
    assert {row.dispatcher for row in rows if row.op == "moe_layer"} == {"flex by torch"}
    assert len(rows) == 12 and all(row.bitwise_equal and row.native_us > 0 for row in rows)


def _run_as_with_rows(min_rows: int, *words: str) -> int:
    ep_gemm._min_rows = lambda counts, device: min_rows
    ep_gemm.min_rows_here = lambda product, *_: 257  # nothing is measured in the interpreter
    return _run(*words)


def test_grouped_gemms_that_a_layer_leaves_native_have_no_rows(tmp_path: Path) -> None:
    options = ("--part", "group_gemm", "--output", str(tmp_path))
    assert run_workers(2, _run_as_with_rows, 257, *options) == [0, 0]
    (path,) = tmp_path.glob("*/ep.json")
    rows = read_results(path)[1]
    ops = ["group_gemm", "group_dgrad", "group_wgrad"]
    assert [(row.model, row.op) for row in rows] == [
        (model, op) for model in ("small", "small, Zipf 1") for op in 2 * ops
    ]
    assert all(row.bitwise_equal and row.native_us > 0 for row in rows)
    path.unlink()
    with pytest.raises(NothingComparedError, match="nothing was compared: group_gemm, group_dgrad, group_wgrad"):
        run_workers(2, _run_as_with_rows, 256, *options)
    assert not path.exists() or not read_results(path)[1]


def test_a_wgrad_of_many_tiles_is_measured_whatever_the_rows(monkeypatch) -> None:
    """The other products where experts have as many rows as they need: forward 300, dgrad 600 here."""
    monkeypatch.setattr(ep_gemm, "min_rows_here", lambda product, *_: 300 if product.transpose else 600)

    def measured(min_rows: int | None, n: int, k: int) -> list[str]:
        weight = torch.empty(n, k, device="meta")
        call = ep_gemm.GroupCall(*[weight] * 2, [weight], weight, [0], min_rows, *[None] * 2)
        return [case.op.product for case in ep_gemm.CASES if case.no_row_reason(call) is None]

    assert measured(299, 4096, 1408) == ["wgrad"] and measured(299, 1408, 2048) == []
    assert measured(300, 4096, 1408) == ["forward", "wgrad"] and measured(300, 1408, 2048) == ["forward"]
    assert measured(600, 1408, 2048) == measured(None, 1, 1) == ["forward", "dgrad", "wgrad"]


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(SettingError, match="unknown model"):
        run_workers(2, _run, "--model", "none")


def test_the_busiest_link_may_be_one_that_receives() -> None:
    assert busiest_link(torch.tensor([[9.0, 1.0, 2.0], [4.0, 9.0, 1.0], [4.0, 1.0, 9.0]])) == 8.0
    assert busiest_link(torch.tensor([[0.0, 4.0], [1.0, 50.0]])) == 4.0


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("before", [(True, False, False), (True, True, True), (False, False, False)])
def test_the_modes_of_the_caller_are_restored(is_on: bool, before: tuple[bool, bool, bool]) -> None:
    """Deterministic mode, whether it only warns, and whether new memory is filled."""

    def modes() -> tuple[bool, bool, bool]:
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        return is_deterministic, warns_only, torch.utils.deterministic.fill_uninitialized_memory

    def set_modes(enabled: bool, warn_only: bool, fills: bool) -> None:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills

    at_first = modes()
    set_modes(*before)
    try:
        with pytest.raises(RuntimeError, match="inside"), repeating(Shape("any", {}, {"deterministic": is_on})):
            raise RuntimeError("inside")
        assert modes() == before
    finally:
        set_modes(*at_first)
