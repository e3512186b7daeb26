"""``bench profile`` in CPU processes: a profile that can be read, of rates that were measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.profiles import default_rates, read_profile
from ditron_train.tools.bench import profile
from tests.support.processes import run_workers


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    return profile.run(parser.parse_args([*words, "--repetitions", "2", "--warmup", "1"]))


def test_a_profile_of_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert run_workers(2, _run, "--output", str(path)) == [0, 0]
    mine, before = read_profile(path), default_rates("interpreter")
    assert mine.machine.target == "interpreter" and mine.made_with["ranks"] == "2"
    measured = ("gemm_tflops", "memory_gbps", "reorder_gbps", "nccl_pair_gbps", "attention_tflops")
    assert all(getattr(mine.rates, name) != getattr(before, name) for name in measured)
    assert mine.rates.message_us == before.message_us  # nothing was timed that would show it


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot write the profile"):
        _run("--output", str(tmp_path / "none" / "mine.json"))
