"""Whole jobs of Megatron-LM's ``pretrain_gpt.py`` by ``compare``, 16 steps: losses, gradient norms, parameters and
what is saved, Transformer Engine's state included, bit for bit those of stock Megatron.

Without torchrun: each job starts its own. ``MEGATRON_LM`` names the checkout. Where there are fewer GPUs than ranks,
these share them (``shared_pretrain``).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs"),
    pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names a checkout of Megatron-LM"),
    pytest.mark.skipif("RANK" in os.environ, reason="starts torchrun itself"),
]
ROOT, NUM_STEPS, TIMEOUT_S = Path(__file__).parent.parent.parent, 16, 600
_COMMON = f"""
    --use-mcore-models --transformer-impl transformer_engine --bf16 --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0 --mock-data --split 100,0,0 --tokenizer-type NullTokenizer
    --vocab-size 8192 --num-workers 1 --lr 1e-4 --min-lr 1e-5 --lr-decay-style constant --clip-grad 1.0
    --train-iters {NUM_STEPS} --log-interval 1 --eval-iters 0 --eval-interval 1000
    --no-create-attention-mask-in-dataloader --no-check-for-nan-in-loss-and-grad
    --save-interval {NUM_STEPS} --ckpt-format torch --no-save-rng
    --hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 4
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 2
"""
_DENSE = " --num-layers 4 --ffn-hidden-size 4096"
_TP = " --tensor-model-parallel-size 2 --sequence-parallel"
_MOE = """ --num-layers 2 --ffn-hidden-size 4096 --num-experts 8 --moe-ffn-hidden-size 1024 --moe-router-topk 2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-router-dtype fp32"""
_EP, _SP = (
    " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    " --context-parallel-size 2 --cp-comm-type a2a",
)
_PP = " --pipeline-model-parallel-size 2"
_MUON = " --optimizer dist_muon --muon-momentum 0.95 --muon-num-ns-steps 5"

_FP8_PARAMETERS = " --fp8-param-gather --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

_TP_OPS, _EP_OPS, _SP_OPS = ("ag_gemm", "gemm_rs"), ("dispatch", "combine"), ("a2a|heads|sequence",)

#: Ranks, features, arguments, recipe, ops of the fused path that have to run in every step (patterns).
_JOBS: dict[str, tuple[int, str, str, str | None, tuple[str, ...]]] = {
    "tp tensorwise": (2, "tp", _DENSE + _TP, "tensorwise", _TP_OPS),
    "tp delayed": (2, "tp", _DENSE + _TP, "delayed", _TP_OPS),
    "tp blockwise": (2, "tp", _DENSE + _TP, "blockwise", ("gather_of_parts", "scatter_as_computed")),
    "tp blockwise parameters": (
        2,
        "tp",
        _DENSE + _TP + _FP8_PARAMETERS,
        "blockwise",
        ("gather_of_parts", "scatter_as_computed"),
    ),
    "ep tensorwise": (2, "ep", _MOE + _EP, "tensorwise", _EP_OPS),
    "ep blockwise": (2, "ep", _MOE + _EP, "blockwise", _EP_OPS),
    "ep tensorwise parameters": (2, "ep", _MOE + _EP + _FP8_PARAMETERS, "tensorwise", _EP_OPS),
    "ep blockwise parameters": (2, "ep", _MOE + _EP + _FP8_PARAMETERS, "blockwise", _EP_OPS),
    "sp tensorwise": (2, "sp", _DENSE + _SP, "tensorwise", _SP_OPS),
    "sp blockwise": (2, "sp", _DENSE + _SP, "blockwise", _SP_OPS),
    "ep in pieces": (
        2,
        "ep",
        _MOE + _EP + " --overlap-moe-expert-parallel-comm --delay-wgrad-compute --global-batch-size 8",
        None,
        _EP_OPS,
    ),
    "tp,ep": (2, "tp,ep", _MOE + _EP + _TP, None, (*_TP_OPS, *_EP_OPS)),
    "tp,pp": (4, "tp,pp", _DENSE + _TP + _PP, None, (*_TP_OPS, "exchange")),
    "tp,sp": (4, "tp,sp", _DENSE + _TP + _SP, None, (*_TP_OPS, *_SP_OPS)),
    "tp,pp,muon": (4, "tp,pp,muon", _DENSE + _TP + _PP + _MUON, None, (*_TP_OPS, "exchange")),
}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a checkpoint holds, one by one, with its place."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}/{key}")
    elif hasattr(value, "get_metadata"):  # a parameter in FP8: its bytes and scales
        yield from _leaves({k: v for k, v in value.get_metadata().items() if isinstance(v, torch.Tensor)}, path)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}/{index}")
    else:
        value = value.getvalue() if isinstance(value, io.BytesIO) else value
        if path.endswith("_extra_state") and isinstance(value, (bytes, torch.Tensor)) and len(value):
            # Pickled with addresses of tensors in it.
            yield from _leaves(pickle.loads(bytes(value.numpy() if isinstance(value, torch.Tensor) else value)), path)
        else:
            yield path, value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(*(part.reshape(-1).view(torch.uint8) for part in (one, other)))
    return bool(one == other) if isinstance(one, (bytes, int, float, str)) else repr(one) == repr(other)


def _compare_saved(native: Path, fused: Path) -> tuple[int, list[str]]:
    """How many tensors and states were compared, and the places of those that differ."""
    files = sorted(path.relative_to(native) for path in native.rglob("*.pt"))
    assert files and files == sorted(path.relative_to(fused) for path in fused.rglob("*.pt"))
    count, different = 0, []
    for file in files:
        loaded = [torch.load(folder / file, map_location="cpu", weights_only=False) for folder in (native, fused)]
        # The layer-wise optimizer saves a list: of each of its optimizers the state.
        parts = [one if isinstance(one, dict) else {"": one} for one in loaded]
        sides = [dict(_leaves({key: part[key] for key in part if key != "args"})) for part in parts]
        assert sides[0].keys() == sides[1].keys()
        compared = [key for key in sides[0] if "_extra_state" in key or isinstance(sides[0][key], torch.Tensor)]
        count += len(compared)
        different += [f"{file}{key}" for key in compared if not _equal(sides[0][key], sides[1][key])]
    return count, different


def _command(name: str, output: Path) -> list[str]:
    ranks, features, arguments, recipe, _ = _JOBS[name]
    comparing = ["-m", "ditron_train", "compare", "--order", "AB", "--ditron", features, "--output", str(output)]
    comparing += ["--fp8", recipe] if recipe else []
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(Path(__file__).parent / "shared_pretrain.py")]
    script.append(str(Path(os.environ["MEGATRON_LM"]).resolve() / "pretrain_gpt.py"))
    return [sys.executable, *comparing, sys.executable, *launcher, *script, *_COMMON.split(), *arguments.split()]


@pytest.mark.parametrize("name", list(_JOBS))
def test_jobs(name, tmp_path):
    pytest.importorskip("transformer_engine")
    saved, output = tmp_path / "saved", Path(os.environ.get("OUT", tmp_path)) / f"job {name}"
    path = os.pathsep.join(
        [str(ROOT), str(Path(os.environ["MEGATRON_LM"]).resolve()), os.environ.get("PYTHONPATH", "")]
    )
    repeatable = {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "DITRON_POLICY": "bits", "PYTHONPATH": path,
        "SAVED": str(saved),
    }  # fmt: skip
    done = subprocess.run(
        _command(name, output), env={**os.environ, **repeatable}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [json.loads(line) for line in (output / "fused" / "rank0.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == NUM_STEPS
    calls = json.loads((output / "fused" / "ops0.json").read_text())
    assert not json.loads((output / "native" / "ops0.json").read_text())
    for op in _JOBS[name][-1]:
        assert sum(count for call, count in calls.items() if re.search(op, call)) >= NUM_STEPS, (
            op,
            calls,
            steps[-1]["plan"],
        )
    count, different = _compare_saved(saved / "native", saved / "fused")
    (output / "seen.json").write_text(json.dumps({"compared": count, "calls": calls, "plan": steps[-1]["plan"]}))
    assert count > 20 and not different, different[:20]
