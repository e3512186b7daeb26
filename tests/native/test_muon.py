"""``--ditron muon`` inside megatron-core, on gloo: dist_muon's weights equal muon's, and restoring brings native back."""

from __future__ import annotations

import importlib
import pathlib
import sys

import pytest

from ditron_train.testing.processes import run_workers

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
workers = importlib.import_module("muon_workers")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_experts, sharding", [(None, "native"), (None, "cost"), (4, "native"), (4, "auto")])
def test_layer_wise_sharding_gives_the_weights_of_the_whole_step(num_experts, sharding):
    results = run_workers(2, workers.muon_and_dist_muon_agree, 4, num_experts, sharding)
    for different, same_losses, losses, owned, num_params in results:
        assert not different and same_losses and len(set(losses)) == 4
        assert 0 < owned < num_params
    assert sum(owned for _, _, _, owned, _ in results) == results[0][-1]


@pytest.mark.timeout(400)
def test_with_clipping_the_weights_are_those_of_native_sharding():
    assert run_workers(2, workers.clipped_gradients_keep_native_ownership, 4) == [([], True), ([], True)]


@pytest.mark.timeout(400)
def test_restore_brings_native_back():
    for during, restored in run_workers(2, workers.restore_brings_native_back):
        assert during == ("DitronTensorParallelMuon", True) and restored
