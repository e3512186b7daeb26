"""Forks the ranks of a job from a process that has imported everything, and watches how each of them ends.

Importing torch, triton and megatron-core takes seconds; a fork takes milliseconds. The process that forks must have
started no thread and no CUDA context.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.01
_STACKS_S = 0.1


@dataclass
class RankProcess:
    """One rank.

    Attributes:
        rank: Its number.
        pid: Of its process, which leads a session of its own.
        log: What it prints.
        status: Exit code, or the negative number of the signal that ended it; None while it runs.
        ended_s: When it was seen to have ended, by ``time.time()``.
        queued_s: How long, until then, it was ready to run and no core took it.
    """

    rank: int
    pid: int
    log: Path
    status: int | None = None
    ended_s: float | None = None
    queued_s: float = 0.0

    def printed(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")


class ForkedRanks:
    """``world_size`` forks of this process that run ``body(rank)``.

    Args:
        body: What a rank does. What it raises ends the rank as it would end an interpreter.
        folder: Of the logs ``rank<N>.log``.
        environment: Added to every rank's, beside ``RANK``, ``WORLD_SIZE`` and their local twins.
    """

    def __init__(
        self, world_size: int, body: Callable[[int], None], folder: Path, environment: Mapping[str, str]
    ) -> None:
        gc.freeze()  # collections of the forks need not look through what was imported
        self.ranks: list[RankProcess] = []
        for rank in range(world_size):
            log = folder / f"rank{rank}.log"
            named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            pid = os.fork()
            if pid == 0:
                _live(lambda: body(rank), log, {**environment, **{name: str(value) for name, value in named.items()}})  # noqa: B023  (called in this turn)
            self.ranks.append(RankProcess(rank, pid, log))

    def wait(self, is_over: Callable[[], bool], until_s: float) -> bool:
        """Until ``is_over()``, which is asked after every look at the ranks; False if the time was up first."""
        while True:
            self._reap()
            if is_over():
                return True
            if time.time() > until_s:
                return False
            time.sleep(_POLL_S)

    def kill(self) -> list[int]:
        """Ends what is left of every rank, which prints where it was; returns the processes that ranks have left
        behind."""
        running = [one for one in self.ranks if one.status is None]
        for one in running:
            os.kill(one.pid, signal.SIGUSR1)
        time.sleep(_STACKS_S if running else 0.0)
        for one in self.ranks:
            if one.status is None:
                os.kill(one.pid, signal.SIGKILL)
        self.wait(lambda: all(one.status is not None for one in self.ranks), time.time() + 10.0)
        orphans = _members_of({one.pid for one in self.ranks})
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        return orphans

    def look_at_queues(self) -> None:
        """Brings ``queued_s`` of those that run up to date."""
        for one in self.ranks:
            if one.status is None:
                one.queued_s = _queued_s(one.pid)

    def _reap(self) -> None:
        for one in self.ranks:
            if one.status is None and os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                one.queued_s = _queued_s(one.pid)  # as long as it is a zombie
                one.status, one.ended_s = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]), time.time()


def _queued_s(pid: int) -> float:
    """How long the first thread of a process has been ready without a core; 0 if the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def _live(body: Callable[[], None], log: Path, environment: Mapping[str, str]) -> None:
    """What a fork does, to the end of its process."""
    status = 1
    try:
        atexit._clear()  # what was registered before the fork belongs to the parent: folders that it still needs, say
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for target in (1, 2):
            os.dup2(out, target)
        for number in (signal.SIGTERM, signal.SIGSEGV):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
        os.environ.update(environment)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        body()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _members_of(sessions: set[int]) -> list[int]:
    """Processes of these sessions that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(words[3]) in sessions and words[0] != "Z":
            found.append(int(entry.name))
    return found
