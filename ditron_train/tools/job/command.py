"""A training command as users have it: words from a shell, pasted text, a file of arguments, or a launch script."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import read_regular

_EVALUATION_S = 20
_NO_PATH = "/dev/null/none"  # an empty one is the current folder
# bash evaluates a launch script's variables, arrays and conditions, but starts nothing: no program can be found, the
# shell is restricted, and this function notes the words of every command that is therefore not found. A training
# command may run in the background: after the script, bash notes that it has come so far, and waits for what runs (the
# script's own waits do nothing).
_NOTE_COMMANDS = r"""
command_not_found_handle() { printf '%s\0' "$@" $'\1' >&NOTES; }
exit() { :; }; set() { :; }; exec() { "$@"; }; wait() { :; }; kill() { :; }; trap() { :; }; source() { :; }
"""
_THROUGH = r"""
printf '\2\0\1\0' >&NOTES; builtin wait
"""
_REDIRECTION = re.compile(r"\s[12&]?>>?\s*(?:\"[^\"\n]*\"|[\w./${}-]+)(?=\s*(?:2>&1)?\s*&?\s*$)", re.MULTILINE)
_PATH = re.compile(r"^\s*(?:export\s+)?PATH=.*$", re.MULTILINE)
# ``source "${FOLDER}/file"``: bash runs none of the programs by which scripts find their folder.
_SOURCED = re.compile(
    r"^[ \t]*(?:source|\.)[ \t]+[\"']?(?:\$\w+/|\$\{[^}\n]*\}/|\$\([^\n]*\)/)?([\w./-]+)[\"']?[ \t]*$", re.MULTILINE
)
_LAUNCHER_SIZES = {"nproc-per-node": "gpus_per_node", "nnodes": "nodes"}


class Command:
    """A command line that trains.

    Attributes:
        script: Name of the Python script, if the command starts one.
        arguments: Megatron's arguments, and those of ``--ditron``.
        sizes: ``nodes`` and ``gpus_per_node``, if the launcher in the command says them as numbers.
    """

    def __init__(self, words: Sequence[str]) -> None:
        words = _unpacked(words)
        script = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
        self.script = "" if script is None else Path(words[script]).name
        launcher = words[:script] if script is not None else []
        self.arguments = list(words[script + 1 :] if script is not None else words)
        self.sizes: dict[str, int] = {}
        for word, following in zip(launcher, [*launcher[1:], ""]):
            name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
            if name in _LAUNCHER_SIZES and (value if equals else following).isdecimal():
                self.sizes[_LAUNCHER_SIZES[name]] = int(value if equals else following)


def read_command(words: Sequence[str]) -> Command:
    """The command that ``words`` are, or that the text or the file in the first of them holds. Words after a launch
    script are its own arguments, up to the first that begins with ``--``; from there on they are added to its command.

    Raises:
        SettingError: The file cannot be read, or no training command is in it.
    """
    if len(words) > 1 and words[0] in ("bash", "sh") and Path(words[1]).is_file():
        words = words[1:]
    first = words[0] if words else ""
    if any(space in first for space in " \n\t"):
        return Command([*split_text(first), *words[1:]])
    if first.startswith("-") or first.endswith(".py") or not Path(first).is_file():
        return Command(words)
    if shutil.which(first) is not None and not first.endswith((".sh", ".txt")):
        return Command(words)  # a program that is called so
    try:
        text = read_regular(Path(first)).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read {first}: {getattr(error, 'strerror', None) or error}") from None
    if not (text.startswith("#!") or first.endswith(".sh")):
        return Command([*split_text(text), *words[1:]])
    given = list(itertools.takewhile(lambda word: not word.startswith("--"), words[1:]))
    return Command([*_evaluated(_with_sourced(text, Path(first).parent), first, given), *words[1 + len(given) :]])


def _with_sourced(text: str, folder: Path) -> str:
    """A script with what it sources in the place of the lines that do so, if that is in the script's folder."""

    def text_of(found: re.Match[str]) -> str:
        path = folder / found[1]
        return read_regular(path).decode("utf-8", errors="replace") if path.is_file() else found[0]

    for _ in range(4):  # one in another
        text = _SOURCED.sub(text_of, text)
    return text


def split_text(text: str) -> list[str]:
    """The words of text that was pasted, whose lines may end with a backslash.

    Raises:
        SettingError: A quotation mark is left open.
    """
    try:
        return shlex.split(re.sub(r"\\\s*\n", " ", text), comments=True)
    except ValueError as error:
        raise SettingError(f"Megatron's arguments cannot be split into words: {error}") from None


def _unpacked(words: Sequence[str]) -> list[str]:
    """``words``, of which one that holds a whole command (``bash -c "torchrun ..."``) is split."""
    holders = [word for word in words if re.search(r"\.py\s", word)]
    return split_text(holders[-1]) if holders else list(words)


def _evaluated(text: str, name: str, given: Sequence[str]) -> list[str]:
    """The words of the last command of a launch script that starts a Python script with arguments; the launch script
    is ``given`` arguments of its own."""
    bash = shutil.which("bash")
    if bash is None:
        raise SettingError(f"{name} is a shell script, and there is no bash to read it: paste the command instead")
    with tempfile.TemporaryFile() as notes:
        before, behind = (part.replace("NOTES", str(notes.fileno())) for part in (_NOTE_COMMANDS, _THROUGH))
        text = before + _PATH.sub("", _REDIRECTION.sub("", text)) + behind
        process = subprocess.Popen(
            [bash, "--restricted", "-s", "--", *given], env={**os.environ, "PATH": _NO_PATH}, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(notes.fileno(),), start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(text.encode(), timeout=_EVALUATION_S)
        except subprocess.TimeoutExpired:  # a loop, of which one in the background (a monitor) is no reason to refuse
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        notes.seek(0)
        found = notes.read().decode("utf-8", errors="replace").split("\1\0")
    if process.returncode == -signal.SIGKILL and "\2\0" not in found:
        raise SettingError(f"{name} does not end when bash reads it: paste the command instead")
    commands = [command.split("\0")[:-1] for command in found]
    training = [words for words in commands if ".py" in " ".join(words) and "--" in " ".join(words)]
    if not training:
        raise SettingError(
            f"{name} starts no Python script with arguments where bash could see it: paste the command instead"
        )
    return training[-1]
