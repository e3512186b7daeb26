"""Megatron-core's groups in a test without a GPU, and taking back the groups that a test has made."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch.distributed as dist

from ditron_train.cpu.megatron_shim import megatron_on_cpu, seed
from tests.support.small_tiles import two_chunks


@contextlib.contextmanager
def model_parallel(**sizes: int) -> Iterator[None]:
    """The shim, and megatron-core's groups of the given sizes; on exit everything of both is gone (collective).

    Args:
        sizes: Keywords of ``parallel_state.initialize_model_parallel``, for example ``tensor_model_parallel_size=2``.
    """
    from megatron.core import parallel_state

    import ditron_train.megatron
    from ditron_train.policy import gate
    from ditron_train.symm import close_all_arenas

    with megatron_on_cpu(), two_chunks():
        parallel_state.initialize_model_parallel(**sizes)
        seed(1234)
        try:
            yield
            dist.barrier()
            close_all_arenas()
        finally:
            ditron_train.megatron.restore()
            gate.forget("tp")
            destroy_groups()


def destroy_groups() -> bool:
    """Destroys every process group but the world's, and what megatron-core keeps of them if it is imported.

    Returns:
        Whether there were any.
    """
    if not _groups():
        return False
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()  # some of the groups go with it
    for group in _groups():
        dist.destroy_process_group(group)
    return True


def _groups() -> list[dist.ProcessGroup]:
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
