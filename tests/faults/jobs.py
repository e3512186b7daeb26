"""The jobs that faults happen in: every subpackage's ops, forward and backward, the policy's probe, Megatron's
quickstart.

A job is a function of this rank's device that makes what it needs (collective) and returns its step. A step gives the
same bits whenever it is called.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ditron_train
from ditron_train.runtime.values import make_values

Step = Callable[[], Sequence[torch.Tensor]]
QUICKSTART = "quickstart"
_SCRIPT = Path(ditron_train.__file__).parent.parent / "examples" / "megatron" / "quickstart.py"
_QUICK = ("--steps", "2", "--layers", "1", "--hidden", "64", "--sequence", "32", "--batch", "1")


def _values(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return make_values(shape, dtype, device, seed=seed, rank=dist.get_rank())


def _unit(device: torch.device) -> int:
    """Rows and columns of the smallest matrices."""
    return 256 if device.type == "cuda" else 16


def _stepping(context: Any, forward: Callable[..., Sequence[torch.Tensor]], *inputs: torch.Tensor) -> Step:
    """Results, then gradients of the inputs, the results' own being ones."""

    def step() -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        found = list(forward(*leaves))
        torch.autograd.backward(found, [torch.ones_like(one) for one in found])
        context.synchronize()
        return [*(one.detach() for one in found), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return step


def _tp(device: torch.device) -> Step:
    from ditron_train.tp import get_tp_context
    from ditron_train.tp.linear import column_linear, row_linear

    context, unit = get_tp_context(dist.group.WORLD, device), _unit(device)
    x = _values((unit, unit), device, 1)
    weights = [_values((unit, unit), device, seed) for seed in (2, 3)]

    def forward(x: torch.Tensor, column: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        return [row_linear(column_linear(x, column, context=context), row, context=context)]

    return _stepping(context, forward, x, *weights)


def _sp(device: torch.device) -> Step:
    from ditron_train.sp import get_sp_context, output_layout, output_projection, qkv_layout, qkv_projection

    world, unit = dist.get_world_size(), _unit(device)
    context = get_sp_context(dist.group.WORLD, device)
    head = unit // 2
    layout, of_output = qkv_layout(world, world, head, world), output_layout(world, head, world)
    x, qkv, out = (
        _values(shape, device, seed)
        for seed, shape in enumerate([(2, 1, unit), (world * 3 * head, unit), (unit, world * head)])
    )

    def forward(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        query, key, value = qkv_projection(x, qkv, context=context, layout=layout)
        return [output_projection(query + key * value, out, context=context, layout=of_output)]

    return _stepping(context, forward, x, qkv, out)


def _ep(device: torch.device) -> Step:
    from ditron_train.ep import begin_layout, combine_rows, dispatch_tokens, get_ep_context

    world, tokens, hidden = dist.get_world_size(), 8, _unit(device)
    experts, topk = 2 * world, 2
    context = get_ep_context(dist.group.WORLD, device, experts, topk)  # type: ignore[arg-type]
    x, scores = _values((tokens, hidden), device, 1), _values((tokens, experts), device, 2).float()
    routed = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
    routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
    probs = scores.abs() * routed

    def forward(x: torch.Tensor, probs: torch.Tensor) -> list[torch.Tensor]:
        layout = begin_layout(routed, probs, hidden, x.dtype, context).finish()
        rows, row_probs = dispatch_tokens(x, probs, layout, context, "descending")
        return [combine_rows((rows * row_probs[:, None]).to(rows.dtype), layout, context, "descending")]

    return _stepping(context, forward, x, probs)


def _pp(device: torch.device) -> Step:
    from ditron_train.pp import exchange, get_pipeline_context
    from ditron_train.pp.messages import Header

    context = get_pipeline_context(dist.group.WORLD, device)  # type: ignore[arg-type]
    x = _values((_unit(device), _unit(device)), device, 1)
    header = Header(tuple(x.shape), x.dtype)
    context.reserve(x.nbytes)

    def step() -> list[torch.Tensor]:
        found = []
        for sent, received in (("send_next", "recv_prev"), ("send_prev", "recv_next")):  # forward, then backward
            handles: Any = exchange(context, **{sent: x, received: header})  # type: ignore[arg-type]
            for handle in handles.values():
                handle.wait()
            found.append(handles[received].tensor.clone())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        context.check()  # a wait that gave up on the device says so here
        return found

    return step


def _muon(device: torch.device) -> Step:
    """Whole matrices are sent by torch's own collectives; a gather of this package stands in front of the step."""
    from ditron_train.tp import all_gather, get_tp_context

    context = get_tp_context(dist.group.WORLD, device)
    x, sharded = _values((4, _unit(device)), device, 9), muon_job(device, dist.group.WORLD)

    def step() -> list[torch.Tensor]:
        gathered = all_gather(x, context=context).clone()
        found = sharded()
        context.synchronize()
        return [gathered, *found]

    return step


def muon_job(device: torch.device, shard_group: dist.ProcessGroup | None) -> Step:
    """A first step of Muon on four matrices, each at one rank of ``shard_group`` (None: all on every rank)."""
    from ditron_train.optim import Muon

    unit = _unit(device)
    shapes = [(unit, unit), (unit, 2 * unit), (2 * unit, unit), (unit, unit)]
    values = [make_values(shape, torch.float32, device, seed=seed, rank=0) for seed, shape in enumerate(shapes)]

    def step() -> list[torch.Tensor]:
        matrices = [torch.nn.Parameter(value.clone()) for value in values]
        for matrix, one in zip(matrices, values):
            matrix.grad = one.clone()
        Muon(matrices, shard_group=shard_group).step()
        return [matrix.detach() for matrix in matrices]

    return step


def _probe(device: torch.device) -> Step:
    """Every step decides anew about a column layer, as the first step of a training does."""
    from megatron.core import parallel_state

    from ditron_train.cpu import megatron_shim
    from ditron_train.megatron.tp.spec import COLUMN
    from ditron_train.policy import fused_results, gate, native_results
    from ditron_train.tools.cases import RunEnvironment, Shape
    from ditron_train.tools.cases.tp_linear import LinearCase

    if device.type == "cpu":
        megatron_shim.install()
    world, unit = dist.get_world_size(), _unit(device)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    place = RunEnvironment(dist.group.WORLD, device, _values((1,), device, 0).dtype)  # type: ignore[arg-type]
    shape = Shape("small", {"m": unit * world, "n": unit * world, "k": unit})
    call = LinearCase(COLUMN).sample(shape, place, 1)

    def step() -> list[torch.Tensor]:
        gate.forget("tp")
        context = gate.context_for(COLUMN, call)
        if context is None:
            return native_results(COLUMN, call)
        found = fused_results(COLUMN, call, context)
        context.synchronize()
        return found

    return step


def _capture(device: torch.device) -> Step:
    """Every step captures a gather with its product into a CUDA graph, and replays it twice."""
    from ditron_train.tp import ag_gemm, get_tp_context

    context, unit = get_tp_context(dist.group.WORLD, device), _unit(device)
    x, weight = (_values((unit, unit), device, seed) for seed in (1, 2))
    ag_gemm(x, weight, context=context)  # shapes are agreed on outside of a capture

    def step() -> list[torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y: Any = ag_gemm(x, weight, context=context)
        for _ in range(2):
            graph.replay()
        context.synchronize()
        assert isinstance(y, torch.Tensor)
        return [y.clone()]

    return step


def run_quickstart(folder: Path, native_timeout: Any) -> None:
    """Trains Megatron's quickstart with ``tp``: its script, in this process.

    Args:
        folder: Of what it writes.
        native_timeout: Of torch's own collectives, which the quickstart gives five minutes.
    """
    dist.init_process_group = partial(_init, dist.init_process_group, native_timeout)
    sys.argv = [str(_SCRIPT), "--out", str(folder / "quickstart"), *_QUICK]
    sys.path.insert(0, str(_SCRIPT.parent))
    try:
        runpy.run_path(str(_SCRIPT), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _init(init_process_group: Callable[..., None], native_timeout: Any, *words: Any, **options: Any) -> None:
    store = dist.FileStore(os.environ["DITRON_FAULTS_STORE"], int(os.environ["WORLD_SIZE"]))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options.update(timeout=native_timeout, store=store, rank=rank, world_size=world_size)
    init_process_group(*words, **options)


#: By name; the numbers of ranks are those of ``jobs_here``.
JOBS: Mapping[str, Callable[[torch.device], Step]] = {
    "tp": _tp, "sp": _sp, "ep": _ep, "pp": _pp, "muon": _muon, "probe": _probe,
    "capture": _capture,
}  # fmt: skip


#: How many deadlines of the others a job has, whose steps take longer in the interpreter.
PATIENCE: Mapping[str, float] = {"ep": 4.0, QUICKSTART: 4.0, "probe": 2.0}

#: What ranks of a job import, megatron-core included where it is used.
MODULES: Mapping[str, Sequence[str]] = {
    "tp": ("ditron_train.tp.linear",),
    "sp": ("ditron_train.sp",),
    "ep": ("ditron_train.ep",),
    "pp": ("ditron_train.pp",),
    "muon": ("ditron_train.optim", "ditron_train.tp"),
    "probe": ("ditron_train.tools.cases.tp_linear",),
    "capture": ("ditron_train.tp",),
    QUICKSTART: ("ditron_train.megatron", "ditron_train.megatron.tp.spec", "megatron.core.models.gpt"),
}


def jobs_here(most_ranks: int, device_type: str) -> dict[str, tuple[int, ...]]:
    """The jobs that can run, each with its numbers of ranks: captures on GPUs; on CPUs the quickstart, where its
    script is there."""
    jobs = {name: tuple(range(2, most_ranks + 1)) for name in JOBS if name != "capture" or device_type == "cuda"}
    if importlib.util.find_spec("megatron") is None:
        del jobs["probe"]
    elif _SCRIPT.is_file() and device_type == "cpu":
        jobs[QUICKSTART] = (2,)
    return jobs
