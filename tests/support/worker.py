"""The processes behind `tests.support.processes`: one imports torch once, the workers are forked from it.

``python -m tests.support.worker FD [MODULE ...]`` imports torch, triton and the modules named, then forks a
worker for every request that comes through the socket FD. It starts no thread and runs no tensor operation, so that
forking it is safe. A worker finds its rank, world size and store file in the environment of its request; it receives
functions through a pipe of its own, runs them and answers. All exit when their sockets close or their parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from tests.support.gloo_device import share_gloo_device
from tests.support.patience import HANG_S

#: A message instead of a request: all ranks have answered.
LEAVE_GROUPS = b""
_MANY_THREADS = 200  # of groups, more than after the last collection
_threads_left = 0  # after the last collection


def _exit_with_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os._exit(1)


def _load_module(name: str, path: str | None) -> ModuleType:
    """The module called `name`; from the file at `path` if it is not importable by that name."""
    if name in sys.modules:
        return sys.modules[name]
    if path is None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes of the module unpickle to the same objects
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _resolve(module_name: str, path: str | None, qualname: str) -> Callable[..., Any]:
    target: Any = _load_module(module_name, path)
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


@contextlib.contextmanager
def _environment(overrides: Mapping[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in overrides}
    os.environ.update(overrides)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _init_process_group(store_path: str, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)
    timeout = timedelta(seconds=float(os.environ.get("DITRON_TEST_GLOO_TIMEOUT_S", HANG_S)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _leave_groups() -> None:
    """Destroy the groups that the last call has left; no rank uses them any more, since all have answered. Groups that
    calls have destroyed themselves keep threads and files until the cycles of references that they are in are
    collected, which takes long, so it happens rarely."""
    global _threads_left
    from tests.support.model_parallel import destroy_groups

    destroy_groups()
    if _count_threads() > _threads_left + _MANY_THREADS:
        groups = sys.modules.get("ditron_train.runtime.groups")
        if groups is not None:
            groups.forget_destroyed_groups()
        gc.collect()
        _threads_left = _count_threads()


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _run_one(request: bytes) -> bytes:
    """Run one pickled request; the answer is a pickled ``(status, payload, traceback text)``."""
    try:
        module_name, path, qualname, arguments, overrides = pickle.loads(request)
        function = _resolve(module_name, path, qualname)
        args = pickle.loads(arguments)  # after the import: args may hold the module's classes
        with _environment(overrides):
            return pickle.dumps(("ok", pickle.dumps(function(*args)), ""))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        text = traceback.format_exc()
        try:
            payload = pickle.dumps(error)
            pickle.loads(payload)
        except Exception:
            payload = b""
        return pickle.dumps(("error", payload, text))
    finally:
        channels = sys.modules.get("ditron_train.symm.channel")
        if channels is not None:
            channels.forget_failed()  # what one test provoked must not stop the next one's optimizer step
        contexts = sys.modules.get("ditron_train.stream.op_context")
        for context in contexts._contexts.values() if contexts is not None else ():
            context.varies, context.most_rows = False, 0  # lengths that vary in one test do not vary in the next one


def _serve(connection: Connection, parent_pid: int) -> None:
    """A worker's life: joins its group, then runs what comes through its pipe, until that closes."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_exit_with_parent, args=(parent_pid,), daemon=True).start()
    _init_process_group(os.environ["DITRON_TEST_STORE"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            break
        if request == LEAVE_GROUPS:
            _leave_groups()
            continue
        answer = _run_one(request)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(answer)


def _become_worker(pipe: int, log: int, environment: Mapping[str, str], path: Sequence[str], parent_pid: int) -> None:
    """What a forked process does; never returns."""
    try:
        os.setsid()  # a group of its own, so that what it starts ends with it
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        if "DITRON_TEST_NODE" in environment:
            _enter_namespaces(int(environment["DITRON_TEST_NODE"]))
        _serve(Connection(pipe), parent_pid)
        os._exit(0)  # no collective teardown: a peer may be gone already
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _enter_namespaces(holder: int) -> None:
    """Goes over to the network, host name and ``/dev/shm`` of a simulated node (``tests.support.nodes``)."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = ("user", "net", "uts", "mnt")
    opened = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    folder = os.getcwd()
    for kind, descriptor in zip(kinds, opened):
        mine, theirs = (os.stat(f"/proc/{process}/ns/{kind}").st_ino for process in ("self", holder))
        if mine != theirs and libc.setns(descriptor, 0):  # into one's own user namespace nobody may
            raise OSError(ctypes.get_errno(), f"setns of {kind}")
        os.close(descriptor)
    os.chdir(folder)


def _import_all(modules: Sequence[str]) -> None:
    import torch
    import triton  # noqa: F401

    from ditron_train.cpu import megatron_shim as megatron_cpu
    from tests.support import patient_polls, quick_interpreter, quick_shim, small_tiles

    if os.environ.get("TRITON_INTERPRET") == "1":
        quick_interpreter.install()
    torch.compile = megatron_cpu.leave_uncompiled
    quick_shim.install()
    share_gloo_device()
    for name in modules:
        importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        quick_interpreter.rewrite_kernels()
        patient_polls.install()
        small_tiles.install()


def main() -> None:
    """Import, then fork a worker or report one's exit status for each message of the socket, until it closes.

    Messages are pickled: ``(environment, path)`` with the worker's pipe and log file attached is answered by its
    process number, ``(number, wait)`` by its exit status or None.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    _import_all(sys.argv[2:])
    gc.collect()
    gc.freeze()  # workers, which collect often, need not look through all that was imported
    gc.set_threshold(100_000, 50, 100)  # the interpreter makes many small objects and leaves few circles
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not message:
            return
        first, second = pickle.loads(message)
        if not descriptors:
            number, status = os.waitpid(first, 0 if second else os.WNOHANG)
            control.send(pickle.dumps(os.waitstatus_to_exitcode(status) if number else None))
            continue
        parent_pid = os.getpid()  # asked here: a worker whose parent has gone at once would take another one for it
        number = os.fork()
        if number == 0:
            control.close()
            _become_worker(*descriptors, first, second, parent_pid)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(pickle.dumps(number))


if __name__ == "__main__":
    main()
