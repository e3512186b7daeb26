"""NVSHMEM is started where Megatron makes its groups, which every rank does; with a stand-in for nvshmem4py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "symm"))
from bodies_nvshmem import CPU, error_of, stand_in  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402

pytest.importorskip("megatron.core")

SIZES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def _two_stages(early: bool, fails: str | None) -> str:
    """What each rank hears when its tensor parallel group first needs memory: the second stage with the first one's
    results."""
    import ditron_train.megatron as plugin
    from ditron_train.megatron.plugin import job_start as rendezvous
    from ditron_train.symm.nvshmem_transport import NvshmemTransport
    from tests.support.model_parallel import model_parallel

    with mock.patch.object(rendezvous, "_device", lambda: CPU), stand_in(fails=fails):
        if early:  # as the launcher does
            plugin.apply(features="tp", transport="nvshmem")
        with model_parallel(**SIZES):
            if not early:
                plugin.apply(features="tp", transport="nvshmem")
            assert (NvshmemTransport._instance is None) == (fails is not None)
            return _first_memory()


def _first_memory() -> str:
    from megatron.core import parallel_state

    group, rank, activation = parallel_state.get_tensor_model_parallel_group(), dist.get_rank(), torch.zeros(1)
    if parallel_state.is_pipeline_first_stage():
        words = error_of(group)
        dist.send(activation, rank + 2)
        return words
    dist.recv(activation, rank - 2)
    return error_of(group)


@pytest.mark.parametrize("early", [True, False])
def test_groups_of_a_pipelines_stages_need_not_meet(early: bool) -> None:
    assert run_workers(4, _two_stages, early, None) == ["no error"] * 4


def test_where_it_does_not_start_every_rank_goes_on_without_it() -> None:
    logged = run_workers(4, _two_stages, True, "import")
    assert len(set(logged)) == 1 and "loading NVSHMEM failed on 1 of 4 ranks: rank 1: " in logged[0]


def _is_it_started(nodes: list[str], environment: dict[str, str], features: str) -> bool:
    import ditron_train.megatron as plugin
    from ditron_train.megatron.plugin import job_start as rendezvous
    from ditron_train.symm.nvshmem_transport import NvshmemTransport
    from tests.support.model_parallel import model_parallel

    environment = {"LOCAL_WORLD_SIZE": str(4 // len(set(nodes))), **environment}
    with (
        mock.patch.object(rendezvous, "_device", lambda: CPU),
        mock.patch.object(rendezvous, "node_of_process", lambda: (nodes[dist.get_rank()],)),
        mock.patch.dict(os.environ, environment),
        stand_in(),
        model_parallel(**SIZES),
    ):
        plugin.apply(features=features)
        return NvshmemTransport._instance is not None


@pytest.mark.parametrize(
    "nodes, environment, features, expected",
    [
        ("aaaa", {}, "tp,pp", False),
        ("aabb", {}, "tp,pp", False),  # tensor parallel groups are inside nodes
        ("abab", {}, "tp", True),
        ("abab", {}, "pp", False),
        ("abab", {"DITRON_TRANSPORT": "torch"}, "tp", False),
        ("aaaa", {"DITRON_TRANSPORT": "nvshmem"}, "ep", True),
        ("aabb", {"DITRON_PP_PATH": "nvshmem"}, "pp", True),
        ("aabb", {"DITRON_PP_PATH": "nvshmem"}, "tp", False),
    ],
)
def test_it_is_started_where_a_group_will_need_it(
    nodes: str, environment: dict[str, str], features: str, expected: bool
) -> None:
    assert run_workers(4, _is_it_started, list(nodes), environment, features) == [expected] * 4


def test_megatron_that_was_made_to_run_on_the_cpu_needs_none():
    """Also where a stand-in says that there is a GPU, as Megatron-LM's own training loop wants it."""
    from ditron_train.cpu.megatron_shim import megatron_on_cpu
    from ditron_train.megatron.plugin import job_start as rendezvous

    with megatron_on_cpu(), mock.patch.object(torch.cuda, "is_available", lambda: True):
        assert rendezvous._device() is None
