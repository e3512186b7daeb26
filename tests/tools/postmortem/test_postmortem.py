"""Records of the last calls survive whatever ends a process, and name the rank that went another way first."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(__file__))
import bodies_postmortem as bodies  # noqa: E402

from ditron_train.cli import main  # noqa: E402
from ditron_train.runtime import flight_recorder as records  # noqa: E402
from ditron_train.runtime.errors import SettingError  # noqa: E402
from ditron_train.tools.postmortem.diverge import find_divergence  # noqa: E402
from ditron_train.tools.postmortem.files import Call, Group, RankFile, read_folder  # noqa: E402
from tests.support.processes import run_workers_once  # noqa: E402


def _after(world_size: int, folder: Path, body, *arguments):
    env = {"DITRON_POSTMORTEM": str(folder), "DITRON_TIMEOUT_S": "2"}
    outcomes = run_workers_once(world_size, body, *arguments, env=env)
    return outcomes, read_folder(folder)


def test_a_rank_that_differs_is_named(tmp_path: Path, capsys) -> None:
    outcomes, files = _after(3, tmp_path, bodies.rank_differs, 1)
    assert all(type(outcome.error).__name__ == "MismatchError" for outcome in outcomes)
    found = find_divergence(files)
    assert (found.kind, found.ranks, found.number) == ("differs", (1,), 3)
    assert found.calls == {0: "all_gather 2x8 float32", 1: "all_gather 6x8 float32", 2: "all_gather 2x8 float32"}
    assert {file.error["kind"] for file in files} == {"MismatchError"}
    assert main(["postmortem", str(tmp_path)]) == 1
    assert "first to diverge: rank 1 went another way at call 3" in capsys.readouterr().out
    assert main(["postmortem", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["divergence"]["ranks"] == [1]


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    outcomes, files = _after(2, tmp_path, bodies.rank_is_killed, 1)
    assert outcomes[1].exit_code == -signal.SIGKILL and type(outcomes[0].error).__name__ == "PeerTimeoutError"
    assert [(file.state, len(file.calls)) for file in files] == [("raised", 3), ("running", 2)]
    found = find_divergence(files)
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), 3)


def test_a_stage_that_is_killed_is_named_by_its_neighbours(tmp_path: Path) -> None:
    _, files = _after(3, tmp_path, bodies.stage_is_killed, 1)
    found = find_divergence(files)
    assert (found.kind, found.ranks) == ("missing", (1,))


def test_the_group_that_stopped_first_counts(tmp_path: Path) -> None:
    _, files = _after(4, tmp_path, bodies.subgroups, 1)
    found = find_divergence(files)
    assert (found.kind, found.ranks, found.group.ranks, found.number) == ("behind", (1,), (0, 1), 2)


def test_an_error_of_the_users_is_kept(tmp_path: Path) -> None:
    _, files = _after(2, tmp_path, bodies.rank_raises, 0)
    assert files[0].error["kind"] == "ValueError" and files[0].error["text"] == "the user's own"
    found = find_divergence(files)
    assert (found.kind, found.ranks) == (
        "raised",
        (0,),
    )  # rank 1 was killed with its pool, without a word: a launcher's doing


WORLD = Group("0", (0, 1, 2))


def _file(rank: int, texts: list[str], first: int = 1, state: str = "ended", delay_ns: int = 0) -> RankFile:
    calls = tuple(Call(WORLD, first + i, 1000 * (first + i) + delay_ns, True, text) for i, text in enumerate(texts))
    return RankFile(rank, 3, "host", 1, state, None, calls, (WORLD,))


def test_nothing_diverged_though_rings_begin_elsewhere() -> None:
    assert find_divergence([_file(0, ["a", "b", "c"]), _file(1, ["b", "c"], 2), _file(2, ["c"], 3)]) is None


def test_calls_that_are_compared_tell_beside_others_on_the_same_group(tmp_path: Path, capsys) -> None:
    """As where a pipeline's stages are a tensor parallel group, too: rank 1 made more messages, and one call less."""
    for rank, (messages, calls) in enumerate(((2, 5), (7, 4), (3, 5))):
        ring = records._Ring(tmp_path / str(rank), keep=True)
        ring._header.update(rank=rank, world_size=3)
        own = records.OpRecords(ring, ring.add_group("0", [0, 1, 2]))
        for number in range(max(messages, calls)):
            if number < messages:
                own.record_own("exchange", number)
            if number < calls:
                own.record("ag_gemm", number)
        os.replace(ring.path, tmp_path / f"rank{rank}.records")
    found = find_divergence(read_folder(tmp_path))
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), 5)
    assert main(["postmortem", str(tmp_path)]) == 1
    assert "which ended first stands in the launcher's output" in capsys.readouterr().out


