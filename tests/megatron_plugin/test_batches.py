"""Numbers of a microbatch, told by hosts: a function as Megatron-LM's, whose GPU is a device that nobody can read."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.model_parallel import destroy_groups
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


def _started(utils: ModuleType) -> mock._patch_dict:
    """With ``utils`` as Megatron-LM's module, on a machine that says that it has GPUs."""
    return mock.patch.dict(sys.modules, {"megatron.training.utils": utils})


def _told(is_newer: bool) -> list[tuple[list[int], int, tuple[int, ...], str]]:
    """What each of three calls gives; the group is made where Megatron makes its own."""
    from megatron.core import parallel_state

    from ditron_train.megatron.plugin import batches, job_start, patching
    from tests.support.model_parallel import model_parallel

    utils, backends = _utils(is_newer), []
    make_group = batches.make_group

    def noted(*args, backend, **options):
        backends.append(backend)
        return make_group(*args, backend=backend, **options)

    try:
        with _started(utils), mock.patch("torch.cuda.is_available", lambda: True):
            with mock.patch.object(batches, "make_group", noted), mock.patch.object(job_start, "_is_needed", bool):
                with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
                    job_start.announce(["tp"])
                    job_start.rendezvous()
                    with mock.patch("torch.cuda.synchronize", lambda: None):
                        parallel_state.update_pg_timeout(timedelta(seconds=77))
                    for host_group in batches._host_groups.values():
                        assert host_group()._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
                    data = iter([(torch.full((2, 8), step), 3 * step) for step in range(3)])
                    found = [utils.get_batch_on_this_tp_rank(data if dist.get_rank() == 0 else None) for _ in range(3)]
        assert backends == ["gloo"] * (dist.get_world_size() > 1)
    finally:
        patching.undo_all()
        job_start.stop()
        destroy_groups()
    return [(one["tokens"].tolist()[0][:2], one["packed"], tuple(one["lengths"].shape), one["lengths"].device.type)
            for one in found]  # fmt: skip


