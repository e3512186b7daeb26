"""``python -m tests.lengths`` on CPU processes: a row of the tiny model, bits equal; lengths as an RL job has them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.results import read_results
from tests.lengths import run as lengths
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    lengths.add_arguments(parser)
    return lengths.run(parser.parse_args([*words, "--repetitions", "1", "--warmup", "0"]))


def test_a_row_says_what_was_fused_and_proven(tmp_path: Path) -> None:
    assert run_workers(2, _run, "--microbatches", "4", "--first", "1", "--output", str(tmp_path)) == [0, 0]
    (path,) = tmp_path.glob("*/lengths.json")
    _, (row,) = read_results(path)
    assert row.model == "tiny" and row.bitwise_equal and row.fused_share == 1.0 and row.distinct_lengths == 2
    assert row.lengths is not None and row.lengths["differing_lengths"] == 0


def test_too_few_microbatches_are_refused() -> None:
    with pytest.raises(SettingError, match="above 20"):
        _run("--microbatches", "20", "--first", "10")


def test_lengths_are_those_of_an_rl_job() -> None:
    from tests.lengths.measurement import lengths_of

    found = lengths_of(2000, 8192, 4)
    assert len(found) == 2000 and max(found) <= 8192 and not any(length % 4 for length in found)
    assert len(set(found)) >= 300 and found == lengths_of(2000, 8192, 4)
