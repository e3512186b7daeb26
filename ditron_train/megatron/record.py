"""Writes down what every step of Megatron-LM's training loop gave, bit for bit (``--ditron-record``; ``compare`` reads it).

One file a rank, ``rank<r>.jsonl``: a line with the job's sizes, then a line a step. Floats stand as hexadecimal text, so that
equal text is equal bits.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import SettingError

__all__ = ["SIZES", "StepRecorder", "digest", "record_steps"]

_LOOP = "megatron.training.training"
_GRAD_NORM = 5  # of what train_step returns; the losses stand first

#: Megatron's arguments that say what was trained.
SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "micro_batch_size", "global_batch_size", "num_experts",
    "moe_ffn_hidden_size", "moe_router_topk", "tensor_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "pipeline_model_parallel_size",
)  # fmt: skip


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """64 bits of all bits of ``tensors``, in order: each element times an odd number of its own, added up modulo 2^64.

    Any single element that differs gives another digest.
    """
    total, position = 0, 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        for part in bits.split(1 << 22):  # bounds the int64 copies
            places = torch.arange(position, position + len(part), dtype=torch.int64, device=part.device)
            weights = (2 * places + 1) * 0x9E3779B97F4A7C1
            total += int((part.to(torch.int64) * weights).sum())
            position += len(part)
    return f"{total % (1 << 64):016x}"


def _text(value: Any) -> str | None:
    return None if value is None else float(value).hex()


class StepRecorder:
    """Appends one line a step to this rank's file.

    Args:
        folder: Is there; the rank's file in it is replaced.
        features: That are switched on.
        arguments: Megatron's.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, folder: Path, features: Sequence[str], arguments: Any) -> None:
        self._file = (folder / f"rank{dist.get_rank()}.jsonl").open("w", encoding="utf-8", buffering=1)
        self._last = getattr(arguments, "train_iters", None)
        self._steps = 0
        self._before_s: float | None = None
        sizes = {name: getattr(arguments, name, None) for name in SIZES}
        if sizes["num_experts"] is None:  # the others have defaults
            sizes = {name: size for name, size in sizes.items() if not name.startswith("moe_")}
        self._write(
            world_size=dist.get_world_size(), features=list(features), train_iters=self._last,
            dtype=str(getattr(arguments, "params_dtype", "")),
            sizes={name: size for name, size in sizes.items() if isinstance(size, int)},
        )  # fmt: skip

    def _write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")

    def step(self, iteration: int | None, losses: dict[str, torch.Tensor], grad_norm: Any, optimizer: Any) -> None:
        """Notes one step; after the first and the last one also a digest of the parameters that this rank's optimizer holds.

        Args:
            iteration: Steps before this one, also in earlier jobs; None: as many as were noted.
            losses: Scalars by name, where this rank has them.
            grad_norm: The norm of all gradients, or None.
            optimizer: Megatron's.
        """
        values = {"losses": {name: _text(loss) for name, loss in losses.items()}, "grad_norm": _text(grad_norm)}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            values["used_bytes"] = total - free
        now_s = time.perf_counter()
        values["seconds"] = None if self._before_s is None else now_s - self._before_s
        self._steps += 1
        done = self._steps if iteration is None else iteration + 1
        if self._steps == 1 or done == self._last:
            values["digest"] = digest(p for group in optimizer.param_groups for p in group["params"])
        self._write(step=done, **values)
        self._before_s = time.perf_counter()


def _wrap(module: ModuleType, folder: Path, features: Sequence[str]) -> Any:
    """``module.train_step`` with a note after each call; ranks are known by the first."""
    native = module.train_step
    signature = inspect.signature(native)
    recorder: StepRecorder | None = None

    @functools.wraps(native)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal recorder
        given = signature.bind(*args, **kwargs).arguments
        result = native(*args, **kwargs)
        if recorder is None:
            recorder = StepRecorder(folder, features, module.get_args())
        recorder.step(given.get("iteration"), result[0], result[_GRAD_NORM], given["optimizer"])
        return result

    train_step._records_steps = True
    return train_step


def record_steps(folder: str | Path, features: Sequence[str]) -> None:
    """From now on every step of Megatron-LM's training loop is noted under ``folder``, one for all ranks.

    Args:
        folder: Made where it is not there.
        features: That are switched on; noted, too.

    Raises:
        SettingError: The process has no such loop, or the folder cannot be made.
    """
    module = sys.modules.get(_LOOP)
    if module is None:
        raise SettingError(f"--ditron-record needs the training loop of Megatron-LM ({_LOOP}), which this script does not use")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--ditron-record {folder}: {error.strerror or error}") from None
    if not hasattr(module.train_step, "_records_steps"):  # Megatron-LM may parse its arguments twice
        module.train_step = _wrap(module, Path(folder), features)
