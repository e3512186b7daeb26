"""A trace that does not fit on the disk costs a log line, not the training, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ditron_train.runtime.files import export_trace

_ON_A_FULL_DISK = """
import logging, resource, sys
from pathlib import Path
import torch
from torch.profiler import ProfilerActivity, profile
from ditron_train.runtime.files import export_trace
logging.basicConfig(stream=sys.stdout)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for _ in range(200):
        torch.ones(3) + 1
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
export_trace(profiler, Path(sys.argv[1]))
"""


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an older one")
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_FULL_DISK, str(path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert f"no trace {path}: torch could not write it whole" in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_trace_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add(1)
    export_trace(profiler, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert os.listdir(tmp_path) == ["trace.json"] and not caplog.text
