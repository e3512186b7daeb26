"""``compare`` on Megatron-LM's own training loop, where a checkout of it is at hand (it is in no wheel)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

MEGATRON_LM = os.environ.get("MEGATRON_LM")
pytestmark = pytest.mark.skipif(
    not MEGATRON_LM,
    reason="MEGATRON_LM names no checkout of Megatron-LM at tag core_v0.16.1, with its requirements installed",
)

SIZES = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 1e-3 --min-lr 1e-5 "
    "--lr-decay-iters 6 --vocab-size 64 --tokenizer-type NullTokenizer --mock-data --split 100,0,0 --num-workers 0 "
    "--eval-iters 0 --eval-interval 1000 --log-interval 1 --no-save-optim --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --use-mcore-models"
)
ON_CPU = (
    "--transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-persist-layer-norm --no-rope-fusion"
)


@pytest.mark.parametrize(
    "feature, options, status, says",
    [
        (
            "pp",
            "--pipeline-model-parallel-size 2 --use-distributed-optimizer",
            0,
            "equal: all 22 figures of 6 steps on 2 ranks",
        ),
        # Triton's interpreter rounds a GEMM's sums in another order than torch does on the CPU.
        ("tp", "--tensor-model-parallel-size 2 --sequence-parallel", 1, "DIFFERENT: "),
        # No layer is fused, but the numbers of a microbatch go from host to host.
        ("ep", "--tensor-model-parallel-size 2 --sequence-parallel", 0, "equal: all 28 figures of 6 steps on 2 ranks"),
    ],
    ids=["pp", "tp", "batches"],
)
def test_compare(tmp_path, feature, options, status, says):
    repository = Path(__file__).parents[2]
    script = shutil.copy(Path(__file__).with_name("megatron_lm_on_cpu.py"), tmp_path)
    path = os.pathsep.join([MEGATRON_LM, str(repository), os.environ.get("PYTHONPATH", "")])
    env = dict(os.environ, PYTHONPATH=path, TRITON_INTERPRET="1", CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1")
    compare = [
        sys.executable,
        "-m",
        "ditron_train",
        "compare",
        "--trace",
        "--ditron",
        feature,
        "--output",
        str(tmp_path / "out"),
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*compare, *launcher, str(script), *f"{SIZES} {ON_CPU} {options}".split()]
    done = subprocess.run(words, check=False, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stdout
    assert "rank 0 in step 5, ms" in done.stdout and "all_reduce" in done.stdout
    log = (tmp_path / "out" / "fused.log").read_text()
    assert f"ditron_train: {feature}: on for models built from now on" in log and "iteration        6/       6" in log
