"""Commands of Python that run in forks of a process which has imported torch, triton and megatron-core already.

`executable()` is a program to start in place of ``sys.executable``. It hands its arguments, environment, working
folder and standard streams to one process per session (``serve`` below), which forks, and the fork runs what the
command names: ``-c``, ``-m`` or a script. Status, signals and end are those of the fork. The package itself is not
imported before the fork.

What a fork could not do as a new interpreter would goes to the real one: options that are not known here, a
``sitecustomize`` on the path, inherited files, variables that those libraries read when they are imported.

This file imports nothing but the standard library when it is imported, since it is run by its path.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import importlib.util
import marshal
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

#: Imported once for all commands.
_SHARED = (
    "torch",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "triton",
    "triton.language",
)
#: Where every rank of a job imports megatron-core, and torch's compiler with it.
_MEGATRON = ("megatron.core", "torch._dynamo", "torch._inductor")
_MESSAGE_BYTES = 1 << 20

# The program that is started. Read by the real interpreter without its site, so it begins in some 10 ms.
_CLIENT = r"""#!{real} -IS
import marshal, os, sys
import _signal as signal, _socket as socket, resource

def is_plain(words):
    "Whether the words begin with options of the interpreter that a fork knows."
    while words and words[0].startswith("-"):
        if words[0] in ("-c", "-m"):
            return len(words) > 1
        if words[0] == "-W":
            words = words[1:]
        elif words[0] != "-u":
            return False
        words = words[1:]
    return bool(words)

def same(name):
    "Whether a variable is to be as it was when the libraries were imported."
    return name.startswith({read!r}) and not name.startswith({free!r}) and name != "PYTHON"

def is_inherited(name):
    try:
        return int(name) > 2 and os.get_inheritable(int(name))
    except OSError:
        return False

def is_warm():
    known, environment = {known!r}, dict(os.environ)
    if any(same(name) and environment.get(name) != known.get(name) for name in {{*known, *environment}}):
        return False
    for folder in environment.get("PYTHONPATH", "").split(os.pathsep):
        if any(os.path.exists(os.path.join(folder, name + ".py")) for name in ("sitecustomize", "usercustomize")):
            return False
    return is_plain(sys.argv[1:]) and not any(map(is_inherited, os.listdir("/proc/self/fd")))

def begin():
    "A connection to the process that forks."
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect({address!r})
    except OSError:
        return None
    return connection

connection = begin() if is_warm() else None
if connection is None:
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
passed_on = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ignored = [int(number) for number in passed_on if signal.getsignal(number) == signal.SIG_IGN]
for number in passed_on:
    if number not in ignored:
        signal.signal(number, lambda number, frame: connection.send(bytes([number])))
limits = [resource.getrlimit(number) for number in range({num_limits})]
umask = os.umask(0)
os.umask(umask)
place = (dict(os.environ), os.getcwd(), umask, os.nice(0), sorted(os.sched_getaffinity(0)))
started = (sys.argv[1:], *place, limits, ignored)
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
connection.sendmsg([marshal.dumps(started)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
answer = connection.recv(64)
status = marshal.loads(answer) if answer else -signal.SIGKILL
if status < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
#: Variables that begin like this are read when those libraries, or the interpreter, begin; but for these.
_READ = ("TORCH", "PYTORCH", "TRITON", "NVTE", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "LD_", "PYTHON")
_FREE = (
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
    "NVTE_ALLOW_",
    "TORCHINDUCTOR_CACHE",
    "TRITON_CACHE",
)
_NUM_LIMITS = 16


@functools.cache
def executable() -> str:
    """The program; its server is started by the first call and ends with this process."""
    from tests.support.megatron_version import is_newer_than_0_17

    # Since 0.18 importing megatron-core settles whether emerging_optimizers is there, which tests have to choose.
    megatron = () if is_newer_than_0_17() or importlib.util.find_spec("megatron") is None else _MEGATRON
    folder = Path(tempfile.mkdtemp(prefix="ditron_python_"))
    address, program = str(folder / "socket"), folder / "python"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONWARNINGS")}
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen(64)
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, str(listening.fileno()), str(program), *_SHARED, *megatron],
        env=environment,
        pass_fds=(listening.fileno(),),
        stdin=subprocess.PIPE,  # its end is this process's
        start_new_session=True,
    )
    listening.close()
    known = {name: value for name, value in environment.items() if name.startswith(_READ)}
    program.write_text(
        _CLIENT.format(
            real=sys.executable, address=address, known=known, read=_READ, free=_FREE, num_limits=_NUM_LIMITS
        )
    )
    program.chmod(0o755)
    atexit.register(_end, os.getpid(), server, folder)
    return str(program)


def _end(owner: int, server: subprocess.Popen[bytes], folder: Path) -> None:
    if os.getpid() == owner and server.stdin is not None:
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


