"""Balance by property; sharded and tensor-parallel steps on gloo ranks."""

from __future__ import annotations

import importlib
import pathlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditron_train.optim import newton_schulz_cost, shard_by_cost
from tests.support.processes import run_workers, run_workers_once

sys.path.insert(0, str(pathlib.Path(__file__).parent))
workers = importlib.import_module("optim_workers")


@given(st.lists(st.floats(0, 1e12), max_size=60), st.integers(1, 9))
def test_everything_is_dealt_out_once_and_no_rank_has_much_more_than_the_mean(costs, num_ranks):
    shards = shard_by_cost(costs, num_ranks)
    assert sorted(index for shard in shards for index in shard) == list(range(len(costs)))
    loads = [sum(costs[index] for index in shard) for shard in shards]
    assert max(loads) <= (sum(costs) / num_ranks + max(costs, default=0)) * (1 + 1e-9)
    assert all(costs[a] >= costs[b] for shard in shards for a, b in zip(shard, shard[1:]))


def test_a_layer_of_a_llama_8b_like_model_is_balanced():
    layer = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] * 32
    costs = [newton_schulz_cost(*shape) for shape in layer]
    loads = [sum(costs[i] for i in shard) for shard in shard_by_cost(costs, 8)]
    assert max(loads) < 1.02 * sum(loads) / 8


def test_cost_grows_with_the_work_and_not_with_the_orientation():
    assert newton_schulz_cost(4096, 11008) == newton_schulz_cost(11008, 4096)
    assert newton_schulz_cost(4096, 4096) < newton_schulz_cost(4096, 11008) < newton_schulz_cost(8192, 8192)
    with pytest.raises(ValueError):
        shard_by_cost([1.0], 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_steps_equal_unsharded_ones_and_momentum_lives_on_one_rank(world_size):
    owned = run_workers(world_size, workers.sharded_equals_whole, 3)
    assert sorted(index for own in owned for index in own) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_each_rank_resumes_from_its_own_state():
    assert run_workers(2, workers.resumed_from, None) == [(True, True, [])] * 2


def test_a_rank_that_resumes_from_the_state_of_another_warns():
    first, second = run_workers(2, workers.resumed_from, 0)
    assert first[2] == [] and not first[0] and not second[0]
    (line,) = second[2]
    assert "matrices of rank 1 begin without momentum" in line


def test_copies_of_a_sharded_optimizer_have_its_process_group():
    assert run_workers(2, workers.copies_have_the_same_process_group) == [True, True]


def test_a_missing_gradient_does_not_hang():
    assert run_workers(2, workers.missing_gradient_does_not_hang) == [True, True]


def test_an_error_on_one_rank_leaves_no_other_with_old_values():
    outcomes = run_workers_once(2, workers.error_on_one_rank, timeout_s=60)
    assert outcomes[0].exit_code == 7 and outcomes[1].error is not None and not outcomes[1].timed_out


@pytest.mark.parametrize("dim", [0, 1])
def test_duplicated_mode_gives_the_shard_of_the_whole_step(dim):
    assert run_workers(2, workers.duplicated_equals_unsharded, dim) == [(True, False), (True, False)]


def test_parameters_that_fsdp_shards_take_adamw_alone():
    """Kernels cannot read them: their data is in a tensor inside."""
    words = "a parameter is a DTensor, as fully_shard makes them"
    assert run_workers(2, workers.sharded_parameters_are_refused) == [(words, True)] * 2
