"""A job that ends well leaves no folder of records, one that fails keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ditron_train.tools.postmortem.files import read_folder

pytestmark = pytest.mark.usefixtures("warm_python")

_JOB = """
from ditron_train.runtime.flight_recorder import records_of
records_of("0", [0]).record("op")
{end}
"""


def _leaves(folder: Path, end: str, **variables: str) -> list[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("DITRON_", "TORCHELASTIC", "SLURM"))
    }
    environment.update(TMPDIR=str(folder), RANK="0", **variables)
    subprocess.run([sys.executable, "-c", _JOB.format(end=end)], env=environment, capture_output=True, timeout=100)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_job_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    assert _leaves(tmp_path, "") == []


def test_folders_of_other_jobs_stay(tmp_path: Path) -> None:
    mine = f"ditron_postmortem-{os.getuid()}"
    kept = tmp_path / mine / "other" / "rank0.records"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert _leaves(tmp_path, "", MASTER_PORT="1234") == [mine, f"{mine}/other", f"{mine}/other/rank0.records"]


def test_a_job_that_fails_keeps_its_records(tmp_path: Path) -> None:
    left = _leaves(tmp_path, "raise ValueError('the user\\'s own')", MASTER_PORT="1234")
    assert left[-1] == f"ditron_postmortem-{os.getuid()}/1234/rank0.records"


@pytest.mark.parametrize("name", ["..", ".", "x" * 300])
def test_any_name_of_a_job_is_a_folder_in_the_users(tmp_path: Path, name: str) -> None:
    left = _leaves(tmp_path, "raise ValueError", TORCHELASTIC_RUN_ID=name)
    assert len(left) == 3 and left[-1].count("/") == 2 and left[-1].endswith("/rank0.records")


def test_records_follow_no_link(tmp_path: Path) -> None:
    """In a folder that all may write, somebody else may have put one where a file of this process will be."""
    code = "import os; os.symlink('victim', os.environ['DITRON_POSTMORTEM'] + f'/.rank0.records.{os.getpid()}')"
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "rank0.records").symlink_to("victim")
    environment = {**os.environ, "RANK": "0", "DITRON_POSTMORTEM": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code + _JOB.format(end="")], env=environment, check=True, timeout=100)
    assert (tmp_path / "victim").read_text() == "dear"
    assert [one.name for one in tmp_path.iterdir() if one.is_symlink()] == []
    assert (tmp_path / "rank0.records").stat().st_size > 4


def test_a_fork_that_fails_is_not_its_parents_error(tmp_path: Path) -> None:
    code = """
import os
if os.fork() == 0:
    raise ValueError("the child's own")
os.wait()
os._exit(0)
"""
    environment = {**os.environ, "RANK": "0", "DITRON_POSTMORTEM": str(tmp_path)}
    command = [sys.executable, "-c", _JOB.format(end=code)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=100)
    assert b"the child's own" in done.stderr
    (file,) = read_folder(tmp_path)
    assert (file.state, file.error) == ("running", None)
