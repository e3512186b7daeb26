"""One process that has imported torch, triton and megatron-core, and the workers that are forked from it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.megatron_version import is_newer_than_0_17

#: What every worker finds in its environment.
FIXED_ENV = {
    "PYTHONUNBUFFERED": "1",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


#: Libraries of other people that are imported once for all workers, if they are imported here. Torch's compiler, which
#: takes 5 s, is what ``torch.use_deterministic_algorithms`` imports.
_SHARED = ("megatron.core", "pytest", "torch._dynamo", "torch._inductor")
#: What nearly every worker of a test with megatron-core imports in its first call, with what these import.
_WITH_MEGATRON = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "ditron_train.megatron.det.embedding",
    "ditron_train.megatron.det.first_step",
    "ditron_train.megatron.ep.dispatcher",
    "ditron_train.megatron.ep.spec",
    "ditron_train.megatron.loss.cross_entropy",
    "ditron_train.megatron.pp.communicator",
    "ditron_train.megatron.plugin.rank_agreement",
    "ditron_train.megatron.sp.attention",
    "ditron_train.megatron.sp.spec",
    "ditron_train.megatron.tp.spec",
    "ditron_train.megatron.wgrad.stand_in",
)
# Importing these settles whether emerging_optimizers is there, which tests have to choose; since 0.18 all of
# megatron-core does.
_SETTLES = ("ditron_train.megatron.muon.", "ditron_train.megatron.compat.muon.")
if is_newer_than_0_17():
    _SETTLES = ("megatron.", "ditron_train.megatron.")


def search_path() -> list[str]:
    """Where a worker looks for modules: where this process does."""
    return [entry or os.getcwd() for entry in sys.path]


class _Template:
    """The process that workers are forked from (`tests.support.worker`); started by the first of them.

    It imports what this process has imported of ``ditron_train``, and of ``_SHARED``.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        modules = [name for name in sys.modules if name in _SHARED or name.startswith("ditron_train.")]
        if "megatron.core" in modules:
            modules += _WITH_MEGATRON
        modules = [name for name in modules if not f"{name}.".startswith(_SETTLES)]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.worker", str(theirs.fileno()), *modules],
            env={**os.environ, **FIXED_ENV, "PYTHONPATH": os.pathsep.join(search_path())},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked for workers."""
        return self._process.poll() is None

    def ask(self, message: tuple, descriptors: Sequence[int] = ()) -> Any:
        """Its answer to one message. Threads take turns, as several pools of workers may be used at once."""
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(message)], descriptors)
            answer = self._socket.recv(1 << 12)
        if not answer:
            raise RuntimeError("the process that workers are forked from has ended")
        return pickle.loads(answer)

    def close(self) -> None:
        """End it, by the end of its socket; its workers end with it."""
        self._socket.close()
        self._process.wait()


_template: _Template | None = None


def _get_template() -> _Template:
    global _template
    if _template is None or not _template.is_alive:
        _template = _Template()
    return _template


def close_template() -> None:
    """End the process that workers are forked from, if there is one; the next worker starts another."""
    global _template
    if _template is not None:
        _template.close()
        _template = None


class ForkedProcess:
    """A worker's process, as far as ``subprocess.Popen`` is used of it."""

    def __init__(self, environment: Mapping[str, str], pipe: int, log: int) -> None:
        self._template = _get_template()
        self.pid: int = self._template.ask((dict(environment), search_path()), (pipe, log))
        self.returncode: int | None = None

    def poll(self, wait: bool = False) -> int | None:
        """Its exit status, reaped if it has ended; None while it runs."""
        if self.returncode is None:
            self.returncode = self._template.ask((self.pid, wait)) if self._template.is_alive else -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self.poll(wait=True)
