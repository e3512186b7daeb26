"""Runs the user's training command with the launcher put into it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ditron_train.megatron.plugin import job_gate
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.fp8.recipes import fp8_format

LAUNCHER = "ditron_train.megatron.run"
_END_S = 60.0  # that a job which is interrupted gets to end by itself; torchrun kills what has not ended after 30 s
_ERROR = re.compile(r"(\[rank\d+\]: )?([\w.]+(Error|Exception): |error: |\S+\.py: error: )")


def with_launcher(words: Sequence[str]) -> list[str]:
    """``words`` with ``-m ditron_train.megatron.run`` in front of the Python script, unless it is there.

    Raises:
        SettingError: No script stands there, it cannot be read, features are named in the command itself, or it saves
            checkpoints.
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
    if any(word.split("=")[0] == "--save" for word in words[place:]):  # of all jobs, one over the other
        raise SettingError(
            "--save in the command: each job would overwrite the checkpoints, and begin where the one before it "
            "stopped; leave it out (--load alone is fine: all jobs start from that checkpoint)"
        )
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


class RunningJob:
    """A command that runs beside this process, its output in a file.

    Args:
        words: The command.
        log: Its output.
        folder: Of its notes.
        is_held: Whether it waits for its turn in front of its set-up.

    Raises:
        SettingError: It cannot be started.
    """

    def __init__(self, words: Sequence[str], log: Path, folder: Path, *, is_held: bool = False) -> None:
        self._log, self._folder = log, folder
        log.parent.mkdir(parents=True, exist_ok=True)
        job_gate.release(folder)  # what a command that was killed has left
        if is_held:
            job_gate.hold(folder)
        with log.open("w", encoding="utf-8") as output:
            try:
                self._process = subprocess.Popen(
                    list(words), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
                )
            except OSError as error:
                raise SettingError(f"cannot start {words[0]}: {error.strerror or error}") from None

    def finish(self, watch: Callable[[], None]) -> None:
        """Its turn: returns when it has ended; ``watch`` is called a few times a second.

        Raises:
            SettingError: It fails; with the first error and the last lines of its output.
        """
        job_gate.release(self._folder)
        while self._process.poll() is None:
            watch()
            time.sleep(0.2)
        if self._process.returncode:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            # torchrun has the last word, and says little
            first = [f"its first error: {line}" for line in lines if _ERROR.match(line)][:1]
            words = [f"the job ended with status {self._process.returncode}", *first]
            raise SettingError(os.linesep.join([*words, f"the end of {self._log}:", *lines[-15:]]))

    def interrupt(self) -> None:
        """Begins to end it if it still runs: torchrun passes an interrupt on to its workers."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Waits for what ``interrupt`` has begun, and kills what does not end."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        job_gate.release(self._folder)


@contextmanager
def running_jobs() -> Iterator[list[RunningJob]]:
    """A list of jobs, which end with the block, however that ends: what ends this process, SIGTERM too, ends them."""
    jobs: list[RunningJob] = []
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield jobs
    finally:
        signal.signal(signal.SIGTERM, previous)
        for job in jobs:
            job.interrupt()
        for job in jobs:
            job.end()


def may_start_together(words: Sequence[str]) -> bool:
    """Whether several jobs of one command may be there at once: torchrun then finds a port of its own for each."""
    return "--standalone" in words[: words.index(LAUNCHER)]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
