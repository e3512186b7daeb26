"""``bench pp`` on CPU processes: rows of every part, bits equal."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.bench import pp
from ditron_train.tools.results import read_results
from tests.support.processes import run_workers


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    pp.add_arguments(parser)
    return pp.run(parser.parse_args([*words, "--repetitions", "1", "--warmup", "0"]))


@pytest.mark.slow
def test_rows_of_every_part(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    words = ("--mb", "0.1", "--mb", "1", "--output", str(tmp_path))
    assert run_workers(2, _run, *words) == [0, 0]
    (path,) = tmp_path.glob("*/pp.json")
    _, rows = read_results(path)
    assert [(row.op, row.model) for row in rows] == [
        ("send_recv", "ring"),
        ("send_recv", "ring"),
        ("send_recv", "pairs"),
        ("send_recv", "pairs"),
        ("gemm_beside_transfer", "ring"),
        ("gemm_and_transfer", "ring"),
        ("pipeline_step", "1f1b"),
        ("pipeline_step", "interleaved"),
        ("pipeline_step", "interleaved, overlap"),
    ]
    assert all(row.bitwise_equal and row.comm_sms == 0 and row.native_us > 0 for row in rows)


def _refused() -> str:
    try:
        _run()
    except SettingError as error:
        return str(error)
    return "accepted"


def test_one_rank_is_refused() -> None:
    (text,) = run_workers(1, _refused)
    assert "even number of ranks" in text
