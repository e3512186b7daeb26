"""The fused path with a fault in every subpackage that asks the policy for itself: a wrong bit on one rank, or one
rank that is slow.

Run by CPU processes with a probe that compares there, too, and by GPUs under torchrun.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ditron_train.policy import decide, forget_plans
from ditron_train.policy.plan import Entry
from ditron_train.policy.probe import Observation, Run, same_bits
from ditron_train.runtime.values import make_values

Fault = Callable[[torch.Tensor], torch.Tensor]


def wrong(tensor: torch.Tensor) -> torch.Tensor:
    """One wrong bit on rank 1."""
    if dist.get_rank() != 1:
        return tensor
    tensor = tensor.detach().clone()
    tensor.view(-1).view(torch.uint8)[-1] ^= 1
    return tensor


def slow(tensor: torch.Tensor) -> torch.Tensor:
    """About 5 ms more on rank 0; on a CPU, whose times depend on what else runs, 0.2 s."""
    if dist.get_rank() == 0:
        torch.cuda._sleep(10_000_000) if tensor.is_cuda else time.sleep(0.2)
    return tensor


FAULTS: dict[str, Fault | None] = {"none": None, "wrong": wrong, "wrong gradient": wrong, "slow": slow}


class _Spoil(torch.autograd.Function):
    """A fault in forward or in backward."""

    @staticmethod
    def forward(ctx, tensor, fault, in_backward):
        ctx.fault = fault if in_backward else None
        return tensor.view_as(tensor) if in_backward else fault(tensor).view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return ctx.fault(grad) if ctx.fault else grad, None, None


class _SpoiledHandle:
    def __init__(self, handle, fault: Fault) -> None:
        self._handle, self._fault = handle, fault

    def wait(self) -> None:
        self._handle.wait()
        self.tensor = self._fault(self._handle.tensor)


def _spoil_first(name: str, results, in_backward: bool):
    first, *others = results if isinstance(results, tuple) else (results,)
    first = _Spoil.apply(first, FAULTS[name], in_backward)
    return (first, *others) if isinstance(results, tuple) else first


@contextlib.contextmanager
def _replaced(owner: object, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    right = getattr(owner, name)
    setattr(owner, name, make(right))
    try:
        yield
    finally:
        setattr(owner, name, right)


def _ask_exchange(device: torch.device) -> None:
    from ditron_train.megatron.sp.exchange import AttentionShape
    from ditron_train.megatron.sp.spec import route_exchange
    from ditron_train.policy import gate

    gate.forget()
    on_gpu = device.type == "cuda"
    heads, dim = (16, 64) if on_gpu else (4, 8)
    route_exchange(
        dist.group.WORLD, AttentionShape(heads, heads, dim, dim), _values(device, 256 if on_gpu else 8, 1, heads, dim)
    )


def _ask_projections(device: torch.device) -> None:
    from ditron_train.megatron.sp.exchange import AttentionShape
    from ditron_train.megatron.sp.spec import route_projections
    from ditron_train.policy import gate

    gate.forget()
    qkv, out, like = (_values(device, *shape) for shape in ((2048, 1024), (1024, 1024), (256, 1, 1024)))
    route_projections(dist.group.WORLD, AttentionShape(16, 8, 64, 64), tuple(like.shape), qkv, out, like)


def _ask_message(device: torch.device) -> None:
    from ditron_train.policy import gate
    from ditron_train.pp import get_pipeline_context
    from ditron_train.pp.spec import MESSAGE, MessageCall

    num_bytes = 1 << 20 if device.type == "cuda" else 4096
    context = get_pipeline_context(dist.group.WORLD, device)
    context.reserve(num_bytes)
    gate.forget()
    gate.answer_for(MESSAGE, MessageCall(context, num_bytes))


def _routing(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A skewed one of a job's first step."""
    from ditron_train.tools.cases.ep_layers import zipf_routing

    tokens, experts = (512, 16) if device.type == "cuda" else (12, 4)
    return zipf_routing(tokens, experts, 2, exponent=1.0, device=device, seed=dist.get_rank())


def _ask_experts(device: torch.device) -> None:
    from ditron_train.policy import gate
    from ditron_train.tools.bench.megatron_ep import expert_parallel_world
    from ditron_train.tools.cases.ep_moves import DispatcherPair, moe_config

    gate.forget()
    routed, probs = _routing(device)
    hidden, experts = 1024 if device.type == "cuda" else 16, probs.shape[1]
    x = _values(device, len(probs), hidden)
    sizes = dict(hidden=hidden, ffn_hidden=hidden, num_experts=experts, topk=2, dtype=x.dtype)
    with expert_parallel_world():
        DispatcherPair(moe_config(**sizes)).fused._ask_policy(x, routed, probs)
    gate.forget()


def _values(device: torch.device, *shape: int) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return make_values(shape, dtype, device, seed=7, rank=dist.get_rank())


