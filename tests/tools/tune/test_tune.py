"""``python -m ditron_train tune`` on two CPU processes: a table is written, read, extended, and chosen by."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bodies_tune import tune_once, tune_with_simulated_times, tune_with_wrong_bits, use_choices, use_counts, use_table  # noqa: E402

from ditron_train.data.tuning_table import read_table  # noqa: E402
from ditron_train.runtime.errors import SettingError  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402

SHAPE = ("--shape", "64", "64", "64")


def test_a_table_is_written_read_and_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert run_workers(2, tune_once, str(path), *SHAPE) == [0, 0]
    content = json.loads(path.read_text())
    table = read_table(path, content["device"])
    assert {op: list(shapes) for op, shapes in table.choices["2 ranks"].items()} == {
        "ag_gemm nn": ["64x32x64"],
        "ag_gemm nt": ["64x32x64"],
        "gemm_ar nt": ["64x64x32"],
        "gemm_rs nt": ["64x64x32"],
    }
    entry = table.find("ag_gemm nt", 2, "64x32x64")
    assert entry["tried"] >= 5 and entry["native_us"] > 0 and entry["ditron_us"] <= 1.02 * entry["default_us"]
    assert table.rates is not None and table.rates.gemm_tflops > 0

    # The user's own hand on it counts: other tiles, by SM push, and the op gives the same bits.
    content["choices"]["2 ranks"]["ag_gemm nt"]["64x32x64"].update(tile="32x16x32", gather="SM push", push_sms=1)
    path.write_text(json.dumps(content))
    for choice, equal in run_workers(2, use_table, str(path), 64, 64, 64):
        assert (choice.config.block_m, choice.config.block_n, choice.config.block_k) == (32, 16, 32)
        assert choice.gather.mode == "push" and choice.source == "table" and equal

    # A model's row layers are added; what was there stays.
    sizes = "-- --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 128 --swiglu".split()
    assert run_workers(2, tune_once, str(path), "--op", "gemm_rs nt", *sizes) == [0, 0]
    longer = read_table(path, content["device"])
    assert longer.find("gemm_rs nt", 2, "128x32x16") and longer.find("gemm_rs nt", 2, "128x32x32")
    assert longer.find("ag_gemm nt", 2, "64x32x64")["tile"] == "32x16x32"


def test_projections_and_the_experts_gemms_run_as_the_table_says(tmp_path: Path) -> None:
    path = tmp_path / "simulated.json"
    ops = ("gemm_a2a nt", "a2a_gemm nt", "group_gemm", "group_wgrad")
    words = [word for op in ops for word in ("--op", op)]
    assert run_workers(2, tune_with_simulated_times, str(path), *words) == [0, 0]
    choices = json.loads(path.read_text())["choices"]
    assert set(choices["2 ranks"]) == set(ops[:2]) and set(choices["1 ranks"]) == set(ops[2:])
    for found in run_workers(2, use_choices, str(path)):
        assert set(found) == {op.split()[0] for op in ops}
        assert all(tuned == default // 2 and has_bits for default, tuned, has_bits in found.values()), found


def test_movement_runs_as_the_table_says(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    ops = ("gemm_a2a nn", "a2a_gemm nn", "to_heads", "to_sequence", "dispatch", "combine")
    words = [word for op in ops for word in ("--op", op)]
    assert run_workers(2, tune_once, str(path), *words) == [0, 0]
    content = json.loads(path.read_text())
    choices = content["choices"]["2 ranks"]
    assert {op: list(classes) for op, classes in choices.items()} == {
        "gemm_a2a nn": ["32x128x128"],
        "a2a_gemm nn": ["32x128x256"],
        "to_heads": ["32x256"],
        "to_sequence": ["32x128"],
        "dispatch": ["8 experts top 2 32"],
        "combine": ["8 experts top 2 32"],
    }
    assert (
        choices["to_heads"]["32x256"]["programs"] == 32 and choices["dispatch"]["8 experts top 2 32"]["senders"] == 1
    )

    choices["to_heads"]["32x256"]["programs"] = 7
    choices["to_sequence"]["32x256"] = {"programs": 999}
    choices["dispatch"]["8 experts top 2 32"]["senders"] = 9
    choices["combine"]["8 experts top 2 32"]["senders"] = 11
    path.write_text(json.dumps(content))
    for found in run_workers(2, use_counts, str(path)):
        assert found == [(32, 7), (32, 66), (16, 9), (32, 11)]
    choices["to_heads"]["32x256"]["programs"] = "many"
    path.write_text(json.dumps(content))
    with pytest.raises(SettingError, match="cannot be read: programs is 'many'"):
        run_workers(2, use_counts, str(path))


def test_candidates_with_other_bits_are_thrown_out(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    assert run_workers(2, tune_with_wrong_bits, str(path), *SHAPE, "--op", "ag_gemm nt") == [1, 1]
    entry = json.loads(path.read_text())["choices"]["2 ranks"]["ag_gemm nt"]["64x32x64"]
    assert entry["gather"] == "SM push" and entry["tried"] <= 2


def test_bad_input_is_refused_on_every_rank(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.json"
    foreign.write_text(
        '{"format": "ditron_train tuning 1", "device": "NVIDIA H200", "rates": null, "made_with": {}, "choices": {}}'
    )
    for path, words, expected in (
        (foreign, SHAPE, "was made on NVIDIA H200"),
        (tmp_path / "nowhere" / "t.json", SHAPE, "no such folder"),
        (tmp_path / "t.json", ("--shape", "64", "63", "64"), "does not divide over 2 ranks"),
        (tmp_path / "t.json", ("--shape", "64", "64", "66", "--op", "ag_gemm nt"), "not whole 16 bytes"),
    ):
        messages = run_workers(2, tune_once, str(path), *words)
        assert all(isinstance(message, str) and expected in message for message in messages), messages
