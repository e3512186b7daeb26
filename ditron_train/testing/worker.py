"""The child process of `ditron_train.testing.processes`: receives functions, runs them, answers.

Started as ``python -m ditron_train.testing.worker FD`` with its rank, world size and store file
in the environment, so that variables such as ``TRITON_INTERPRET`` are in place before torch or
triton is imported. Exits when its pipe closes or its parent is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Callable, Iterator, Mapping

__all__ = ["main"]


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
    timeout = timedelta(seconds=float(os.environ.get("DITRON_TEST_GLOO_TIMEOUT_S", "300")))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


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


def main() -> None:
    """Serve requests from the pipe whose file descriptor is the first argument, until it closes."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    if os.environ.get("TRITON_INTERPRET") == "1":
        from ditron_train.testing import interpreter

        interpreter.install()
    _init_process_group(
        os.environ["DITRON_TEST_STORE"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    )
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            break
        answer = _run_one(request)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(answer)
    os._exit(0)  # no collective teardown: a peer may be gone already


if __name__ == "__main__":
    main()
