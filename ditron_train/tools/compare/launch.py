"""Runs the user's training command with the launcher put into it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.fp8.recipes import fp8_format

LAUNCHER = "ditron_train.megatron.run"
_END_S = 60.0  # that a job which is interrupted gets to end by itself; torchrun kills what has not ended after 30 s
_ERROR = re.compile(r"(\[rank\d+\]: )?([\w.]+(Error|Exception): |error: |\S+\.py: error: )")


def with_launcher(words: Sequence[str]) -> list[str]:
    """``words`` with ``-m ditron_train.megatron.run`` in front of the Python script, unless it is there.

    Raises:
        SettingError: No script stands there, it cannot be read, or features are named in the command itself.
    """
    words = list(words)
    if any(word == "--ditron" or word.startswith("--ditron=") for word in words):
        raise SettingError(
            "--ditron stands in front of the command: compare --ditron tp torchrun ... pretrain_gpt.py ..."
        )
    place = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        raise SettingError(
            f"no Python script in {' '.join(words) or 'the command'!r}: give it as torchrun ... SCRIPT.py ARGUMENTS"
        )
    if not Path(words[place]).is_file():
        raise SettingError(f"cannot read the script {words[place]}")
    if LAUNCHER in words[:place]:
        return words
    return [*words[:place], "-m", LAUNCHER, *words[place:]]


def with_fp8(words: Sequence[str], recipe: str | None) -> list[str]:
    """``words`` with Megatron's arguments for a recipe behind them; as they are without one.

    Raises:
        SettingError: They name a recipe or a format themselves.
    """
    if recipe is None:
        return list(words)
    options = {"--fp8-format": fp8_format(recipe), "--fp8-recipe": recipe}
    named = [option for option in options if any(word.split("=")[0] == option for word in words)]
    if named:
        raise SettingError(f"{' and '.join(named)} in the command: leave out --fp8 {recipe}, or these")
    return [*words, *(text for option in options.items() for text in option)]


def run_job(words: Sequence[str], log: Path, watch: Callable[[], None]) -> None:
    """Runs a command to its end, its output in ``log``; ``watch`` is called a few times a second.

    What ends this process, SIGTERM too, ends the job.

    Raises:
        SettingError: It cannot be started, or fails; with the first error and the last lines of its output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        try:
            job = subprocess.Popen(list(words), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise SettingError(f"cannot start {words[0]}: {error.strerror or error}") from None
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            while job.poll() is None:
                watch()
                time.sleep(0.2)
        finally:
            signal.signal(signal.SIGTERM, previous)
            _end(job)
    if job.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        words = [f"the job ended with status {job.returncode}"]
        words += [f"its first error: {line}" for line in lines if _ERROR.match(line)][
            :1
        ]  # torchrun has the last word, and says little
        raise SettingError(os.linesep.join([*words, f"the end of {log}:", *lines[-15:]]))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ends a job that still runs: torchrun passes an interrupt on to its workers."""
    if job.poll() is not None:
        return
    job.send_signal(signal.SIGINT)
    try:
        job.wait(_END_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
