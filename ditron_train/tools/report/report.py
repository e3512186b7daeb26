"""Packs what an issue needs into one archive: doctor's facts, the plan, the package's log lines, result tables.

Names of this host and user, the path of the home folder, and whatever looks like a key or a password are taken out.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
import socket
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import read_regular
from ditron_train.runtime.settings import get_settings
from ditron_train.tools.text import show_text

_MOST_BYTES = 20 << 20  # of a file; of a longer one the end is packed
_KINDS = (".json", ".jsonl", ".log", ".txt", ".md")  # that are packed from a folder
_SECRETS = (
    re.compile(r"(?i)([\w-]*(?:secret|passw(?:or)?d|api[_-]?key|credential|authorization)[\w-]*[\"']?\s*[=: ]\s*)\S+"),
    re.compile(r"(?i)([\w-]*token[\"']?\s*[=:]\s*)\S+"),
    re.compile(r"()\b(?:hf_|gh[pousr]_|sk-|xox[abp]-|AKIA)[\w-]{12,}"),
    re.compile(r"(://)[^/\s@]+(?=@)"),
)
_OWN_LINE = re.compile(r"ditron", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``report``."""
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="logs, tables and plans to add, and folders such as those that compare and verify write; of logs (*.log) "
        "the lines of this package",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("ditron-report.zip"), metavar="FILE", help="(default %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the archive.

    Raises:
        SettingError: A file cannot be read, or the archive not be written.
    """
    packed = dict(collect(arguments.files))
    try:
        with zipfile.ZipFile(arguments.output, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in packed.items():
                archive.writestr(name, clean(text))
    except OSError as error:
        raise SettingError(f"cannot write {arguments.output}: {error.strerror}") from None
    listed = "\n".join(f"  {name}: {len(text)} characters" for name, text in packed.items())
    show_text(f"{listed}\nwritten: {arguments.output}; look into it before you attach it to an issue")
    return 0


def collect(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """What the archive holds: names and texts, which are not cleaned yet."""
    from ditron_train.tools.doctor.examination import examine

    report = examine()
    yield "doctor.txt", report.to_text()
    yield "doctor.json", report.to_json()
    plan = get_settings().plan
    plans = [Path(plan)] if plan and Path(plan).is_file() else []
    for number, path in enumerate([*files, *plans]):
        members = sorted(path.rglob("*")) if path.is_dir() else [path]
        for member in members:
            if path.is_dir() and (member.suffix not in _KINDS or not member.is_file()):
                continue
            name = str(member.relative_to(path.parent)) if path.is_dir() else member.name
            yield f"{number}/{name}", _read(member)


def _read(path: Path) -> str:
    try:
        text = read_regular(path)[-_MOST_BYTES:].decode("utf-8", errors="replace")
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror or error}") from None
    return package_lines(text) if path.suffix == ".log" else text


def package_lines(text: str) -> str:
    """The lines of a log that this package wrote or that name it, and the last 50, where an error is."""
    lines = text.splitlines()
    kept = [line for line in lines[:-50] if _OWN_LINE.search(line)]
    return "\n".join([*kept, *lines[-50:]]) + "\n"


def clean(text: str) -> str:
    """``text`` without the home folder, the names of host and user, and secrets."""
    for pattern in _SECRETS:
        text = pattern.sub(r"\1REMOVED", text)
    home = str(Path.home())
    names = {home: "~", os.path.realpath(home): "~", socket.gethostname(): "HOST", getpass.getuser(): "USER"}
    for name, stand_in in names.items():
        if len(name) > 2 and name != "root":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stand_in, text)
    return text