def test_a_ring_full_of_another_groups_calls_tells_nothing() -> None:
    other = tuple(Call(Group("1", (0,)), number, number, True, "x") for number in range(1, records.CAPACITY + 1))
    full = RankFile(0, 3, "host", 1, "ended", None, other, (Group("1", (0,)), WORLD))
    assert find_divergence([full, _file(1, ["a", "b"]), _file(2, ["a", "b"])]) is None


def test_nobody_can_say_who_is_right_of_two() -> None:
    found = find_divergence([_file(0, ["a", "x"]), _file(1, ["a", "y"])])
    assert (found.kind, found.ranks) == ("differs", (0, 1))


def test_the_earliest_place_counts() -> None:
    found = find_divergence(
        [_file(0, ["a", "b", "z", "d"]), _file(1, ["a", "b", "c"]), _file(2, ["a", "b", "c", "d"])]
    )
    assert (found.kind, found.ranks, found.number) == ("differs", (0,), 3)


def test_bad_folders(tmp_path: Path, capsys) -> None:
    with pytest.raises(SettingError, match="not a folder"):
        read_folder(tmp_path / "missing")
    with pytest.raises(SettingError, match="no records"):
        read_folder(tmp_path)
    (tmp_path / "rank0.records").write_bytes(b"something else")
    assert main(["postmortem", str(tmp_path)]) == 2
    assert "holds no records of this version" in capsys.readouterr().err
    assert main(["postmortem", str(tmp_path), "--last", "-1"]) == 2
    assert "--last has to be 0 or more" in capsys.readouterr().err


def _ring(folder: Path) -> records._Ring:
    return records._Ring(folder, keep=True)


def _leave_records(folder: str, rows: int) -> str:
    """What a rank of a job leaves in ``folder``, and the job's word."""
    ring = _ring(Path(folder))
    records.OpRecords(ring, ring.add_group("0", list(range(dist.get_world_size())))).record("op", (rows,))
    return ring._header["job"]


