"""The benchmark over nodes: rows of simulated nodes with one rank each, by namespaces and by the loopback device
alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ditron_train.policy import Answer
from tests.nodes import bench_nodes as nodes
from tests.support.nodes import unsupported_reason_nodes
from tests.support.patience import HANG_S

pytestmark = pytest.mark.usefixtures("warm_python")

ROOT = Path(__file__).parents[2]
OPS = {"tp": ["column_linear", "ag_gemm", "column_linear", "row_linear", "gemm_rs", "row_linear"]}
# Nodes of one rank have no rails to share: no exchange of sp runs fused, so nothing of it is compared.
OPS |= {"sp": [], "pp": ["send_recv", "send_recv"], "muon": ["muon_step"]}


def _rows(tmp_path, simulated, parts):
    words = [*simulated, "--ranks", "1", "-m", "tests.nodes.bench_nodes", "--divide", "4", "--repetitions", "1"]
    words += ["--output", str(tmp_path), *(word for part in parts for word in ("--part", part))]
    command = [sys.executable, str(ROOT / "tests" / "nodes" / "simulated_nodes.py"), *words]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*/nodes.json")
    found = json.loads(path.read_text())
    assert "2 nodes of 1 ranks" in found["stamp"]["settings"]["summary"]
    rows = found["rows"]
    assert [row["op"] for row in rows] == [op for part in parts for op in OPS[part]]
    assert all(row["bitwise_equal"] for row in rows)
    return rows


def test_nodes_of_one_rank(tmp_path):
    if unsupported_reason_nodes() is not None:
        pytest.skip(unsupported_reason_nodes())
    for row in _rows(tmp_path, ["--rate-mbit", "1400"], OPS):
        assert row["fused_sends"] > 0 and "peer_us" in row
        if row["plan"][0].startswith(("strict: native", "strict: Megatron's")):
            assert row["ditron_us"] == row["native_us"]
        elif row["op"] != "muon_step":
            (plan,) = row["plan"]
            left = plan.removeprefix("strict: the fused path")
            assert left in ("", *(f", {what} by the process group" for what in ("gather", "sums")))


def test_nodes_by_the_loopback_device(tmp_path):
    assert all(row["fused_sends"] > 0 for row in _rows(tmp_path, ["--loopback"], ["pp", "muon"]))


class _Session:
    """What a row is asked of: each path that is timed takes as long as its place among them."""

    device, equal = torch.device("cpu"), staticmethod(lambda fused, native: fused == native)

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def measure(self, paths, interleaved):
        assert interleaved
        return {name: SimpleNamespace(median_us=float(place)) for place, name in enumerate(paths, 1)}

    def row(self, op, direction, model, sizes, timings, equal, **fields):
        return dict(equal=equal, **{name: timing.median_us for name, timing in timings.items()}, **fields)

    def add(self, row):
        self.rows.append(row)


@pytest.mark.parametrize(
    "left, exchanges, plan, is_native",
    [
        ([], ["gather"], "strict: the fused path", False),
        (["gather"], ["sums"], "strict: the fused path, gather by the process group", False),
        (["gather"], ["gather", "sums"], "strict: the fused path, gather by the process group", False),
        (["gather"], ["gather"], "strict: Megatron's calls, gather by the process group", True),
        (["sums"], ["sums"], "strict: Megatron's calls, sums by the process group", True),
    ],
)
def test_a_pass_that_is_left_to_the_process_group_repeats_megatrons_time(
    monkeypatch, left, exchanges, plan, is_native
):
    context = SimpleNamespace(leaves_gather="gather" in left, leaves_sums="sums" in left)
    monkeypatch.setattr(nodes.gate, "answer_for", lambda op, call: Answer(context))
    op, shape = SimpleNamespace(name="tp column"), SimpleNamespace(model="m", sizes={})
    strict = [lambda: [1], lambda: [1], lambda: [1]]  # native, by rails throughout, as the answer has it
    paths = (*strict[:2], lambda _: strict[2])
    case = nodes._Case(op, "x", None, shape, *paths, frozenset(exchanges), measured="forward")
    session = _Session()
    nodes._add_row(session, case, [])
    (row,) = session.rows
    assert row["plan"] == [plan] and (row["fused"] == row["native"]) is is_native and row["equal"]
    assert row["peer_us"] == 2.0
