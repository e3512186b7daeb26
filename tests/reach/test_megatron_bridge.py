"""Megatron-Bridge's own model provider on CPUs, unedited, switched on by ``DITRON``.

``MEGATRON_BRIDGE`` names a folder with its package (0.3 for megatron-core 0.16) and what that imports; without it
these tests are skipped.
"""

from __future__ import annotations

import os

import pytest

from tests.reach import bodies_bridge as bodies
from tests.reach.models import LOSS_BOUND
from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif("MEGATRON_BRIDGE" not in os.environ, reason="MEGATRON_BRIDGE names no folder")


def _values(*args, env=None):
    outcomes = run_workers_once(2, bodies.losses_of_a_provider, *args, env=env)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}], ids=["with sp", "without sp"])
def test_a_provider_s_model(options):
    native, fused = _values(options), _values(options, env={"DITRON": "tp"})
    for (was_fused, expected, _), (is_fused, losses, _) in zip(native, fused):
        assert not was_fused and is_fused
        bound = 0.0 if options else LOSS_BOUND  # without it products are torch's on both paths
        assert max(abs(a - b) for a, b in zip(losses, expected)) <= bound
    assert sum(": fused, " in line for line in fused[0][2]) >= (2 if options else 5)