def test_files_of_an_earlier_job_are_left_out(tmp_path: Path, capsys) -> None:
    """As where a folder is named, or the default one is of a port that each job of a machine has."""
    words = [run_workers_once(ranks, _leave_records, str(tmp_path), ranks, timeout_s=60) for ranks in (3, 2)]
    jobs = [{outcome.value for outcome in outcomes} for outcomes in words]
    assert [len(job) for job in jobs] == [1, 1] and jobs[0] != jobs[1] and "" not in jobs[0] | jobs[1]
    files = read_folder(tmp_path)
    assert [(file.rank, file.world_size, file.calls[-1].text) for file in files] == [(0, 2, "op 2"), (1, 2, "op 2")]
    (tmp_path / "rank0.records").unlink()  # rank 0 of the newer job has died before its first call
    assert [(file.rank, file.world_size) for file in read_folder(tmp_path)] == [(1, 2)]
    assert main(["postmortem", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 ranks" in printed and "left out: 1 files that earlier jobs have left here" in printed


def test_the_ring_keeps_the_last_thousand(tmp_path: Path) -> None:
    own = records.OpRecords(ring := _ring(tmp_path), ring.add_group("7", [1, 3, 5]))
    for number in range(2500):
        own.record("op", (number % 7, 8))
    (file,) = read_folder(tmp_path)
    assert [call.number for call in file.calls] == list(range(1501, 2501))
    assert file.calls[-1].text == f"op {2499 % 7}x8" and file.calls[-1].group == Group("7", (1, 3, 5))


def test_a_record_costs_about_a_microsecond(tmp_path: Path) -> None:
    """Best of many: others run on the machine, too. 10 us would be a system call or a formatted text."""
    own = records.OpRecords(ring := _ring(tmp_path), ring.add_group("0", [0]))
    best_us = 1e9
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            own.record("ag_gemm", (1024, 1, 8192), (3584, 8192), "bfloat16")
        best_us = min(best_us, (time.perf_counter() - start) * 1e4)
    assert best_us < 5


@pytest.fixture
def no_ring(monkeypatch) -> None:
    """As in a process that has called no op yet."""
    monkeypatch.setattr(records, "_ring", None)
    monkeypatch.setattr(records, "_ring_failed", False)
    monkeypatch.setattr(records, "_records", {})


def test_ever_more_groups_and_words_do_not_end_a_job(no_ring, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DITRON_POSTMORTEM", str(tmp_path))
    for number in range(600):
        records.records_of(f"{number}_{'name' * 20}", [number, number + 1, 3 * number + 5]).record("op", number)
    records._ring.note(ValueError("\N{GRINNING FACE}" * 5000), None)
    (file,) = read_folder(tmp_path)
    assert (
        len(file.groups) == len(file.calls) == records._MAX_GROUPS
        and file.calls[-1].text == f"op {records._MAX_GROUPS - 1}"
    )
    assert file.error["kind"] == "ValueError" and len(file.error["text"]) > 500


def test_a_name_that_comes_again_for_other_ranks_is_another_group(no_ring, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DITRON_POSTMORTEM", str(tmp_path))
    for ranks in ([0, 1], [0, 2], [0, 1]):
        records.records_of("7", ranks).record("op")
    (file,) = read_folder(tmp_path)
    assert [(call.group, call.number) for call in file.calls] == [
        (Group("7", (0, 1)), 1), (Group("7", (0, 2)), 1), (Group("7", (0, 1)), 2)
    ]  # fmt: skip


def test_a_folder_that_cannot_be_written_costs_the_records_only(no_ring, monkeypatch, caplog) -> None:
    monkeypatch.setenv("DITRON_POSTMORTEM", "/proc/nowhere")
    records.records_of("0", [0]).record("op")
    assert "cannot write /proc/nowhere" in caplog.text


def test_a_full_disk_costs_the_records_only(no_ring, monkeypatch, caplog, tmp_path: Path) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("DITRON_POSTMORTEM", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    records.records_of("0", [0]).record("op")
    assert f"cannot write {tmp_path}: No space left" in caplog.text and not list(tmp_path.iterdir())


def test_nothing_is_written_where_somebody_else_has_made_the_folder(
    no_ring, monkeypatch, caplog, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / f"ditron_postmortem-{os.getuid()}").symlink_to(target)
    monkeypatch.delenv("DITRON_POSTMORTEM", raising=False)
    monkeypatch.setattr(records.tempfile, "gettempdir", lambda: str(tmp_path))
    records.records_of("0", [0]).record("op")
    assert "it belongs to somebody else" in caplog.text and not list(target.iterdir())


def test_off_writes_nothing(monkeypatch) -> None:
    monkeypatch.setenv("DITRON_POSTMORTEM", "off")
    monkeypatch.setattr(records, "_ring", None)
    monkeypatch.setattr(records, "_records", {})
    records.records_of("0", [0]).record("op")
    assert records._ring is None