def _spoil_function(module: str, name: str) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    def spoil(fault: str) -> contextlib.AbstractContextManager[None]:
        def make(right: Callable) -> Callable:
            return lambda *given, **options: _spoil_first(fault, right(*given, **options), "gradient" in fault)

        return _replaced(importlib.import_module(module), name, make)

    return spoil


def _spoil_message(fault: str) -> contextlib.AbstractContextManager[None]:
    from ditron_train.pp import spec as pp

    def make(right: Callable) -> Callable:
        def exchange(*given, **options):
            handles = right(*given, **options)
            return {
                name: _SpoiledHandle(one, FAULTS[fault]) if name == "recv_prev" else one
                for name, one in handles.items()
            }

        return exchange

    return _replaced(pp, "exchange", make)


def _spoil_experts(fault: str, *, of_own_tokens_only: bool = False) -> contextlib.AbstractContextManager[None]:
    from ditron_train.megatron.ep.dispatcher import DitronMoEAlltoAllTokenDispatcher

    def make(right: Callable) -> Callable:
        def combine_postprocess(self, *given):
            out = right(self, *given)
            if self.ep_context is None or (
                of_own_tokens_only and not torch.equal(self.routing_map, _routing(out.device)[0])
            ):
                return out
            return _spoil_first(fault, out, "gradient" in fault)

        return combine_postprocess

    return _replaced(DitronMoEAlltoAllTokenDispatcher, "combine_postprocess", make)


#: By name: asks the policy, and puts a fault into the fused path.
PACKAGES = {
    "exchange": (_ask_exchange, _spoil_function("ditron_train.megatron.sp.exchange", "heads_exchange")),
    "projections": (_ask_projections, _spoil_function("ditron_train.megatron.sp.spec", "qkv_projection")),
    "message": (_ask_message, _spoil_message),
    "experts": (_ask_experts, _spoil_experts),
    "experts of the step's own tokens": (_ask_experts, partial(_spoil_experts, of_own_tokens_only=True)),
}


def decision_with(room: str, fault: str, device: torch.device, mode: str, folder: Path) -> Entry:
    """What the policy decides about ``room`` with ``fault`` (a key of ``FAULTS``), as it stands in the plan that it
    writes."""
    ask, spoil = PACKAGES[room]
    path = folder / f"{list(PACKAGES).index(room)}-{fault}-{mode}.json".replace(" ", "-")
    before = {name: os.environ.get(name) for name in ("DITRON_PLAN", "DITRON_POLICY")}
    os.environ.update(DITRON_PLAN=str(path), DITRON_POLICY=mode)
    forget_plans()
    try:
        with spoil(fault) if FAULTS[fault] else contextlib.nullcontext():
            ask(device)
        dist.barrier()
        (entry,) = json.loads(path.read_text())["decisions"].values()
        dist.barrier()
        return Entry(**entry)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        forget_plans()


def probe_on_cpu(
    native: Run,
    fused: Run,
    *,
    group,
    device: torch.device,
    timed: bool = True,
    needs_bits: bool = True,
    extra_cases=(),
    host_counts=False,
) -> Observation:
    """``probe`` where GPUs would be: bits count, and the host's times."""
    equal = all([same_bits(one(), other()) for one, other in ((native, fused), *extra_cases)])
    times = [min(_seconds(run) for _ in range(3)) for run in (native, fused)]
    worst = torch.tensor([float(not equal), *times], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    different, native_s, fused_s = worst.tolist()
    return Observation(different == 0.0, *((native_s * 1e6, fused_s * 1e6) if timed else (None, None)))


def _seconds(run: Run) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def decision_on_cpu(room: str, fault: str, mode: str, folder: Path) -> Entry:
    """``decision_with`` in a CPU process."""
    with _replaced(sys.modules[decide.__module__], "probe", lambda right: probe_on_cpu):
        return decision_with(room, fault, torch.device("cpu"), mode, folder)


def contexts_beside_a_default_device(name: str) -> int:
    """How many subpackages make their contexts of a new group, on the CPU, while torch makes tensors elsewhere unless
    it is told where."""
    from ditron_train.ep.context import get_ep_context
    from ditron_train.pp.context import get_pipeline_context
    from ditron_train.sp.context import get_sp_context
    from ditron_train.tp.context import get_tp_context

    group, cpu = dist.new_group(list(range(dist.get_world_size()))), torch.device("cpu")
    torch.set_default_device(name)
    try:
        made = [make(group, cpu) for make in (get_tp_context, get_sp_context, get_pipeline_context)]
        made.append(get_ep_context(group, cpu, 4, 2))
    finally:
        torch.set_default_device(None)
        dist.destroy_process_group(group)
    return len(made)


def decision_beside_a_default_device(room: str, folder: Path) -> Entry:
    """``decision_on_cpu`` without a fault, likewise."""
    torch.set_default_device("meta")
    try:
        return decision_on_cpu(room, "none", "bits", folder)
    finally:
        torch.set_default_device(None)
