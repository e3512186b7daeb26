"""Numbers of a microbatch, told by hosts: a function as Megatron-LM's, whose GPU is a device that nobody can read."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ditron_train.cpu.groups import destroy_groups
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")

UTILS = """
import torch
from megatron.core import parallel_state as mpu

def get_args():
    return ARGS

def count_of_hosts(number):
    return torch.empty(1, dtype=torch.int64, device="meta").fill_(number) if IS_NEWER else torch.tensor(
        number, dtype=torch.int64, device="meta")

def get_batch_on_this_tp_rank(data_iterator):
    args = get_args()
    group = mpu.get_tensor_model_parallel_group()

    def tell(item):
        torch.distributed.broadcast(item, mpu.get_tensor_model_parallel_src_rank(), group=group)

    if mpu.get_tensor_model_parallel_rank() == 0:
        tokens, packed = next(data_iterator)
        tell(tokens)
        tell(count_of_hosts(packed))
    else:
        tokens = torch.empty((2, 8), dtype=torch.int64)
        tell(tokens)
        count = torch.empty(1 if IS_NEWER else (), dtype=torch.int64, device="meta")
        tell(count)
        packed = int(count.item())
    lengths = torch.empty(packed, dtype=torch.int32, device="meta")
    return {"tokens": tokens, "packed": packed, "lengths": lengths}
"""


def _utils(is_newer: bool = False, **options: bool) -> ModuleType:
    module = ModuleType("megatron.training.utils")
    exec(UTILS, vars(module))
    vars(module).update(ARGS=SimpleNamespace(**options), IS_NEWER=is_newer)
    return module


def _told(is_newer: bool) -> list[tuple[list[int], int, tuple[int, ...], str]]:
    from ditron_train.cpu.megatron_shim import model_parallel
    from ditron_train.megatron.plugin import batches

    try:
        with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
            get_batch = batches.told_by_hosts(_utils(is_newer).get_batch_on_this_tp_rank)
            data = iter([(torch.full((2, 8), step), 3 * step) for step in range(3)])
            found = [get_batch(data if dist.get_rank() == 0 else None) for _ in range(3)]
            assert len(batches._host_groups) == (dist.get_world_size() > 1)
    finally:
        batches.stop()
        destroy_groups()
    return [(one["tokens"].tolist()[0][:2], one["packed"], tuple(one["lengths"].shape), one["lengths"].device.type)
            for one in found]  # fmt: skip


@pytest.mark.parametrize("is_newer", [False, True], ids=["number", "one_element"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_numbers_come_from_the_first_ranks_host(ranks, is_newer):
    wanted = [([step, step], 3 * step, (3 * step,), "meta") for step in range(3)]
    assert run_workers(ranks, _told, is_newer) == [wanted] * ranks


def _refused() -> tuple[list[str], int]:
    from ditron_train.cpu.megatron_shim import model_parallel
    from ditron_train.megatron.plugin import batches
    from ditron_train.runtime.logs import decisions, forget_decisions

    def make_group(*args, **options):
        if dist.get_rank() == 1:
            raise RuntimeError("no address")

    utils, calls = _utils(), []
    utils.native = lambda: calls.append("native") or {}
    forget_decisions()
    try:
        with model_parallel(tensor_model_parallel_size=2), mock.patch.object(batches, "make_group", make_group):
            exec("def get_batch():\n    return native()", vars(utils))
            get_batch = batches.told_by_hosts(utils.get_batch)
            assert [get_batch(), get_batch()] == [{}, {}]
    finally:
        batches.stop()
        destroy_groups()
    return decisions(), len(calls)


def test_hosts_that_cannot_meet_leave_it_to_megatron():
    words = "batch numbers: native, a group of hosts failed on 1 of 2 ranks: rank 1: RuntimeError: no address"
    assert run_workers(2, _refused) == [([words], 2)] * 2


def test_what_is_uneven_is_megatrons():
    from ditron_train.megatron.plugin import batches

    utils = _utils(hybrid_context_parallel=True)
    utils.mpu = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0)
    with pytest.raises(AttributeError, match="get_tensor_model_parallel_group"):  # by its own names
        batches.told_by_hosts(utils.get_batch_on_this_tp_rank)(iter([(torch.zeros(2, 8), 0)]))


@pytest.mark.parametrize(
    "setting, has_gpu, is_ours", [("host", True, True), ("gpu", True, False), ("host", False, False)]
)
def test_names_are_bound_and_given_back(monkeypatch, setting, has_gpu, is_ours):
    from ditron_train.megatron.plugin import batches, patching

    utils, script = _utils(), ModuleType("__main__")
    native = script.get_batch_on_this_tp_rank = utils.get_batch_on_this_tp_rank
    monkeypatch.setenv("DITRON_BATCH_NUMBERS", setting)
    modules = {"megatron.training.utils": utils, "__main__": script}
    with mock.patch.dict(sys.modules, modules), mock.patch("torch.cuda.is_available", lambda: has_gpu):
        for _ in range(2):
            batches.start()
            ours = utils.get_batch_on_this_tp_rank
            assert (ours is not native) is is_ours and script.get_batch_on_this_tp_rank is ours
            assert not is_ours or ours.__wrapped__ is native
        patching.undo_all()
        assert utils.get_batch_on_this_tp_rank is native is script.get_batch_on_this_tp_rank


def test_a_process_without_the_training_loop_is_left_alone():
    from ditron_train.megatron.plugin import batches, patching

    with mock.patch.dict(sys.modules), mock.patch.object(patching, "replace_symbol") as replace:
        sys.modules.pop("megatron.training.utils", None)
        batches.start()
    assert not replace.called
