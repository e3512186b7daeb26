"""The launcher runs an unedited script: flags in its help, features on once its arguments are parsed, clear errors.

A small stand-in for ``megatron.training`` (which is not in the wheel) is put beside the script; megatron-core is the real one.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")

ARGUMENTS = '''
import argparse

def add_megatron_arguments(parser):
    parser.add_argument_group(title="model").add_argument("--num-layers", type=int)
    return parser

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_args()
    if args.num_layers == 99:  # as when Megatron loads a YAML file: what the command line said is lost
        return argparse.Namespace(num_layers=99)
    return args
'''

SCRIPT = '''
import sys
import helper_beside_the_script
from megatron.training.arguments import parse_args

if __name__ == "__main__":
    args = parse_args(extra_args_provider=lambda parser: parser)
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from ditron_train.megatron import active_features
    from ditron_train.megatron.patching import is_redirected
    print("RESULT", args.num_layers, active_features(), is_redirected(ColumnParallelLinear), sys.argv[0].endswith("train.py"))
'''


@pytest.fixture
def script(tmp_path):
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "arguments.py").write_text(ARGUMENTS)
    (tmp_path / "helper_beside_the_script.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _run(*words):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]), TRITON_INTERPRET="1")
    command = [sys.executable, "-W", "ignore", "-m", "ditron_train.megatron.run", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_features_are_on_once_arguments_are_parsed(script):
    done = _run(script, "--num-layers", 3, "--ditron", "tp", "--ditron-timeout-s", 5)
    assert done.returncode == 0, done.stderr
    assert "RESULT 3 ('tp',) True True" in done.stdout
    assert "tp: on for models built from now on" in done.stderr


def test_without_the_flag_nothing_is_changed(script):
    done = _run(script, "--num-layers", 3)
    assert "RESULT 3 () False True" in done.stdout, done.stderr


def test_a_namespace_that_lost_the_command_line(script):
    done = _run(script, "--num-layers", 99, "--ditron", "tp")
    assert "RESULT 99 ('tp',) True True" in done.stdout, done.stderr


def test_help_shows_the_group(script):
    done = _run(script, "--help")
    assert done.returncode == 0
    assert "--num-layers" in done.stdout and "--ditron NAME[,NAME]" in done.stdout and "--ditron-transport" in done.stdout


def test_unknown_names_are_an_error(script):
    done = _run(script, "--ditron", "tp,warp")
    assert done.returncode == 2
    assert "does not know 'warp'; it takes a comma-separated list of: tp" in done.stderr


def test_a_script_that_cannot_be_read(tmp_path):
    for words in ([tmp_path / "missing.py"], [], ["--ditron", "tp"]):
        done = _run(*words)
        assert done.returncode != 0
        assert "SettingError: cannot read the script" in done.stderr or "SettingError: usage: torchrun" in done.stderr


def test_a_script_that_never_parses(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("print('ran')")
    done = _run(path)
    assert done.returncode == 0 and "ran" in done.stdout
    assert "--ditron had no effect" in done.stderr
