"""Of the ranks that run the GPU tests the first reports; the others say only what failed on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent.parent / "gpu"
TESTS = """
import os

def test_everywhere():
    pass

def test_on_the_first_rank():
    assert os.environ["RANK"] == os.environ["GOOD_RANK"], "wrong here"
"""


def _report(folder: Path, rank: int, good_rank: int) -> tuple[int, str, str]:
    env = {**os.environ, "RANK": str(rank), "GOOD_RANK": str(good_rank)}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.usefixtures("warm_python")
def test_one_rank_reports_and_the_others_what_failed(tmp_path: Path) -> None:
    for name in ("conftest.py", "shared_gpus.py"):
        shutil.copy(GPU_TESTS / name, tmp_path)
    (tmp_path / "test_ranks.py").write_text(TESTS)
    code, out, _ = _report(tmp_path, rank=0, good_rank=0)
    assert code == 0 and "test_everywhere PASSED" in out and "2 passed" in out
    assert _report(tmp_path, rank=1, good_rank=1) == (0, "", "")
    code, out, err = _report(tmp_path, rank=1, good_rank=0)
    assert (
        code == 1
        and out == ""
        and "[rank 1] E       AssertionError: wrong here" in err
        and "test_everywhere" not in err
    )
