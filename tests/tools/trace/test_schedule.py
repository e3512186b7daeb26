"""The drawn schedules: every tile once, own rows first or last, chunks in the order in which they are needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ditron_train.cli import main
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.trace.schedule import ScheduleRequest, plan_rank
from ditron_train.tools.trace.show_schedule import draw_schedules, show_schedules


@st.composite
def requests(draw: st.DrawFn) -> ScheduleRequest:
    per_node, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    world_size = per_node * nodes
    rows = draw(st.lists(st.integers(0, 700), min_size=world_size, max_size=world_size).filter(any))
    return ScheduleRequest(
        op=draw(st.sampled_from(["ag_gemm", "gemm_rs"])),
        m=sum(rows),
        n=world_size * draw(st.integers(1, 900)),
        k=64 * world_size,
        world_size=world_size,
        ranks_per_node=per_node,
        row_counts=rows,
        num_sms=draw(st.integers(1, 132)),
    )


@given(requests())
def test_every_tile_runs_once_and_chunks_are_taken_in_order(request: ScheduleRequest) -> None:
    for rank in range(request.world_size):
        schedule = plan_rank(request, rank)
        assert len(np.unique(schedule.tiles, axis=0)) == len(schedule.tiles) == schedule.wave.size
        assert np.bincount(schedule.wave.ravel())[:-1].tolist() == [request.num_sms] * (schedule.num_waves - 1)
        assert sorted([*schedule.chunks, rank]) == list(range(request.world_size))
        assert set(schedule.first_wave) == {r for r, rows in enumerate(request.row_counts) if rows}


def test_the_order_drawn_is_the_one_that_the_kernel_runs() -> None:
    """24 row tiles on 4 ranks in groups of 8: groups of the kernel end with a rank's rows."""
    request = ScheduleRequest(op="ag_gemm", m=24 * 128, n=4 * 5 * 256, k=4096, world_size=4)
    assert (request.config.block_m, request.config.block_n, request.config.group_m) == (128, 256, 8)
    for rank in range(4):
        drawn = [tuple(tile) for tile in plan_rank(request, rank).tiles]
        assert drawn == [(6 * ((rank + i // 30) % 4) + i % 6, i % 30 // 6) for i in range(120)]


def test_whole_tiles_of_one_rank_after_the_other() -> None:
    request = ScheduleRequest(op="ag_gemm", m=8192, n=28672, k=8192, world_size=8)
    for rank in range(8):
        schedule = plan_rank(request, rank)
        assert schedule.num_straddling == 0
        assert schedule.first_wave[rank] == 0
        needed = [schedule.first_wave[source] for source in schedule.chunks]
        assert needed == sorted(needed)
    scatter = ScheduleRequest(op="gemm_rs", m=8192, n=8192, k=28672, world_size=8, ranks_per_node=4)
    for rank in range(8):
        schedule = plan_rank(scatter, rank)
        done = [schedule.last_wave[target] for target in schedule.chunks]
        assert done == sorted(done) and schedule.last_wave[rank] == schedule.num_waves - 1
        assert {target // 4 for target in schedule.chunks[:4]} == {1 - rank // 4}  # the other node first


@pytest.mark.parametrize(
    "changes",
    [
        {"m": 0},
        {"world_size": 3},
        {"ranks_per_node": 5},
        {"row_counts": (1, 2)},
        {"row_counts": (1024,) * 7 + (1025,)},
        {"num_sms": 0},
    ],
)
def test_impossible_requests_are_refused(changes: dict) -> None:
    with pytest.raises(SettingError):
        ScheduleRequest(**{"op": "ag_gemm", "m": 8192, "n": 4096, "k": 512, "world_size": 8, **changes})


def test_shown_and_drawn(tmp_path: Path) -> None:
    request = ScheduleRequest(op="gemm_rs", m=1000, n=512, k=512, world_size=4, row_counts=(0, 400, 300, 300))
    schedules = [plan_rank(request, rank) for rank in range(4)]
    console = Console(record=True, width=200)
    show_schedules(request, schedules, console)
    assert "0 (no rows)" in console.export_text()
    draw_schedules(request, schedules, tmp_path / "a" / "b.png")
    assert (tmp_path / "a" / "b.png").read_bytes().startswith(b"\x89PNG")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [
        "trace",
        "--schedule",
        "ag_gemm",
        "--shape",
        "1024",
        "512",
        "256",
        "--world-size",
        "2",
        "--output",
        str(tmp_path),
    ]
    assert main(words) == 0 and (tmp_path / "schedule-ag_gemm.png").exists()
    for ranks in ("3", "0", "-1"):
        assert main([*words, "--ranks-per-node", ranks]) == 2
        assert "do not divide into nodes" in capsys.readouterr().err
    capsys.readouterr()
    assert main([*words[:-1], "/proc/nowhere"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: cannot write into /proc/nowhere") and not said.out


def test_without_matplotlib(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name == "matplotlib" else find_spec(name, *more)
    )
    assert main(["trace", "--op", "ag_gemm", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: pictures need matplotlib: pip install matplotlib\n"