class _Forks:
    """The process that forks: what runs, by the files that say when it ends."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ, self._begin)
        self._selector.register(0, selectors.EVENT_READ, self._end_all)
        self._running: dict[int, tuple[int, socket.socket]] = {}

    def next_command(self) -> tuple[Any, ...]:
        """Forks for every command, and returns in the forks alone: with what the command is."""
        while True:
            for key, _ in self._selector.select():
                command = key.data(key.fileobj)
                if command is not None:
                    return command

    def _begin(self, listening: socket.socket) -> tuple[Any, ...] | None:
        connection, _ = listening.accept()
        message, streams, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if len(streams) != 3:
            connection.close()
            return None
        (asking,) = struct.unpack("i8x", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        pid = os.fork()
        if pid == 0:
            for _, other in self._running.values():
                other.close()
            for watch in [*self._running]:
                os.close(watch)
            for each in (connection, self._listening, self._selector):
                each.close()
            return (asking, streams, *marshal.loads(message))
        for stream in streams:
            os.close(stream)
        watch = os.pidfd_open(pid)
        self._running[watch] = pid, connection
        self._selector.register(watch, selectors.EVENT_READ, self._answer)
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._pass_on, pid))
        return None

    def _pass_on(self, pid: int, connection: socket.socket) -> None:
        """A signal that the program got; its end, if it was killed, is the fork's."""
        if connection.fileno() < 0:
            return  # it has been answered since
        numbers = connection.recv(64) or bytes([signal.SIGKILL])
        os.kill(pid, numbers[0])  # not reaped before `_answer`, so it is still this one
        if numbers[0] == signal.SIGKILL:
            self._selector.unregister(connection)

    def _answer(self, watch: int) -> None:
        pid, connection = self._running.pop(watch)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._selector.unregister(watch)
        os.close(watch)
        if connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)
            try:
                connection.send(marshal.dumps(status))
            except OSError:
                pass  # killed at this moment
        connection.close()

    def _end_all(self, _: int) -> None:
        for pid, _ in self._running.values():
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _enter_namespaces(asking: int) -> None:
    """Goes over to the user, network, host name and mounts of the program (``tests.support.nodes``)."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = ("user", "net", "uts", "mnt")
    opened = [os.open(f"/proc/{asking}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    for kind, descriptor in zip(kinds, opened):
        mine, theirs = (os.stat(f"/proc/{process}/ns/{kind}").st_ino for process in ("self", asking))
        if mine != theirs and libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns of {kind}")
        os.close(descriptor)


def _become(
    program: str, asking: int, streams: list[int], words: list[str], environment: dict[str, str], folder: str,
    umask: int, niceness: int, cores: list[int], limits: list[tuple[int, int]], ignored: list[int],
) -> list[str]:  # fmt: skip
    """Makes this fork the process that was asked for; returns its words without options of the interpreter."""
    os.setsid()
    _enter_namespaces(asking)
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.umask(umask)
    os.nice(niceness - os.nice(0))
    os.sched_setaffinity(0, cores)
    for number, limit in enumerate(limits):
        if resource.getrlimit(number) != tuple(limit):
            resource.setrlimit(number, limit)
    for number in ignored:  # as a shell starts what runs in the background
        signal.signal(number, signal.SIG_IGN)
    sys.executable = program
    tempfile.tempdir = None
    filters = [text for text in environment.get("PYTHONWARNINGS", "").split(",") if text]
    is_unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    while words[0] in ("-u", "-W"):
        if words[0] == "-W":
            filters.append(words[1])
            words = words[1:]
        is_unbuffered |= words[0] == "-u"
        words = words[1:]
    sys.warnoptions[:] = filters
    own = next(entry for entry in warnings.filters if entry[:2] == ("ignore", None) and entry[2] is Warning)
    warnings.filters.remove(own)  # of this process, which is started with `-W ignore`
    warnings._processoptions(filters)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty(), write_through=is_unbuffered)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # from the system, as in a new interpreter
    paths = [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = {"-c": "", "-m": os.getcwd()}.get(words[0], os.path.dirname(os.path.realpath(words[0])))
    sys.path[:] = [first, *paths, *sys.path]
    importlib.invalidate_caches()
    return words


def _run(words: list[str]) -> None:
    """What the interpreter does with ``-c CODE``, ``-m MODULE`` or ``SCRIPT``, and with the arguments behind."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])
        return
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv[:] = words
        main.__dict__["__file__"] = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    exec(code, main.__dict__)


def _serve() -> list[str]:
    """Imports, then forks; returns in the forks alone, with what they are to run."""
    listening, program, modules = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3:]
    listening.set_inheritable(False)
    sys.path.pop(0)  # this file's folder
    for name in modules:
        importlib.import_module(name)
    runpy.run_path(str(Path(__file__).with_name("gloo_device.py")))["share_gloo_device"]()
    gc.collect()
    gc.freeze()
    return _become(program, *_Forks(listening).next_command())


if __name__ == "__main__":
    _run(_serve())
