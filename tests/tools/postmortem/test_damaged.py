"""Whatever is in a folder of records is read or refused in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ditron_train.cli import main
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.flight_recorder import CAPACITY, HEADER_BYTES, MAGIC, SLOT
from ditron_train.tools.postmortem.files import read_file

HEADER = {
    "rank": 0,
    "world_size": 2,
    "host": "here",
    "pid": 1,
    "started_s": 1.0,
    "state": "raised",
    "groups": [["0", [0, 1]]],
    "error": {"kind": "PeerTimeoutError", "text": "", "time_ns": 1, "group": "0", "missing_rank": 1, "waited_s": 5.0},
}


def _write(folder: Path, header: Any, call: tuple = (1, 1, 1, 0, 1, b"op")) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "rank0.records"
    path.write_bytes(
        (MAGIC + text + b"\n").ljust(HEADER_BYTES, b"\0") + SLOT.pack(*call).ljust(CAPACITY * SLOT.size, b"\0")
    )
    return path


def _changed(**changes: Any) -> dict[str, Any]:
    return {**HEADER, **changes}


def _with_error(**changes: Any) -> dict[str, Any]:
    return {**HEADER, "error": {**HEADER["error"], **changes}}


def test_a_good_one_is_read(tmp_path: Path) -> None:
    file = read_file(_write(tmp_path, HEADER))
    assert file.error == HEADER["error"] and [call.text for call in file.calls] == ["op"]


def test_one_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    error = {name: value for name, value in HEADER["error"].items() if name != "waited_s"}
    assert read_file(_write(tmp_path, _changed(error=error))).error["waited_s"] is None


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 20_000, b"[]", b"null", b"\xff", {},
        _changed(rank="0"), _changed(rank=-1), _changed(rank=2), _changed(rank=True), _changed(world_size=10**12),
        _changed(world_size=0), _changed(world_size=None), _changed(host=5), _changed(pid="1"),
        _changed(state=["raised"]), _changed(state="asleep"), _changed(error="an error"), _changed(error=[]),
        _changed(groups=5), _changed(groups=[5]), _changed(groups=[["0"]]), _changed(groups=[["0", 5]]),
        _changed(groups=[[5, [0]]]), _changed(groups=[["0", ["0"]]]),
        _changed(groups=[["0", ["range", 0, 10**12, 1]]]), _changed(groups=[["0", ["range", 0, 2, 0]]]),
        _changed(groups=[["0", ["range", 0, 100_000, 1]]] * 60), _changed(groups=[]), _with_error(kind=5),
        _with_error(text=None), _with_error(time_ns="now"), _with_error(time_ns=1.5), _with_error(group=0),
        _with_error(missing_rank="1"), _with_error(missing_rank=-1), _with_error(waited_s="long"),
        _with_error(waited_s=float("nan")), _with_error(waited_s=-1),
    ],
)  # fmt: skip
def test_what_no_rank_writes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], header: Any) -> None:
    with pytest.raises(SettingError, match="rank0.records is damaged"):
        read_file(_write(tmp_path, header))
    assert main(["postmortem", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("host", ["[/bold]", "[bold", "a\\", "[link=x]", "\N{GRINNING FACE}\x1b[2J"])
def test_any_name_of_a_host_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str) -> None:
    _write(tmp_path, _changed(host=host, error={**HEADER["error"], "text": host}))
    assert main(["postmortem", str(tmp_path)]) == 1
    assert main(["postmortem", str(tmp_path), "--json"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_any_time_of_a_call_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, HEADER, (2**64 - 1, 2**64 - 1, 2**64 - 1, 0, 255, b"\xff[/]" * 20))
    assert main(["postmortem", str(tmp_path)]) == 1
    assert "#18446744073709551615" in capsys.readouterr().out


def test_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "rank0.records")
    assert main(["postmortem", str(tmp_path)]) == 2
    assert "no regular file" in capsys.readouterr().err
