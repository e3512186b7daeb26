"""Writes down what every step of Megatron-LM's training loop gave, bit for bit (``--ditron-record``; ``compare`` reads
it).

One file a rank, ``rank<r>.jsonl``: a line with the job's sizes, on rank 0 also with where it runs, then a line a step.
Floats are written as hexadecimal text, so that equal text is equal bits.
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

from ditron_train.data.provenance import collect_provenance
from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS
from ditron_train.megatron.plugin.record_trace import StepTracer, TraceRequest, trace_path
from ditron_train.runtime.device import energy_mj, sm_clock_mhz
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import decisions, log_once
from ditron_train.symm.arena import peak_bytes

_LOOP = "megatron.training.training"
_GRAD_NORM = 5  # of what train_step returns; the losses come first
_PART = 1 << 22  # elements, which bounds the memory that a digest takes

#: Megatron's arguments that say what was trained.
SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "micro_batch_size", "global_batch_size",
    "num_experts", "moe_ffn_hidden_size", "moe_router_topk", "tensor_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "pipeline_model_parallel_size",
)  # fmt: skip


def _signed(bits: int) -> int:
    """The int64 of these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


#: Of splitmix64: how far bits are moved, and the factor after that.
_MIXING = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def _weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers for ``count`` places from ``first`` on, the same on every device: splitmix64's, since with numbers
    that grow evenly from place to place differences of neighbours (+1, -2, +1) would cancel."""
    mixed = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    mixed *= _signed(0x9E3779B97F4A7C15)
    for shift, factor in _MIXING:
        mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # without copies of the sign
        mixed *= factor
    return mixed.bitwise_or_(1)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """64 bits of all bits of ``tensors``, in order: each element times an odd number of its own, added up modulo 2^64.

    Any single element that differs gives another digest. Of a DTensor the part on this rank counts (FSDP).
    """
    total, position = 0, 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().reshape(-1)
        bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        for part in bits.split(_PART):
            total += int(_weights(position, len(part), part.device).mul_(part).sum())
            position += len(part)
    return f"{total % (1 << 64):016x}"


def _text(value: Any) -> str | None:
    return None if value is None else float(value).hex()


def _dtype(arguments: Any) -> str:
    """Of activations: of parameters, or the FP8 recipe as rows of results name it."""
    if getattr(arguments, "fp8", None):  # --fp8-format
        return f"fp8_{getattr(arguments, 'fp8_recipe', 'delayed')}"
    return str(getattr(arguments, "params_dtype", ""))


class StepRecorder:
    """Appends one line a step to this rank's file.

    Args:
        folder: Is there; the rank's files in it are replaced.
        features: That are switched on.
        arguments: Megatron's.
        device: That the model is on.
        first: Number of the first step.
        trace: Which step is traced, on which rank, or None.

    Raises:
        OSError: It cannot be written.
        SettingError: There is no such step or rank.
    """

    def __init__(
        self,
        folder: Path,
        features: Sequence[str],
        arguments: Any,
        device: torch.device,
        first: int,
        trace: TraceRequest | None,
    ) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._last = getattr(arguments, "train_iters", None)
        self._steps = 0
        self._before_s: float | None = None
        self._taken_mj: int | None = None
        self._traced: int | None = None
        FUSED_CALLS.install(features)
        path = trace_path(folder, rank)
        if trace is not None:
            if trace.rank >= world_size:
                raise SettingError(f"--ditron-record-trace: no rank {trace.rank} among {world_size}")
            self._traced = trace.step_of(first, self._last)
            self._tracer = StepTracer(path if rank == trace.rank else None)
        self._file = (folder / f"rank{rank}.jsonl").open("w", encoding="utf-8", buffering=1)
        path.unlink(missing_ok=True)
        sizes = {name: getattr(arguments, name, None) for name in SIZES}
        if sizes["num_experts"] is None:  # the others have defaults
            sizes = {name: size for name, size in sizes.items() if not name.startswith("moe_")}
        self._write(
            world_size=world_size, features=list(features), train_iters=self._last,
            dtype=_dtype(arguments),
            sizes={name: size for name, size in sizes.items() if isinstance(size, int)},
            trace=None if trace is None else {"step": self._traced, "rank": trace.rank},
            stamp=collect_provenance(device, world_size) if rank == 0 else None,
        )  # fmt: skip

    def _write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")

    def _number(self, iteration: int | None) -> int:
        """Of the step that runs, from 1; ``iteration``: steps before it, also in earlier jobs, None: as many as were
        noted."""
        return (self._steps if iteration is None else iteration) + 1

    def begin(self, iteration: int | None) -> None:
        """Before a step. Collective if the step is traced."""
        if self._number(iteration) == self._traced:
            self._tracer.start()

    def step(self, iteration: int | None, losses: dict[str, torch.Tensor], grad_norm: Any, optimizer: Any) -> None:
        """Notes one step; after the first, each hundredth and the last one also a digest of the parameters that this
        rank's optimizer holds, after the last one what ran by which path. With every step: the calls of the fused path
        by feature, the most that torch has reserved on the GPU so far, and the bytes of symmetric memory, which rank 0
        logs at last.

        Of the step that is traced no time is noted. Collective if it is traced.

        Args:
            iteration: Steps before this one, also in earlier jobs; None: as many as were noted.
            losses: Scalars by name, if this rank has them.
            grad_norm: The norm of all gradients, or None.
            optimizer: Megatron's.
        """
        number = self._number(iteration)
        if number == self._traced:
            self._tracer.stop()
        values: dict[str, Any] = {
            "losses": {name: _text(loss) for name, loss in losses.items()},
            "grad_norm": _text(grad_norm),
            "fused_calls": FUSED_CALLS.take(),
        }
        values["symmetric_bytes"] = peak_bytes()
        if torch.cuda.is_available():
            values["clock_mhz"] = sm_clock_mhz()  # the GPU is at work still
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            values["used_bytes"] = total - free
            values["reserved_bytes"] = torch.cuda.max_memory_reserved()
        now_s = time.perf_counter()
        before_s = None if number == self._traced else self._before_s
        values["seconds"] = None if before_s is None else now_s - before_s
        taken_mj = energy_mj()
        if taken_mj is not None and self._taken_mj is not None:
            values["joules"] = None if before_s is None else (taken_mj - self._taken_mj) / 1e3
        self._steps += 1
        if self._steps == 1 or number % 100 == 0 or number == self._last:
            values["digest"] = digest(p for group in optimizer.param_groups for p in group["params"])
        if number == self._last:
            values["plan"] = decisions()
            log_once(
                "symmetric memory", f"symmetric memory of all groups: {values['symmetric_bytes'] / 2**20:.1f} MiB"
            )
        self._write(step=number, **values)
        self._taken_mj = energy_mj()
        self._before_s = time.perf_counter()


def _device_of(model: Any) -> torch.device:
    """Of the first parameter of Megatron's model, one module or a list of them; the CPU if there is none."""
    modules = model if isinstance(model, (list, tuple)) else [model]
    return next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))


