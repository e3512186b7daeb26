"""Where shared memory cannot be written, memory is refused on every rank alike, and training goes on without it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ditron_train.pp.channel import FAULT_MISMATCH
from ditron_train.pp.mailbox import Mailbox
from ditron_train.runtime.errors import ArenaError
from ditron_train.symm import SymmetricArena
from ditron_train.symm.shm_transport import FOLDER
from tests.support.processes import run_workers

CPU = torch.device("cpu")


@contextlib.contextmanager
def read_only_shared_memory() -> Iterator[None]:
    """As where /dev/shm is mounted read-only: files can neither be made nor removed, whether they are there or not."""
    native = os.open, os.unlink

    def refuse(path: object) -> None:
        if str(path).startswith(FOLDER):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def open_there(path, flags, *args, **kwargs):
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            refuse(path)
        return native[0](path, flags, *args, **kwargs)

    def unlink_there(path, *args, **kwargs):
        refuse(path)
        return native[1](path, *args, **kwargs)

    os.open, os.unlink = open_there, unlink_there
    try:
        yield
    finally:
        os.open, os.unlink = native


def _errors() -> list[str]:
    group, words = dist.new_group(list(range(dist.get_world_size()))), []
    with read_only_shared_memory():
        arena = SymmetricArena(group, CPU)
        for ask in (lambda: arena.tensor("test.x", (64,), torch.int32), lambda: Mailbox(group, CPU)):
            try:
                ask()
            except ArenaError as error:
                words.append(str(error))
    return words


def test_memory_and_mailboxes_are_refused_alike() -> None:
    words = run_workers(2, _errors)
    assert words[0] == words[1] and len(words[0]) == 2
    assert "failed on 2 of 2 ranks" in words[0][0] and "Read-only file system" in words[0][0]
    assert "failed on 1 of 2 ranks: rank 0" in words[0][1] and "Read-only file system" in words[0][1]


def _fault_is_posted() -> str:
    """The folder turns read-only after the mailbox was made: a failure is still heard by all ranks."""
    mailbox = Mailbox(dist.new_group(list(range(dist.get_world_size()))), CPU)
    if dist.get_rank() == 0:
        with read_only_shared_memory():
            mailbox.failure.post([FAULT_MISMATCH, 0], "the words")
    dist.barrier()
    return mailbox.failure.read()[1]


def test_a_fault_is_posted_where_nothing_can_be_claimed() -> None:
    assert run_workers(2, _fault_is_posted) == ["the words"] * 2


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _megatron_layer() -> tuple[bool, int]:
    """Whether a layer's result is Megatron's, and how many lines say why."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    import ditron_train.megatron as plugin
    from ditron_train.cpu.megatron_shim import CPU_CONFIG
    from tests.support.model_parallel import model_parallel

    handler, logger = _Lines(), logging.getLogger("ditron_train")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with model_parallel(tensor_model_parallel_size=2), read_only_shared_memory():
            config = TransformerConfig(
                num_layers=1, hidden_size=16, num_attention_heads=2, tensor_model_parallel_size=2,
                sequence_parallel=True, add_bias_linear=False, **CPU_CONFIG,
            )  # fmt: skip
            plugin.apply()
            layer = ColumnParallelLinear(16, 32, config=config, init_method=torch.nn.init.normal_, bias=False)
            for _ in range(3):
                y, _ = layer(torch.ones(2, 1, 16))
            return torch.equal(y, torch.ones(4, 1, 16) @ layer.weight.t()), sum(
                "Read-only" in w for w in handler.lines
            )
    finally:
        logger.removeHandler(handler)


def test_megatron_trains_on_with_one_line() -> None:
    pytest.importorskip("megatron.core")
    assert run_workers(2, _megatron_layer) == [(True, 1), (True, 0)]