@pytest.mark.parametrize("is_newer", [False, True], ids=["number", "one_element"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_numbers_come_from_the_first_ranks_host(ranks, is_newer):
    wanted = [([step, step], 3 * step, (3 * step,), "meta") for step in range(3)]
    assert run_workers(ranks, _told, is_newer) == [wanted] * ranks


def _refused() -> tuple[list[str], bool]:
    from ditron_train.megatron.plugin import batches, patching
    from ditron_train.runtime.logs import decisions, forget_decisions
    from tests.support.model_parallel import model_parallel

    def make_group(*args, **options):
        if dist.get_rank() == 1:
            raise RuntimeError("no address")

    utils = _utils()
    native = utils.get_batch_on_this_tp_rank
    forget_decisions()
    try:
        with _started(utils), mock.patch("torch.cuda.is_available", lambda: True):
            with model_parallel(tensor_model_parallel_size=2), mock.patch.object(batches, "make_group", make_group):
                batches.start()
                is_native = utils.get_batch_on_this_tp_rank is native
    finally:
        patching.undo_all()
        batches.stop()
        destroy_groups()
    return decisions(), is_native


def test_hosts_that_cannot_meet_leave_it_to_megatron():
    words = "batch numbers: native, a group of hosts failed on 1 of 2 ranks: rank 1: RuntimeError: no address"
    assert run_workers(2, _refused) == [([words], True)] * 2


@pytest.mark.parametrize("option", ["hybrid_context_parallel", "dynamic_context_parallel"])
def test_what_is_uneven_is_megatrons(option):
    from ditron_train.megatron.plugin import batches

    utils = _utils(**{option: True})
    exec("def get_batch():\n    return get_args(), torch", vars(utils))
    assert batches.told_by_hosts(utils.get_batch)() == (utils.ARGS, torch)


def test_numbers_that_are_returned_lie_where_megatron_has_them(monkeypatch):
    from ditron_train.megatron.plugin import batches

    utils = _utils()
    exec(
        """def get_batch():
    number = torch.empty((), dtype=torch.int64, device="meta").fill_(3)
    return {"number": number, "read": int(number.item()), "tokens": torch.zeros(2, 8, dtype=torch.int64)}""",
        vars(utils),
    )
    monkeypatch.setattr(batches, "current_device", lambda: torch.device("meta"))
    monkeypatch.setattr(batches.parallel_state, "get_tensor_model_parallel_group", lambda: SimpleNamespace(size=int))
    found = batches.told_by_hosts(utils.get_batch)()
    assert found["read"] == 3 and found["number"].device.type == "meta" and found["tokens"].device.type == "cpu"


@pytest.mark.parametrize(
    "call, is_moved",
    [
        (lambda torch: torch.tensor(3, dtype=torch.int64, device="meta"), True),
        (lambda torch: torch.tensor(3, dtype=torch.int32, device="meta"), False),
        (lambda torch: torch.empty((), dtype=torch.int64, device="meta"), True),
        (lambda torch: torch.empty(1, dtype=torch.int64, device="meta"), True),
        (lambda torch: torch.empty(size=(1,), dtype=torch.int64, device="meta"), True),
        (lambda torch: torch.empty(size=(2, 8), dtype=torch.int64, device="meta"), False),
        (lambda torch: torch.empty(0, dtype=torch.int64, device="meta"), False),
        (lambda torch: torch.empty(1, 1, dtype=torch.int64, device="meta"), False),
        (lambda torch: torch.empty(1, dtype=torch.int32, device="meta"), False),
    ],
)
def test_which_numbers_hosts_tell(call, is_moved):
    from ditron_train.megatron.plugin import batches

    wanted, found = call(torch), call(batches._Torch())
    assert (found.device.type == "cpu") is is_moved
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def _of_another_group() -> list[int]:
    from ditron_train.megatron.plugin import batches

    number = torch.tensor(7 * (1 - dist.get_rank()))
    with mock.patch.object(batches, "current_device", lambda: torch.device("cpu")):
        batches._Distributed().broadcast(number, 0, group=dist.group.WORLD)
    return number.tolist()


def test_a_number_of_another_group_goes_by_that_group():
    assert run_workers(2, _of_another_group) == [7, 7]


@pytest.mark.parametrize(
    "setting, has_gpu, is_fused", [("host", True, True), ("gpu", True, False), ("host", False, False)]
)
def test_names_are_bound_and_given_back(monkeypatch, setting, has_gpu, is_fused):
    from ditron_train.megatron.plugin import batches, patching

    utils, script = _utils(), ModuleType("__main__")
    native = script.get_batch_on_this_tp_rank = utils.get_batch_on_this_tp_rank
    monkeypatch.setenv("DITRON_BATCH_NUMBERS", setting)
    modules = {"megatron.training.utils": utils, "__main__": script}
    one_rank = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(batches.parallel_state, "get_tensor_model_parallel_group", lambda: one_rank)
    with mock.patch.dict(sys.modules, modules), mock.patch("torch.cuda.is_available", lambda: has_gpu):
        for _ in range(2):
            batches.start()
            fused = utils.get_batch_on_this_tp_rank
            assert (fused is not native) is is_fused and script.get_batch_on_this_tp_rank is fused
            assert not is_fused or fused.__wrapped__ is native
        patching.undo_all()
        batches.stop()
        assert utils.get_batch_on_this_tp_rank is native is script.get_batch_on_this_tp_rank


def test_groups_without_arguments_are_left_alone(monkeypatch):
    from ditron_train.megatron.plugin import batches

    utils = _utils()
    native, utils.ARGS = utils.get_batch_on_this_tp_rank, None
    exec("def get_args():\n    assert ARGS is not None, 'args is not initialized.'\n    return ARGS", vars(utils))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with _started(utils):
        batches.start()
    assert utils.get_batch_on_this_tp_rank is native


def test_a_process_without_the_training_loop_is_left_alone():
    from ditron_train.megatron.plugin import batches, patching

    with mock.patch.dict(sys.modules), mock.patch.object(patching, "replace_symbol") as replace:
        sys.modules.pop("megatron.training.utils", None)
        batches.start()
    assert not replace.called


def test_a_microbatch_begins_when_freed_memory_was_awaited(monkeypatch):
    from ditron_train.megatron.plugin import batches

    order: list[str] = []
    utils = ModuleType("megatron.training.utils")
    vars(utils).update(torch=torch, order=order, get_args=lambda: SimpleNamespace())
    exec("def get_batch():\n    get_args()\n    order.append('batch')\n    return {}", vars(utils))
    monkeypatch.setattr(batches, "await_freed_memory", lambda device: order.append("waited"))
    monkeypatch.setattr(batches, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        batches.parallel_state, "get_tensor_model_parallel_group", lambda: SimpleNamespace(size=lambda: 1)
    )
    batches.told_by_hosts(utils.get_batch)()
    assert order == ["waited", "batch"]
