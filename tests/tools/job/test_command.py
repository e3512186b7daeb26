"""A training command in every way that users have it: words, pasted text, files of arguments, launch scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.job.command import read_command

ROOT = Path(__file__).parents[3]
SIZES = ["--num-layers", "8", "--hidden-size", "4096"]
PASTED = """CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 4 --nnodes=2 \\
    pretrain_gpt.py \\
    --num-layers 8 \\  
    --hidden-size 4096
"""  # noqa: W291 (a space after the backslash, as pasted commands have it)


@pytest.mark.parametrize(
    "words",
    [
        SIZES,
        ["pretrain_gpt.py", *SIZES],
        ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *SIZES],
        [PASTED],
        [" ".join(SIZES)],
        ['srun -N 2 bash -c "torchrun /opt/pretrain_gpt.py --num-layers 8 --hidden-size 4096"'],
    ],
)
def test_launchers_paths_and_backslashes_are_passed_over(words: list[str]) -> None:
    assert read_command(words).arguments == SIZES


def test_what_follows_a_command_or_a_file_is_added() -> None:
    command = read_command([PASTED, "--bf16"])
    assert command.arguments == [*SIZES, "--bf16"] and command.script == "pretrain_gpt.py"
    assert command.sizes == {"gpus_per_node": 4, "nodes": 2}


def test_an_open_quotation_mark_is_one_sentence() -> None:
    with pytest.raises(SettingError, match="No closing quotation"):
        read_command(["pretrain_gpt.py --data-path 'x"])


def test_a_file_of_arguments_is_read() -> None:
    words = read_command([str(ROOT / "benchmarks/jobs/dense-70b-tp.txt")]).arguments
    assert "--tensor-model-parallel-size" in words


SCRIPT = """#!/bin/bash
set -euo pipefail
MODEL_SIZE=${MODEL_SIZE:-"8B"}
if [[ "$MODEL_SIZE" == "8B" ]]; then
    LAYERS=32
else
    LAYERS=80
fi
case $MODEL_SIZE in
  8B) HIDDEN=4096 ;;
  *) HIDDEN=8192 ;;
esac
ARGS=(
    --num-layers $LAYERS  # a comment
    --hidden-size $HIDDEN
    "--fp8-format hybrid"
)
ARGS+=(--load $1)
OTHER=" \\
    --seq-length 4096 \\
    --bf16"
if [ ! -f /nowhere/pretrain_gpt.py ]; then echo "no script"; exit 1; fi
mkdir -p $2/logs
touch TOUCHED
echo a > WRITTEN
rm -rf /nowhere
torchrun --nproc_per_node 8 --nnodes ${NNODES:-4} pretrain_gpt.py ${ARGS[@]} $OTHER > WRITTEN 2>&1 &
wait
"""


def test_a_launch_script_is_evaluated_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(SCRIPT)
    command = read_command(["train.sh", "--swiglu"])
    assert command.arguments == (
        "--num-layers 32 --hidden-size 4096 --fp8-format hybrid --load --seq-length 4096 --bf16 --swiglu".split()
    )
    assert command.sizes == {"gpus_per_node": 8, "nodes": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["train.sh"]  # nothing was written or removed
    assert "--load given" in " ".join(read_command(["bash", "train.sh", "given", "x", "--bf16"]).arguments)
    monkeypatch.setenv("MODEL_SIZE", "70B")
    assert read_command(["train.sh"]).arguments[:4] == ["--num-layers", "80", "--hidden-size", "8192"]


@pytest.mark.parametrize("monitor", ["", "while true; do nvidia-smi; done &\n"])
def test_a_command_in_the_background_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, monitor: str) -> None:
    monkeypatch.setattr("ditron_train.tools.job.command._EVALUATION_S", 2 if monitor else 20)
    prepare = "for i in {1..20000}; do X=$i; done; "  # bash is long through when this comes to its command
    (tmp_path / "train.sh").write_text(f"{monitor}( {prepare} python train.py --bf16 ) &\nwait $!\n")
    assert read_command([str(tmp_path / "train.sh")]).arguments == ["--bf16"]


@pytest.mark.parametrize(
    "line",
    [
        'source "${SCRIPT_DIR}/models/small.sh"',
        ". models/small.sh",
        'source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/models/small.sh"',
        "source $HERE/models/small.sh",
    ],
)
def test_what_a_launch_script_sources_from_its_folder_is_read(tmp_path: Path, line: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("source models/sizes.sh\nMODEL_ARGS=(--num-layers 2 $SIZES)\n")
    (tmp_path / "models" / "sizes.sh").write_text("SIZES='--hidden-size 64'\n")
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\n{line}\nsource elsewhere.sh\npython train.py ${{MODEL_ARGS[@]}} --bf16\n")
    assert read_command([str(script)]).arguments == ["--num-layers", "2", "--hidden-size", "64", "--bf16"]


def test_a_file_that_sources_itself_ends(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\nsource run.sh\npython train.py --bf16\n")
    assert read_command([str(script)]).arguments == ["--bf16"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("MODEL_ARGS=' --num-layers 8 '\n", "starts no Python script"),
        ("while true; do :; done\ntorchrun x.py --num-layers 1\n", "does not end"),
    ],
)
def test_a_script_without_a_command_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setattr("ditron_train.tools.job.command._EVALUATION_S", 2)
    (tmp_path / "train.sh").write_text(text)
    with pytest.raises(SettingError, match=says):
        read_command([str(tmp_path / "train.sh")])


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match="cannot read"):
        read_command([str(tmp_path / "binary.sh")])
