"""The examples run as they stand, on CPU processes; ``quickstart.py`` has tests of its own."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

pytest.importorskip("megatron.core")

EXAMPLES = Path("examples") / "megatron"
# Parameters of Megatron-LM's ``pretrain``, version by version.
_PRETRAIN = {
    "0.16.1, 0.17.1": "train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, "
    "process_non_loss_data_func=None, extra_args_provider=None, args_defaults={}, get_embedding_ranks=None, "
    "get_position_embedding_ranks=None, non_loss_data_func=None, store=None, inprocess_call_wrapper=None",
    "0.18.0, 0.18.2": "cfg_container, train_valid_test_dataset_provider, model_provider, model_type, "
    "forward_step_func, process_non_loss_data_func=None, get_embedding_ranks=None, "
    "get_position_embedding_ranks=None, non_loss_data_func=None, store=None, inprocess_call_wrapper=None",
    "0.19.0, 0.20.0": "cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, "
    "model_provider=None, process_non_loss_data_func=None, get_embedding_ranks=None, "
    "get_position_embedding_ranks=None, non_loss_data_func=None, store=None, inprocess_call_wrapper=None, "
    "p2p_communicator=None, pg_collection=None, skip_model_parallel_init=False",
}
# What Megatron-LM's repository has beside its wheel, as far as the script touches it.
_STAND_INS = {
    "megatron/training/__init__.py": """
def get_args():
    from megatron.training import arguments
    return arguments.args

def pretrain(PARAMETERS):
    if "cfg_container" not in locals():
        from megatron.training.arguments import parse_and_validate_args
        cfg_container = parse_and_validate_args(extra_args_provider, args_defaults=args_defaults)
    assert cfg_container is get_args() and model_type.name == "encoder_or_decoder"
    assert [forward_step_func.__name__, get_embedding_ranks.__name__] == ["forward_step", "get_embedding_ranks"]
    model = model_provider(pre_process=True, post_process=True)
    print("PRETRAIN", get_args().ditron, model, train_valid_test_dataset_provider.is_distributed)
""",
    "megatron/training/arguments.py": """
import argparse

def parse_and_validate_args(extra_args_provider=None, ignore_unknown_args=False, args_defaults={}):
    global args
    assert args_defaults == {"tokenizer_type": "GPT2BPETokenizer"}
    args = extra_args_provider(argparse.ArgumentParser()).parse_args()
    return args
""",
    "megatron/training/argument_utils.py": """
def pretrain_cfg_container_from_args(args, model_cfg=None):
    return args
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


@pytest.mark.usefixtures("warm_python")
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
    native, fused = map(float, re.search(r"loss: native ([\d.]+), with ditron_train ([\d.]+)", output).groups())
    assert 1 < native < 10 and native == fused


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
    assert "BITWISE IDENTICAL: 1 of 1 losses, 1 of 1 gradient norms; 5 fused calls" in output
    assert (tmp_path / "out" / "losses.json").exists()


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("versions", _PRETRAIN)
def test_two_lines_in_a_script_of_ones_own(tmp_path: Path, versions: str) -> None:
    for name, text in _STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("PARAMETERS", _PRETRAIN[versions]))
    output = _run(sys.executable, EXAMPLES / "pretrain_gpt_two_lines.py", "--ditron", "tp", PYTHONPATH=str(tmp_path))
    assert "PRETRAIN ('tp',) ('gpt_builder', ('tp',)) True" in output


@pytest.mark.skipif(not os.environ.get("MEGATRON_LM"), reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_the_parameters_are_those_of_the_checkout() -> None:
    training = Path(os.environ["MEGATRON_LM"]) / "megatron" / "training" / "training.py"
    tree = ast.parse(training.read_text(encoding="utf-8"))
    (arguments,) = (node.args for node in tree.body if getattr(node, "name", None) == "pretrain")
    for one in ast.walk(arguments):
        if isinstance(one, ast.arg):
            one.annotation = None
    assert ast.unparse(arguments) in _PRETRAIN.values()
