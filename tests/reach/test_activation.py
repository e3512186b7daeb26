"""``DITRON`` in the environment switches features on in programs that know nothing of this package."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ditron_train.hook import STARTUP
from tests.reach import bodies_activation as bodies
from tests.reach.models import LOSS_BOUND
from tests.support.patience import HANG_S
from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parent.parent.parent


def _values(body, *args, env=None):
    outcomes = run_workers_once(2, body, *args, env=env)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


@cache
def _native_losses(by_grid: bool) -> list[float]:
    ((is_fused, losses, lines), _) = _values(bodies.losses_of_an_unedited_program, by_grid)
    assert not is_fused and lines == []
    return losses


@pytest.mark.parametrize("by_grid", [False, True], ids=["parallel_state", "HyperCommGrid"])
def test_an_unedited_program(by_grid):
    found = _values(bodies.losses_of_an_unedited_program, by_grid, env={"DITRON": "tp"})
    for is_fused, losses, _ in found:
        assert is_fused and max(abs(a - b) for a, b in zip(losses, _native_losses(by_grid))) <= LOSS_BOUND
    logged = found[0][2]
    assert sum(": fused, " in line for line in logged) >= 5, logged


_PROGRAM = """
import sys, torch, torch.distributed as dist
torch.set_num_threads(1)
from ditron_train.cpu import interpreter, megatron_shim
interpreter.install(), megatron_shim.install()  # lets megatron-core run on a CPU; nothing else of the package
assert not [name for name in sys.modules if name.startswith("ditron_train.megatron.")]
dist.init_process_group("gloo")
from megatron.core.parallel_state import initialize_model_parallel
from tests.reach import models
initialize_model_parallel(tensor_model_parallel_size=2)
model = models.gpt()
# a file for each rank: torchrun runs unbuffered Python, which writes the parts of a line one by one
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as file:
    print(models.is_fused(model), models.train(model, 16), file=file)
dist.barrier()
"""


def test_a_job_of_torchrun_with_the_folder_on_its_path(tmp_path):
    """Nothing is edited: a program, torchrun, ``PYTHONPATH`` and ``DITRON``."""
    (tmp_path / "program.py").write_text(_PROGRAM)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([STARTUP, str(ROOT)]), "DITRON": "tp", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [tmp_path / "program.py", tmp_path]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert [is_fused for is_fused, _ in results] == ["True", "True"]
    assert abs(float(results[0][1]) - _native_losses(False)[1]) <= LOSS_BOUND


@pytest.mark.parametrize("values", [("tp", "tp,ep"), ("tp", None), (None, "ep")])
def test_ranks_that_differ(values):
    """The same error on all of them, names and all, also on those in which the variable is not set."""
    logged = _values(bodies.error_of_an_unedited_program, list(values))
    first, second = (",".join(sorted((value or "none").split(","))) for value in values)
    assert logged[0] == logged[1] and f"(or DITRON): {first} on rank 0, {second} on rank 1;" in logged[0]


def test_ranks_that_differ_with_a_grid():
    """They find out at the first model."""
    logged = _values(bodies.error_of_an_unedited_program, ["tp", "ep"], True)
    assert logged[0] == logged[1] and "(or DITRON): tp on rank 0, ep on rank 1;" in logged[0]


def test_an_unknown_feature():
    logged = _values(bodies.error_of_an_unedited_program, ["tp,warp"] * 2)
    assert logged[0] == logged[1] and logged[0].startswith("SettingError: DITRON does not know 'warp'; it takes")


def test_without_arguments():
    (outcome,) = run_workers_once(1, bodies.without_arguments)
    assert outcome.ok, outcome.traceback
    found = outcome.value
    for name, function in (("apply_args", "apply_args"), ("enable", "enable")):
        assert found[name] == ((), [f"{function}: neither --ditron nor DITRON names a feature: everything is native"])
    assert found["named"][0] == found["the arguments count more"][0] == ("tp",) and found["nobody named"] == ((), [])
    for name in ("apply_args by the environment", "apply as an init hook", "enable by the environment"):
        assert found[name][0] == ("tp", "ep")
    for version in ("0.15.0rc3", "0.16.0"):
        assert found[f"{version} by apply"] == ((), ["VersionError"])
        active, (line,) = found[f"{version} by DITRON"]
        assert active == () and line.startswith(f"everything is native: megatron-core {version} is outside")
    for version in ("0.16.0rc0", "0.20.0"):
        for way in ("apply", "DITRON"):
            assert found[f"{version} by {way}"][0] == ("tp",)
    assert any("megatron-core 0.16.0rc0" in line for line in found["0.16.0rc0 by DITRON"][1])


def test_children_that_are_forked_or_spawned():
    expected = _native_losses(False)[1]
    for losses, codes in _values(bodies.losses_around_children, env={"DITRON": "tp"}):
        assert codes == [0, 0] and abs(losses[0] - expected) <= LOSS_BOUND and losses[1] < losses[0]