def _wrap(module: ModuleType, folder: Path, features: Sequence[str], trace: TraceRequest | None) -> Any:
    """``module.train_step`` with a note after each call; ranks are known by the first."""
    native = module.train_step
    signature = inspect.signature(native)
    recorder: StepRecorder | None = None

    @functools.wraps(native)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal recorder
        given = signature.bind(*args, **kwargs).arguments
        iteration = given.get("iteration")
        if recorder is None:
            device, first = _device_of(given["model"]), (iteration or 0) + 1
            recorder = StepRecorder(folder, features, module.get_args(), device, first, trace)
        recorder.begin(iteration)
        result = native(*args, **kwargs)
        recorder.step(iteration, result[0], result[_GRAD_NORM], given["optimizer"])
        return result

    train_step._records_steps = True  # type: ignore[attr-defined]
    return train_step


def record_steps(folder: str | Path, features: Sequence[str], trace: TraceRequest | None = None) -> None:
    """From now on every step of Megatron-LM's training loop is noted under ``folder``, one for all ranks.

    Args:
        folder: Made if it is not there.
        features: That are switched on; noted, too.
        trace: Which step is traced there, on which rank, or None.

    Raises:
        SettingError: The process has no such loop, or the folder cannot be made.
    """
    module = sys.modules.get(_LOOP)
    if module is None:
        raise SettingError(
            f"--ditron-record needs the training loop of Megatron-LM ({_LOOP}), which this script does not use"
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--ditron-record {folder}: {error.strerror or error}") from None
    if not hasattr(module.train_step, "_records_steps"):  # Megatron-LM may parse its arguments twice
        vars(module)["train_step"] = _wrap(module, Path(folder), features, trace)
