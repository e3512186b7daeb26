"""Runs a function on N processes of this machine, joined by gloo, for CPU tests.

    def body(factor):                      # a function at module level
        return torch.distributed.get_rank() * factor

    assert run_workers(2, body, 10) == [0, 10]

Importing torch, triton and megatron-core takes seconds, so one process does it for all: workers are
forked from it. The workers of a world size stay alive and serve the following calls; after a failure
they are killed and the next call starts new ones. In every worker Triton's interpreter is on
(``TRITON_INTERPRET=1``, ``OMP_NUM_THREADS=1``) and repaired, torchrun's variables are set and
``torch.distributed`` is initialised. `run_workers_once` uses processes of its own and reports
what became of every rank: for tests in which a worker dies.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.forking import FIXED_ENV, ForkedProcess, close_template, search_path
from tests.support.patience import HANG_S
from tests.support.worker import LEAVE_GROUPS

_GRACE_AFTER_ERROR_S = 5.0
_LOG_TAIL_CHARS = 6000


class WorkerError(RuntimeError):
    """A worker died, hung past the timeout, or raised something that cannot be pickled."""


@dataclasses.dataclass
class WorkerOutcome:
    """What became of one rank: `value` if it returned, else `error` or `exit_code`."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exit_code is None and not self.timed_out


class _Worker:
    """One child process, its pipe and its log file."""

    def __init__(self, rank: int, world_size: int, directory: str, env: Mapping[str, str]) -> None:
        self.rank = rank
        self.log_path = os.path.join(directory, f"rank{rank}.log")
        self._log_offset = 0
        fused, theirs = socket.socketpair()
        with open(self.log_path, "wb") as log, theirs:
            environment = _worker_env(rank, world_size, directory, env)
            self.process = ForkedProcess(environment, theirs.fileno(), log.fileno())
        self.connection = Connection(fused.detach())

    def new_output(self) -> str:
        """What the worker has printed since the last call."""
        with open(self.log_path, errors="replace") as log:
            log.seek(self._log_offset)
            text = log.read()
            self._log_offset = log.tell()
        return text

    def kill(self) -> None:
        """End the process and all that it has started now, and reap it."""
        self.connection.close()
        if self.process.returncode is None:  # not reaped: the number is still this process's
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _worker_env(rank: int, world_size: int, directory: str, extra: Mapping[str, str]) -> dict[str, str]:
    env = {**os.environ, **FIXED_ENV, "PYTHONPATH": os.pathsep.join(search_path())}
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        DITRON_TEST_STORE=os.path.join(directory, "store"),
        DITRON_POSTMORTEM=directory,
    )
    if sys.platform.startswith("linux"):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.update(extra)
    return env


