"""The scripts of ``examples/megatron`` for several nodes, on simulated ones: a pair of torchrun agents, Slurm's
job."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.nodes import unsupported_reason_nodes
from tests.support.patience import HANG_S

pytestmark = pytest.mark.usefixtures("warm_python")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
told = [None] * dist.get_world_size()
shared = [os.environ[name] for name in ("DITRON_PLAN", "DITRON_POSTMORTEM", "DITRON_POLICY", "NCCL_ALGO")]
is_launched = "ditron_train.megatron.plugin.arguments" in sys.modules
dist.all_gather_object(told, (os.uname().nodename, os.environ["GROUP_RANK"], shared, is_launched, sys.argv[1:]))
if dist.get_rank() == 0:
    open(os.path.join(os.path.dirname(__file__), "told"), "w").write(repr(told))
dist.destroy_process_group()
"""


@pytest.fixture
def nodes():
    if unsupported_reason_nodes() is not None:
        pytest.skip(unsupported_reason_nodes())
    spec = importlib.util.spec_from_file_location(
        "simulated_nodes_of_examples", ROOT / "tests" / "nodes" / "simulated_nodes.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.SimulatedNodes(2, 1000) as simulated:
        yield simulated


def _environment(tmp_path, **more):
    own = {"SHARED": str(tmp_path / "shared"), "GPUS_PER_NODE": "2", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DITRON_", "NCCL_"))}
    return {**kept, **own, **more}


def _check(tmp_path):
    shared = [str(tmp_path / "shared" / "plan.json"), str(tmp_path / "shared" / "postmortem"), "strict", "Ring"]
    places = [(f"simulated{node}", str(node)) for node in (0, 0, 1, 1)]
    assert (tmp_path / "told").read_text() == repr([(*place, shared, True, ["--steps", "2"]) for place in places])


def test_pair_of_agents(nodes, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    agents = []
    for node in range(2):
        more = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "simulated0", **nodes.environment(node)}
        command = ["bash", str(ROOT / "examples/megatron/node.sh"), str(tmp_path / "script.py"), "--steps", "2"]
        agents.append(subprocess.Popen([*nodes.command(node), *command], env=_environment(tmp_path, **more)))
    assert [agent.wait(timeout=HANG_S) for agent in agents] == [0, 0]
    _check(tmp_path)


def test_first_run_on_two_machines(nodes, tmp_path, monkeypatch):
    """Verify on each node, the bench over both, and an archive on each."""
    monkeypatch.chdir(tmp_path)
    agents = []
    for node in range(2):
        few = {"VERIFY": "--row 8 8 8 --repetitions 1 --warmup 0", "GPUS_PER_NODE": "2", "TRITON_INTERPRET": "1"}
        few |= {"BENCH": "--divide 4 --repetitions 1 --warmup 0 --part pp"}
        more = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "simulated0", **nodes.environment(node), **few}
        command = ["bash", str(ROOT / "examples/megatron/first_run.sh")]
        agents.append(subprocess.Popen([*nodes.command(node), *command], env=_environment(tmp_path, **more)))
    assert [agent.wait(timeout=HANG_S) for agent in agents] == [0, 0]
    for node in range(2):
        with zipfile.ZipFile(tmp_path / f"first_run-{node}.zip") as archive:
            names = {Path(name).name for name in archive.namelist()}
        assert {"doctor.txt", "verify.log", "nodes.log", "verify.json"} <= names
        assert ("nodes.json" in names) == (node == 0)  # rank 0 writes it


def test_job_of_slurm(nodes, tmp_path, monkeypatch):
    """Slurm's two commands are simulated: ``scontrol`` names the nodes, ``srun`` starts its command on each."""
    (tmp_path / "script.py").write_text(SCRIPT)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\nprintf 'simulated0\\nsimulated1\\n'\n")
    lines = ["#!/bin/bash", "shift"]  # its option
    for node in range(2):
        named = [f"{name}={value}" for name, value in {**nodes.environment(node), "SLURM_NODEID": node}.items()]
        lines.append(f'{shlex.join(["env", *named, *nodes.command(node)])} "$@" & started[{node}]=$!')
    lines.append("wait ${started[0]} && wait ${started[1]}")
    (tools / "srun").write_text("\n".join(lines) + "\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "simulated[0-1]", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/"}
    monkeypatch.chdir(ROOT)  # where nodes run what they are told
    environment = _environment(tmp_path, **slurm, PATH=f"{tools}:{os.environ['PATH']}")
    command = ["bash", "examples/megatron/several_nodes.slurm", str(tmp_path / "script.py"), "--steps", "2"]
    assert subprocess.run(command, env=environment, cwd=ROOT, timeout=HANG_S).returncode == 0
    _check(tmp_path)
