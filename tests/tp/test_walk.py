"""A newcomer follows one input from the public function to the kernel: few files, and downwards alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bodies_walk import walks_of_input  # noqa: E402

from tests.house.test_floors import FLOORS  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402

MOST_FILES = 4


def _floor(file: str) -> float:
    return FLOORS[file.split("/")[0]]


@pytest.mark.parametrize("mode", ["push", "copy"])
def test_the_input_of_ag_gemm_goes_through_few_files_and_never_climbs(mode: str) -> None:
    for walks in run_workers(2, walks_of_input, mode):
        assert ["tp/ag_gemm.py", "runtime/launch.py"] in walks
        for walk in walks:
            floors = [_floor(file) for file in walk]
            assert walk[0] == "tp/ag_gemm.py" and len(walk) <= MOST_FILES and floors == sorted(floors, reverse=True), (
                walk
            )


def test_a_column_layers_input_reaches_the_kernel_through_three_files() -> None:
    for walks in run_workers(2, walks_of_input, None):
        assert ["tp/linear.py", "tp/ag_gemm.py", "runtime/launch.py"] in walks
        assert max(sum(file.startswith("tp/") for file in walk) for walk in walks) <= 3
