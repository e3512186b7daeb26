"""``ditron report``: what is packed, and what is taken out."""

from __future__ import annotations

import getpass
import json
import socket
import zipfile
from pathlib import Path

import pytest

from ditron_train.cli import main
from ditron_train.tools.report.report import clean, package_lines


def test_an_archive_holds_the_facts_the_plan_the_logs_and_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    home = tmp_path / "home" / "someone"
    results = home / "verify"
    results.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DITRON_PLAN", str(home / "plan.json"))
    (home / "plan.json").write_text('{"decisions": {}}')
    (results / "verify.json").write_text(json.dumps({"path": str(home / "x")}))
    (results / "weights.bin").write_bytes(b"\0")
    log = ["ditron_train: tp column: native, because", "loss 1.0 WANDB_API_KEY=abc123", *(["step"] * 60), "the end"]
    (home / "job.log").write_text("\n".join(log))
    archive = home / "report.zip"
    assert main(["report", str(results), str(home / "job.log"), "--output", str(archive)]) == 0
    assert "look into it" in capsys.readouterr().out
    with zipfile.ZipFile(archive) as packed:
        texts = {name: packed.read(name).decode() for name in packed.namelist()}
    assert set(texts) == {"doctor.txt", "doctor.json", "0/verify/verify.json", "1/job.log", "2/plan.json"}
    assert json.loads(texts["doctor.json"])["facts"]["versions"]["python"]
    assert texts["0/verify/verify.json"] == '{"path": "~/x"}'
    assert texts["1/job.log"].startswith("ditron_train: tp column") and "the end" in texts["1/job.log"]
    assert "loss 1.0" not in texts["1/job.log"]
    assert not any(str(home) in text or "abc123" in text for text in texts.values())


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("HF_TOKEN=hf_abcdefghijklmnop", "HF_TOKEN=REMOVED"),
        ("export WANDB_API_KEY='k1'", "export WANDB_API_KEY=REMOVED"),
        ('"password": "x"', '"password": REMOVED'),
        ("Authorization: Bearer", "Authorization: REMOVED"),
        ("https://me:secret@host/x", "https://REMOVED@host/x"),
        ("key ghp_0123456789abcdef end", "key REMOVED end"),
        ("4096 tokens a rank", "4096 tokens a rank"),
        ("--tokenizer-model x", "--tokenizer-model x"),
    ],
)
def test_secrets_are_taken_out(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_the_names_of_host_and_user_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "someone")
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    assert clean("someone at node-7, someones") == "USER at HOST, someones"


def test_a_short_log_is_packed_whole() -> None:
    assert package_lines("a\nb") == "a\nb\n"


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(tmp_path / "nothing.log"), "--output", str(tmp_path / "x.zip")]) == 2
    assert "cannot read" in capsys.readouterr().err
