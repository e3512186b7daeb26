"""Which errors of a backend blame a peer: those that say that it, or the connection to it, is gone or too late."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.errors import PeerTimeoutError
from ditron_train.symm.nodes import NodeGroups

_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
_NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, "
_SYSTEM = (
    f"{_NCCL}unhandled system error, NCCL version 2.28.9\nncclSystemError: System call (e.g. socket, malloc) or "
    "external library call failed or device error.\nLast error:\n"
)

LOST = {
    "gloo closed": RuntimeError(f"{_GLOO}pair.cc:547] Connection closed by peer [10.0.0.2]:4242"),
    "gloo reset": RuntimeError(f"{_GLOO}pair.cc:534] Read error [10.0.0.2]:4242: Connection reset by peer"),
    "gloo late": RuntimeError(
        f"{_GLOO}unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
    ),
    "gloo aborted": RuntimeError(f"{_GLOO}pair.cc:575] Application timeout caused pair closure"),
    "nccl remote": dist.DistBackendError(
        f"{_NCCL}remote process exited or there was a network error, NCCL version 2.28.9\nncclRemoteError: A call "
        "failed possibly due to a network error or a remote process exiting prematurely."
    ),
    "nccl refused": dist.DistBackendError(f"{_SYSTEM}socketPollConnect: connect returned Connection refused"),
    "nccl late": dist.DistBackendError(
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600 s"
    ),
    "nccl aborted": dist.DistBackendError("NCCL communicator was aborted on rank 0."),
    "network": dist.DistNetworkError("failed to recv, got 0 bytes"),
    "store": dist.DistStoreError("wait timeout after 300000ms, keys: /2"),
}
OTHER = {
    "nccl usage": dist.DistBackendError(
        f"{_NCCL}invalid usage (run with NCCL_DEBUG=WARN for details)\nncclInvalidUsage: This usually reflects "
        "invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on device 1000"
    ),
    "nccl memory": dist.DistBackendError(
        f"{_NCCL}unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda "
        "failure 2 'out of memory'"
    ),
    "nccl shared memory": dist.DistBackendError(f"{_SYSTEM}Error while creating segment /dev/shm/nccl-1"),
    "nccl build": RuntimeError("Distributed package doesn't have NCCL built in"),
    "nccl types": RuntimeError("Input tensor data type is not supported for NCCL process group: ComplexHalf"),
    "cuda": RuntimeError("CUDA error: the launch timed out and was terminated"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB for a connection"),
    "code": RuntimeError("a socket of our own code, connection included"),
    "gloo code": RuntimeError("ProcessGroupGloo::alltoall: invalid tensor size at index 1"),
}  # fmt: skip


def _raised_for(error: Exception, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    nodes: Any = object.__new__(NodeGroups)
    nodes.group, nodes._rank, nodes._error = SimpleNamespace(group_name="nodes"), 0, None
    asked: Callable[[float], int] = lambda deadline_s: 3  # noqa: E731
    nodes._roll_call = SimpleNamespace(missing_rank=asked)
    monkeypatch.setattr("ditron_train.symm.nodes.note_error", lambda *_: None)
    with pytest.raises(RuntimeError) as raised, nodes.naming("an exchange"):
        raise error
    return raised.value


@pytest.mark.parametrize("name", LOST)
def test_a_lost_peer_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = _raised_for(LOST[name], monkeypatch)
    assert isinstance(raised, PeerTimeoutError) and raised.missing_rank == 3 and raised.__cause__ is LOST[name]


@pytest.mark.parametrize("name", OTHER)
def test_another_error_blames_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _raised_for(OTHER[name], monkeypatch) is OTHER[name]
