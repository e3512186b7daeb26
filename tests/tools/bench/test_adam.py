"""``bench adam`` on CPU processes: a row with equal bits, and the sentence where no FusedAdam is installed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from megatron.core import optimizer as megatron_optimizer

from ditron_train.tools.bench import adam
from ditron_train.tools.nothing_compared import NothingComparedError
from ditron_train.tools.results import read_results
from tests.support.fused_adam import FusedAdam
from tests.support.processes import run_workers


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    adam.add_arguments(parser)
    return adam.run(parser.parse_args([*words, "--repetitions", "2", "--warmup", "0"]))


def _run_with_fused_adam(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_optimizer, "Adam", FusedAdam)
        return _run(*words)


def _run_with_another_sum(*words: str) -> int:
    """With a FusedAdam that ignores weight decay."""

    class Ignoring(FusedAdam):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            multi_tensor_adam = self.multi_tensor_adam
            self.multi_tensor_adam = lambda *args: multi_tensor_adam(*args[:-1], 0.0)

    Ignoring.__name__ = "FusedAdam"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_optimizer, "Adam", Ignoring)
        return _run(*words)


def _refused() -> str:
    try:
        _run()
    except NothingComparedError as error:
        return str(error)
    return "measured"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_row_for_each_shape(world_size: int, tmp_path: Path) -> None:
    words = ("--shape", "100", "--shape", "3000", "--output", str(tmp_path))
    assert set(run_workers(world_size, _run_with_fused_adam, *words)) == {0}
    (path,) = tmp_path.glob("*/adam.json")
    stamp, rows = read_results(path)
    assert stamp.count == world_size and [row.shape for row in rows] == [{"elements": 100}, {"elements": 3000}]
    assert all(row.op == "adam_step" and row.bitwise_equal for row in rows)


def test_other_bits_are_seen() -> None:
    assert run_workers(1, _run_with_another_sum) == [1]


def test_what_is_not_a_fused_adam_is_not_measured() -> None:
    assert "nothing was compared" in run_workers(1, _refused)[0]
