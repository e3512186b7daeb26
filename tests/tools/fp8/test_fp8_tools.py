"""``--fp8`` of ``verify``, ``bench``, ``trace`` and ``compare``: with a stand-in for Transformer Engine, and what is
said where there is none."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import bodies_fp8_tools as bodies  # noqa: E402

from ditron_train import cli  # noqa: E402
from ditron_train.runtime.errors import SettingError  # noqa: E402
from ditron_train.tools.compare.launch import with_fp8  # noqa: E402
from ditron_train.tools.results import Row, read_results, write_beside  # noqa: E402
from ditron_train.tools.stamp import collect_stamp  # noqa: E402
from tests.support.processes import run_workers_once  # noqa: E402


def run(function, *arguments):
    outcomes = run_workers_once(2, function, *arguments)
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
    return [outcome.value for outcome in outcomes]


def rows_in(folder, name):
    (path,) = folder.glob(f"*/{name}.json")
    return read_results(path)[1]


def test_rows_of_bench_stand_beside_those_in_bf16(tmp_path):
    assert run(bodies.run_bench, str(tmp_path), True) == [(0, 0)] * 2
    rows = rows_in(tmp_path, "tp")
    assert [(row.op, row.direction, row.dtype) for row in rows] == [
        ("ag_gemm", "forward", "float32"),
        ("ag_gemm", "forward", "fp8_tensorwise"),
        ("gemm_rs", "forward", "fp8_tensorwise"),
        ("column_linear", "forward_backward", "fp8_tensorwise"),
        ("row_linear", "forward_backward", "fp8_tensorwise"),
    ]
    assert all(row.bitwise_equal for row in rows) and rows[1].gemm_us and rows[1].comm_us


def test_what_is_not_covered_has_no_row(tmp_path):
    assert run(bodies.run_bench, str(tmp_path), False) == [(0, 2)] * 2
    assert [row.dtype for row in rows_in(tmp_path, "tp")] == ["float32"]


@pytest.mark.parametrize("wrong_bit", [False, True])
def test_verify_compares_layers_and_their_state(tmp_path, wrong_bit):
    assert run(bodies.run_verify, str(tmp_path), wrong_bit) == [int(wrong_bit)] * 2
    rows = rows_in(tmp_path, "verify")
    assert [(row.op, row.dtype, row.bitwise_equal) for row in rows] == [
        ("column_linear", "fp8_tensorwise", not wrong_bit),
        ("row_linear", "fp8_tensorwise", not wrong_bit),
    ]


def test_trace_records_a_layer(tmp_path):
    assert run(bodies.run_trace, str(tmp_path)) == [0, 0]
    names = {path.name for path in tmp_path.iterdir()}
    stem = "column_linear-fp8-tensorwise"
    assert names == {f"{stem}-native.json", f"{stem}-fused.json"}


@pytest.mark.parametrize(
    "words, says",
    [
        (("verify", "--column", "64", "64", "24"), "custom: ag_gemm 64x64x24 over 2 ranks: --fp8 tensorwise needs"),
        (("verify", "--random", "3"), "--random: without --fp8"),
        (("trace", "send_recv", "."), "send_recv is not in FP8; ag_gemm, "),
    ],
)
def test_what_cannot_be_in_fp8_is_the_same_sentence_on_every_rank(words, says):
    first, second = run(bodies.refused, *words)
    assert says in first and first == second


@pytest.mark.parametrize(
    "words",
    [
        ("verify",),
        ("bench", "tp"),
        ("bench", "ep"),
        ("bench", "sp"),
        ("trace", "--op", "ag_gemm"),
        ("compare", "--ditron", "tp"),
    ],
    ids=" ".join,
)
def test_without_transformer_engine(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    rest = ["torchrun", __file__] if words[0] == "compare" else []
    assert cli.main([*words, "--fp8", "delayed", *rest]) == 2
    logged = capsys.readouterr().err
    assert (
        f"{' '.join(words[:2] if words[0] == 'bench' else words[:1])} --fp8 delayed compares with Transformer"
        in logged
    )
    assert "is not installed: pip install" in logged


def test_compare_adds_the_recipe_to_the_command():
    words = ["torchrun", "train.py"]
    assert with_fp8(words, None) == words
    assert with_fp8(words, "blockwise")[2:] == ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
    with pytest.raises(SettingError, match="--fp8-recipe in the command: leave out --fp8 delayed"):
        with_fp8([*words, "--fp8-recipe=delayed"], "delayed")


def test_rows_of_other_recipes_stay_in_a_file(tmp_path):
    stamp = dataclasses.replace(collect_stamp(torch.device("cpu"), 2), commit="old")
    row = Row(op="ag_gemm", direction="forward", model="m", world_size=2, dtype="bfloat16", shape={"m": 1},
              native_us=2.0, ditron_us=1.0, bitwise_equal=True, comm_sms=0)  # fmt: skip
    for recipe in (None, "tensorwise", "delayed", "tensorwise", None):
        dtype = "bfloat16" if recipe is None else f"fp8_{recipe}"
        path = write_beside(tmp_path, "tp", stamp, [dataclasses.replace(row, dtype=dtype)])
        stamp = dataclasses.replace(stamp, commit="new")
    rows = read_results(path)[1]
    assert [one.dtype for one in rows] == ["bfloat16", "fp8_delayed", "fp8_tensorwise"]
    assert [one.title for one in rows] == ["ag_gemm", "ag_gemm fp8_delayed", "ag_gemm fp8_tensorwise"]
    assert [one.fp8 for one in rows] == [None, "delayed", "tensorwise"] and not any(one.commit for one in rows)
    path.write_text("broken")
    assert [one.dtype for one in read_results(write_beside(tmp_path, "tp", stamp, [row]))[1]] == ["bfloat16"]
