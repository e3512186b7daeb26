"""Jobs that wait for their turn."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ditron_train.megatron.plugin.job_gate import hold, release, wait_for_turn
from ditron_train.runtime.errors import DitronError
from tests.support.patience import HANG_S


def test_a_job_goes_on_when_it_is_let(tmp_path: Path) -> None:
    hold(tmp_path / "notes")
    job = threading.Thread(target=wait_for_turn, args=(tmp_path / "notes",))
    job.start()
    job.join(0.3)
    assert job.is_alive()
    release(tmp_path / "notes")
    job.join(HANG_S)
    assert not job.is_alive() and not list((tmp_path / "notes").iterdir())


def test_nobody_holds_it(tmp_path: Path) -> None:
    wait_for_turn(tmp_path / "nowhere")
    release(tmp_path / "nowhere")
    (tmp_path / "waiting").write_text("not a number")
    wait_for_turn(tmp_path)


def test_who_held_it_has_ended(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from ditron_train.megatron.plugin.job_gate import hold; "
        f"hold(Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(DitronError, match="waiting: process [0-9]+, which was to say when this job may begin"):
        wait_for_turn(tmp_path)
