"""The examples run as they stand, on CPU processes; ``quickstart.py`` has tests of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

pytest.importorskip("megatron.core")

EXAMPLES = Path("examples") / "megatron"
# What Megatron-LM's repository has beside its wheel, as far as the script touches it.
_STAND_INS = {
    "megatron/training/__init__.py": """
import argparse

def get_args():
    return args

def pretrain(datasets, model_provider, model_type, forward_step, extra_args_provider, **options):
    global args
    args = extra_args_provider(argparse.ArgumentParser()).parse_args()
    model = model_provider(pre_process=True, post_process=True)
    print("PRETRAIN", args.ditron, model, datasets.is_distributed, sorted(options))
""",
    "gpt_builders.py": "def gpt_builder(): pass",
    "model_provider.py": """
def model_provider(builder, pre_process, post_process):
    from ditron_train.megatron import active_features
    return builder.__name__, active_features()
""",
    "pretrain_gpt.py": """
def forward_step(): pass
def get_embedding_ranks(): pass
def train_valid_test_datasets_provider(): pass
""",
}


def _run(*words: str | Path, **variables: str) -> str:
    path = os.pathsep.join([os.getcwd(), *(variables.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", ""))])
    env = dict(
        os.environ,
        PYTHONPATH=path,
        OMP_NUM_THREADS="1",
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo",
    )
    done = subprocess.run(
        [str(word) for word in words], env={**env, **variables}, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_a_spec_rewritten_by_one_call() -> None:
    output = _run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        EXAMPLES / "spec_example.py",
    )
    native, ours = map(float, re.search(r"loss: native ([\d.]+), with ditron_train ([\d.]+)", output).groups())
    assert 1 < native < 10 and abs(native - ours) < 1e-4


def test_two_agents_as_two_nodes(tmp_path: Path) -> None:
    small = "--layers 1 --hidden 64 --sequence 16 --batch 1 --steps 1".split()
    output = _run(
        "bash",
        EXAMPLES / "two_nodes.sh",
        *small,
        "--out",
        tmp_path / "out",
        PYTHON=sys.executable,
        MASTER_PORT="29547",
    )
    assert "largest difference of a loss" in output and (tmp_path / "out" / "losses.json").exists()


def test_two_lines_in_a_script_of_ones_own(tmp_path: Path) -> None:
    for name, text in _STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    output = _run(sys.executable, EXAMPLES / "pretrain_gpt_two_lines.py", "--ditron", "tp", PYTHONPATH=str(tmp_path))
    assert "PRETRAIN ('tp',) ('gpt_builder', ('tp',)) True ['args_defaults', 'get_embedding_ranks']" in output
