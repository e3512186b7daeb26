"""Pipeline messages by kernels and by put-with-signal, on CPU processes: what holds by copy engine holds there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_workers, run_workers_once

sys.path.insert(0, str(Path(__file__).parent))
import bodies_paths as bodies  # noqa: E402

on_path = bodies.on_path
PATHS = ["kernel", "nvshmem"]


@pytest.mark.parametrize("path", PATHS)
def test_ends_of_the_path_that_is_asked_for(path):
    channels, prefix = (
        (["NoneType", "NvshmemChannel"], "Nvshmem") if path == "nvshmem" else (["KernelChannel", "NoneType"], "")
    )
    expected = channels + [f"{prefix}Sender"] * 2 + [f"{prefix}Receiver"] * 2
    assert run_workers(2, on_path, path, "ends") == [(expected, False)] * 2
    assert run_workers(2, on_path, "nccl", "ends") == [(["NoneType"] * 6, False)] * 2


@pytest.mark.parametrize("path", PATHS)
def test_every_message_arrives_each_way(path):
    for world_size, num_slots, messages in ((2, 2, 200), (3, 1, 60)):
        results = run_workers(world_size, on_path, path, "ring", messages, num_slots, (33,), torch.float32, True)
        assert results == [2 * messages] * world_size


@pytest.mark.parametrize("path", PATHS)
def test_messages_of_several_fragments(path):
    assert run_workers(2, on_path, path, "ring", 2, 2, (3, 4 << 20), torch.bfloat16, False) == [4, 4]


@pytest.mark.parametrize("path", PATHS)
def test_sizes_and_addresses_of_all_kinds(path):
    assert run_workers(2, on_path, path, "every_size") == [True, True]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_slots", [1, 3])
def test_random_programs_with_prefetched_receives(path, num_slots):
    for seed in range(2):
        assert run_workers(2, on_path, path, "random_program", seed, num_slots) == [True] * 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_sender_is_never_more_than_the_slots_ahead_of_a_slow_neighbour(path, num_slots):
    (most, _), (_, right) = run_workers(2, on_path, path, "slow_neighbour", num_slots)
    assert right
    assert most == num_slots


@pytest.mark.parametrize("path", PATHS)
def test_counters_wrap(path):
    assert run_workers(2, on_path, path, "wrap_around") == [True, True]


@pytest.mark.parametrize("path", PATHS)
def test_a_dead_neighbour_becomes_an_error(path):
    outcomes = run_workers_once(2, on_path, path, "dead_neighbour", 0, 2, 3.0)
    assert outcomes[0].exit_code is not None
    assert outcomes[1].error is None, outcomes[1].traceback
    assert outcomes[1].value < 3 + 5


@pytest.mark.parametrize("path", PATHS)
def test_as_many_elements_in_another_shape_arrive_in_the_shape_that_is_asked_for(path):
    assert run_workers(2, on_path, path, "another_shape", 0) == [True] * 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case, words", [("size", "[8, 5] float32"), ("dtype", "[8, 4] int32")])
def test_neighbours_that_disagree_raise(path, case, words):
    outcomes = run_workers_once(2, on_path, path, "disagree", case)
    text = str(outcomes[1].value)
    assert text.startswith("MismatchError") and words in text and "rank 0 sent [8, 4] float32" in text


@pytest.mark.parametrize(
    "path, with_network", [("kernel", False), ("kernel", True), ("nvshmem", True), ("nccl", True)]
)
def test_shapes_that_only_the_sender_knows(path, with_network):
    num_bytes = 200 if with_network else 2000  # with a network, for what is larger than a slot, too
    assert run_workers(2, on_path, path, "variable", [1, 50, 7, 0, 3], with_network, num_bytes) == [True] * 2


@pytest.mark.parametrize("path", ["auto", "kernel"])
def test_a_second_context_finds_no_flags_of_the_first(path):
    assert run_workers(2, on_path, path, "flags_of_a_second_context") == [(20, [0] * 4)] * 2


@pytest.mark.parametrize("near, name", [("auto", "PipelineChannel"), ("kernel", "KernelChannel")])
def test_two_nodes_on_one_machine(near, name):
    results = run_workers(4, bodies.mixed_nodes, near)
    assert [right for right, _ in results] == [True] * 4
    assert [names for _, names in results] == [[name, "NvshmemChannel"], ["NvshmemChannel", name]] * 2


def test_ranks_that_ask_for_different_paths_are_told_so():
    logged = run_workers(2, bodies.different_paths)
    assert logged[0] == logged[1] and logged[0].startswith("SettingError: ranks differ in DITRON_PP_PATH")
