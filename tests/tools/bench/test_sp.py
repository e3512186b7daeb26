"""``bench sp`` on CPU processes: rows of every part, bits equal, bad shapes refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.bench import sp
from ditron_train.tools.results import read_results
from tests.support.processes import run_workers


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    sp.add_arguments(parser)
    return sp.run(parser.parse_args([*words, "--repetitions", "1", "--warmup", "0"]))


def test_rows_of_both_ops_and_of_the_backward(tmp_path: Path) -> None:
    assert run_workers(2, _run, "--shape", "32", "4", "2", "16", "--output", str(tmp_path)) == [0, 0]
    (path,) = tmp_path.glob("*/sp.json")
    stamp, rows = read_results(path)
    assert stamp.count == 2
    assert [(row.op, row.direction) for row in rows] == [
        ("gemm_a2a", "forward"),
        ("a2a_gemm", "forward"),
        ("qkv_projection", "backward"),
        ("output_projection", "backward"),
        ("all_gather_attention", "forward_backward"),
    ]
    for row in rows:
        assert row.bitwise_equal and row.native_us > 0 and row.comm_sms == 0
        assert row.shape == {"seqlen": 32, "heads": 4, "groups": 2, "head_size": 16}
    assert rows[0].peer == "one all-to-all" and rows[1].peer is None


@pytest.mark.parametrize("shape", [("30", "4", "2", "16"), ("32", "4", "1", "16"), ("32", "4", "3", "16")])
def test_a_shape_that_does_not_divide_is_refused(shape: tuple[str, ...]) -> None:
    with pytest.raises(SettingError, match="does not divide over 2 ranks"):
        run_workers(2, _run, "--shape", *shape)
