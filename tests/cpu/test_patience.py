"""What a busy machine was late by is measured, so that tests of deadlines can take it off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.patience import HANG_S

STOPPED = """
import os, signal
from tests.support.patience import Lateness

with Lateness() as late:
    os.kill(os.getpid(), signal.SIGSTOP)
print(late.seconds)
"""


def test_time_in_which_a_process_was_not_run_is_lateness() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGCONT)
    logged, _ = process.communicate(timeout=HANG_S)
    assert float(logged) > 0.8
