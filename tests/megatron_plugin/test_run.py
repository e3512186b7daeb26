"""The launcher runs an unedited script: flags in its help, features on once its arguments are parsed, clear errors.

A small stand-in for ``megatron.training`` (which is not in the wheel) is put beside the script; megatron-core is the
real one.
"""

import os
import runpy
import subprocess
import sys

import pytest

from ditron_train.runtime.errors import SettingError
from tests.support.patience import HANG_S
from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")
from ditron_train.megatron.run import main  # noqa: E402

ARGUMENTS = """
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
"""

SCRIPT = """
import sys
import helper_beside_the_script
from megatron.training.arguments import parse_args

if __name__ == "__main__":
    args = parse_args(extra_args_provider=lambda parser: parser)
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from ditron_train.megatron import active_features
    from ditron_train.megatron.plugin.patching import is_redirected
    is_script = sys.argv[0].endswith("train.py")
    print("RESULT", args.num_layers, active_features(), is_redirected(ColumnParallelLinear), is_script)
"""

TWO_LINES = """
from megatron import training
from megatron.training.arguments import parse_args
from ditron_train.megatron import active_features, add_ditron_args, wrap_model_provider

args = parse_args(extra_args_provider=add_ditron_args)
training.get_args = lambda: args
print("RESULT", args.num_layers, wrap_model_provider(active_features)())
"""


@pytest.fixture
def script(megatron_training, tmp_path):
    (tmp_path / "helper_beside_the_script.py").write_text("")
    return megatron_training(SCRIPT, arguments=ARGUMENTS)


def _launch(words):
    try:
        main(words)
    except SystemExit as stopped:
        return stopped.code
    return 0


def _run_alone(script, *words):
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _run(*words):
    """Exit status of the launcher in a process of its own that has megatron-core imported already."""
    (outcome,) = run_workers_once(1, _launch, list(map(str, words)))
    assert outcome.error is None, outcome.traceback
    return outcome.value


def test_as_torchrun_starts_it(script, tmp_path):
    env = dict(
        os.environ, PYTHONPATH=os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]), TRITON_INTERPRET="1"
    )
    command = [sys.executable, "-W", "ignore", "-m", "ditron_train.megatron.run"]
    words = [script, "--num-layers", "3", "--ditron", "tp", "--ditron-timeout-s", "5"]
    done = subprocess.run([*command, *map(str, words)], env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert "RESULT 3 ('tp',) True True" in done.stdout
    assert "\nditron_train: tp: on for models built from now on" in "\n" + done.stderr
    done = subprocess.run(
        [*command, str(tmp_path / "missing.py")], env=env, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 2 and done.stderr == f"error: cannot read the script {tmp_path / 'missing.py'}\n"


def test_without_the_flag_nothing_is_changed(script, capsys):
    assert _run(script, "--num-layers", 3) == 0
    assert "RESULT 3 () False True" in capsys.readouterr().out


def test_a_namespace_that_lost_the_command_line(script, capsys):
    assert _run(script, "--num-layers", 99, "--ditron", "tp") == 0
    assert "RESULT 99 ('tp',) True True" in capsys.readouterr().out


@pytest.mark.parametrize("layers", ["3", "99"])
def test_nor_do_two_lines_in_a_script_lose_it(layers, megatron_training, capsys):
    script = megatron_training(TWO_LINES, arguments=ARGUMENTS)
    (outcome,) = run_workers_once(1, _run_alone, script, "--num-layers", layers, "--ditron", "tp")
    assert outcome.error is None, outcome.traceback
    assert f"RESULT {layers} ('tp',)" in capsys.readouterr().out


def test_help_shows_the_group(script, capsys):
    assert _run(script, "--help") == 0
    logged = capsys.readouterr().out
    assert "--num-layers" in logged and "--ditron NAME[,NAME]" in logged and "--ditron-transport" in logged


def test_help_of_the_launcher_itself(capsys):
    main(["--help"])
    logged = capsys.readouterr().out
    assert (
        logged.startswith("usage: torchrun ... -m ditron_train.megatron.run SCRIPT.py")
        and "--ditron-plan FILE" in logged
    )


def test_unknown_names_are_an_error(script, capsys):
    assert _run(script, "--ditron", "tp,warp") == 2
    logged = " ".join(capsys.readouterr().out.replace("[rank 0]", "").split())
    assert "does not know 'warp'; it takes a comma-separated list of: tp" in logged


@pytest.mark.parametrize(
    "words, says", [(["missing.py"], "cannot read"), ([], "usage: torchrun"), (["--ditron", "tp"], "usage: torchrun")]
)
def test_a_script_that_cannot_be_read(words, says):
    with pytest.raises(SettingError, match=says):
        main(words)


_OTHER = """
import sys
print("RESULT", sys.argv[1:])
"""

_BUILDING = """
import sys
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from ditron_train.megatron.plugin.patching import is_redirected
MegatronModule(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True))
print("RESULT", sys.argv[1:], is_redirected(ColumnParallelLinear))
"""


def test_a_script_that_builds_no_model(tmp_path, capsys):
    path = tmp_path / "other.py"
    path.write_text(_OTHER)
    assert _run(path, "--lr", 3, "--ditron", "tp", "x", "--ditron-record=/nowhere", "--ditron-policy=bits") == 0
    logged = capsys.readouterr().out
    assert "RESULT ['--lr', '3', 'x']" in logged
    assert "built no model of Megatron's in this process: --ditron had no effect" in logged
    assert "is no script of Megatron-LM's: --ditron-record had no effect" in logged


def test_a_script_that_is_not_megatron_lm_s(tmp_path, capsys):
    """As those of Megatron-Bridge: it parses nothing of Megatron's, and the hook switches features on."""
    path = tmp_path / "other.py"
    path.write_text(_BUILDING)
    assert _run(path, "--ditron", "tp", "+model.x=1") == 0
    logged = capsys.readouterr().out
    assert "RESULT ['+model.x=1'] True" in logged and "no effect" not in logged
