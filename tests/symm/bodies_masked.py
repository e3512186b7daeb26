"""What workers do for `test_masked`: GPUs are simulated, by what torch says of them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError
from ditron_train.symm.transport_choice import select_transport

_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def said_of(gpus: list[tuple[int, str]], variable: str | None = None) -> tuple[str, str | None]:
    """The error, and the variable afterwards; ``gpus``: ordinal and UUID of each rank's."""
    ordinal, uuid = gpus[dist.get_rank()]
    properties = mock.patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    with properties, mock.patch.dict(os.environ, {} if variable is None else {_VARIABLE: variable}):
        try:
            select_transport(dist.group.WORLD, torch.device("cuda", ordinal), "torch")
        except ArenaError as error:
            return str(error), os.environ.get(_VARIABLE)
        return "", os.environ.get(_VARIABLE)


def copies_by_engine(gpus: list[tuple[int, str]]) -> bool:
    """Whether copies between these GPUs leave the multiprocessors alone."""
    ordinal, uuid = gpus[dist.get_rank()]
    with mock.patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=uuid)):
        with mock.patch.dict(os.environ):
            return select_transport(dist.group.WORLD, torch.device("cuda", ordinal), "torch").copies_by_engine


def masked_then_shared() -> list[tuple[str, str | None]]:
    """What is accepted for one group is not for the next."""
    return [said_of([(0, "a"), (0, "b")]), said_of([(0, "a"), (0, "a")])]