class WorkerPool:
    """`world_size` live processes in one gloo group. A context manager; not thread-safe."""

    def __init__(
        self,
        world_size: int,
        env: Mapping[str, str] | None = None,
        env_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
    ) -> None:
        """Start the processes; `env`, and what `env_of` says of a rank, is set in them before they join their
        group."""
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.directory = tempfile.mkdtemp(prefix="ditron_workers_")
        self.workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                self.workers.append(_Worker(rank, world_size, self.directory, {**(env or {}), **env_of(rank)}))
            ready = self._collect(time.monotonic() + HANG_S, None, starting=True)
            _raise_first(ready, "start", HANG_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether every worker is running."""
        return bool(self.workers) and all(w.process.poll() is None for w in self.workers)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stop_after_error_s: float | None = _GRACE_AFTER_ERROR_S,
    ) -> list[WorkerOutcome]:
        """Run ``fn(*args)`` on every rank and return what became of each; raises nothing itself.

        `env` holds for this call. Once a rank has failed the others get `stop_after_error_s`
        more (None: the whole `timeout_s`). After any failure the pool is closed.
        """
        request = _request(fn, args, env or {})
        for worker in self.workers:
            worker.new_output()
            try:
                worker.connection.send_bytes(request)
            except OSError:
                continue  # it died between calls; _collect reports its exit code
        outcomes = self._collect(time.monotonic() + timeout_s, stop_after_error_s)
        for worker in self.workers:
            text = worker.new_output()
            if text:
                sys.stdout.write("".join(f"[rank {worker.rank}] {line}\n" for line in text.splitlines()))
        if not all(outcome.ok for outcome in outcomes):
            self.close()
        for worker in self.workers:
            with contextlib.suppress(OSError):  # it has died since; the next call says so
                worker.connection.send_bytes(LEAVE_GROUPS)
        return outcomes

    def values(
        self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> list[Any]:
        """The same, but what each rank returned; raises what the first rank raised."""
        outcomes = self.run(fn, args, timeout_s, env)
        _raise_first(outcomes, fn.__qualname__, timeout_s)
        return [outcome.value for outcome in outcomes]

    def _collect(
        self, deadline: float, stop_after_error_s: float | None, starting: bool = False
    ) -> list[WorkerOutcome]:
        start = time.monotonic()
        outcomes = [WorkerOutcome(rank=rank) for rank in range(self.world_size)]
        pending = {worker.connection: worker for worker in self.workers}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                worker = pending.pop(connection)
                outcome = outcomes[worker.rank]
                _receive(worker, outcome, starting)
                outcome.seconds = time.monotonic() - start
                if not outcome.ok and stop_after_error_s is not None:
                    deadline = min(deadline, time.monotonic() + stop_after_error_s)
        for worker in pending.values():
            outcomes[worker.rank].timed_out = True
            outcomes[worker.rank].traceback = _stack_of(worker)
        return outcomes

    def close(self) -> None:
        """Kill the workers and remove their files. May be called twice."""
        for worker in self.workers:
            worker.kill()
        self.workers = []
        shutil.rmtree(self.directory, ignore_errors=True)


def _request(fn: Callable[..., Any], args: Sequence[Any], env: Mapping[str, str]) -> bytes:
    module = sys.modules.get(fn.__module__)
    qualname = fn.__qualname__
    if module is None or "<" in qualname:
        raise ValueError(f"{qualname} must be a function at module level to run in a worker")
    packaged = fn.__module__.split(".")[0] == "ditron_train"
    path = None if packaged else getattr(module, "__file__", None)
    name = fn.__module__ if fn.__module__ != "__main__" else "__parent_main__"  # the worker has a main of its own
    return pickle.dumps((name, path, qualname, pickle.dumps(tuple(args)), dict(env)))


def _receive(worker: _Worker, outcome: WorkerOutcome, starting: bool) -> None:
    try:
        answer = worker.connection.recv_bytes()
    except (EOFError, OSError):
        outcome.exit_code = worker.process.wait()
        outcome.traceback = worker.new_output()[-_LOG_TAIL_CHARS:]
        return
    if starting:
        return
    status, payload, outcome.traceback = pickle.loads(answer)
    if status == "ok":
        outcome.value = pickle.loads(payload)
    else:
        last_line = outcome.traceback.strip().splitlines()[-1]
        outcome.error = pickle.loads(payload) if payload else WorkerError(last_line)


def _stack_of(worker: _Worker) -> str:
    """Ask a stuck worker for the stacks of its threads; best effort."""
    if worker.process.poll() is None:
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
    return worker.new_output()[-_LOG_TAIL_CHARS:]


def _raise_first(outcomes: Sequence[WorkerOutcome], what: str, timeout_s: float) -> None:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if not failed:
        return
    # A rank that raised says more than one that died, and both say more than one left waiting.
    first = min(failed, key=lambda o: (o.timed_out, o.exit_code is not None, o.seconds, o.rank))
    others = ", ".join(str(o.rank) for o in failed if o is not first)
    suffix = f" (also failed or stopped: {others})" if others else ""
    if first.error is not None:
        cause = WorkerError(f"in rank {first.rank}{suffix}:\n{first.traceback}")
        raise first.error from cause
    state = f"did not finish within {timeout_s:g} s" if first.timed_out else (f"exited with code {first.exit_code}")
    raise WorkerError(f"{what}: rank {first.rank} {state}{suffix}\n{first.traceback}")


_pools: dict[int, WorkerPool] = {}


def run_workers(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = HANG_S,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on `world_size` processes and return its results, indexed by rank.

    `fn` must be defined at module level; arguments and results are pickled (tensors by value).
    `env` is set in the workers during this call only: too late for variables that are read on import.

    Raises the exception of the first rank that failed, its traceback as the cause; `WorkerError`
    when a rank dies or the call takes longer than `timeout_s`. All workers are killed then.
    """
    pool = _pools.get(world_size)
    if pool is None or not pool.is_alive:
        if pool is not None:
            pool.close()
        pool = _pools[world_size] = WorkerPool(world_size)
    return pool.values(fn, args, timeout_s, env)


def run_workers_once(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = HANG_S,
    env: Mapping[str, str] | None = None,
) -> list[WorkerOutcome]:
    """Run ``fn(*args)`` on fresh processes that end with the call; never raises for a worker.

    `env` is set from their start on. Every rank gets the whole `timeout_s` even if another one died:
    for tests of dead and stalled peers.
    """
    with WorkerPool(world_size, env) as pool:
        return pool.run(fn, args, timeout_s, stop_after_error_s=None)


def shutdown_pools() -> None:
    """Kill the workers kept for reuse, and what they are forked from (also done when the interpreter exits)."""
    while _pools:
        _pools.popitem()[1].close()
    close_template()


atexit.register(shutdown_pools)
