"""The policy on GPUs: NCCL's order, injected wrong bits and a slow variant, plans, what a probe costs and leaves
behind."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time

import pytest
import torch
import torch.distributed as dist

from ditron_train.policy import decide, forget_plans, gate
from ditron_train.policy.order import probe_order, reduction_order

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs"),
    pytest.mark.usefixtures("own_gpus"),
]
pytest.importorskip("megatron.core")

PROBE_LIMIT_S = 60.0
STRICT_OVER_FORCE = 1.01
MOST_OF_MEDIAN = 1.03


@pytest.fixture(scope="module")
def session(device):
    from ditron_train.tools.bench.megatron_tp import megatron_world
    from ditron_train.tools.session import BenchSession

    if dist.get_world_size() == 1:
        pytest.skip("needs at least 2 GPUs")
    session = BenchSession("policy", argparse.Namespace(repetitions=15, warmup=4))
    with megatron_world(session):
        yield session


@pytest.fixture(autouse=True)
def _fresh(session, monkeypatch):

    monkeypatch.setenv("DITRON_POLICY", "strict")
    forget_plans()
    gate.forget()
    yield
    forget_plans()
    gate.forget()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_order_of_nccl_is_revealed(device, dtype):
    """On these machines it is the ring's; anything else would be named, and nothing could be compared."""
    assert reduction_order(dist.group.WORLD, device, dtype).name == "ring"


def test_another_order_is_told_from_nccls(device):
    """An all-to-all and a ring-order reduction in ascending order is a correct reduce-scatter, too, but not the same
    one."""
    world = dist.get_world_size()
    if world == 2:
        pytest.skip("two ranks have one order")

    def ascending(out, x):
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        total = received[0]
        for part in received[1:]:
            total = total + part
        out.copy_(total)

    found = probe_order(ascending, group=dist.group.WORLD, device=device, dtype=torch.bfloat16)
    assert found.name == "order-" + "-".join(map(str, range(world))) and "NCCL_ALGO=Ring" in found.reason


class _FlipBitOfGradient(torch.autograd.Function):
    """Identity whose gradient has one wrong bit on rank 1."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return _flip(grad)


def _flip(tensor):
    if dist.get_rank() != 1:
        return tensor
    tensor = tensor.detach().clone()
    tensor.view(-1).view(torch.int16)[-1] ^= 1
    return tensor


class _FlipBit(torch.autograd.Function):
    """One wrong bit on rank 1; the gradient is right."""

    @staticmethod
    def forward(ctx, tensor):
        return _flip(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad


def _inputs(session, kind, shape=(4096, 4096, 4096)):
    """Of a layer of shape (m, n, k over all ranks)."""
    world = session.world_size
    m, n, k = shape
    x_shape, w_shape = ((m // world, k), (n // world, k)) if kind == "column" else ((m, k // world), (n, k // world))
    return [session.values(s, torch.bfloat16, 1 + i) for i, s in enumerate((x_shape, w_shape))]


def _route(session, kind, *shape):
    """What the policy says about a call."""
    from ditron_train.megatron.tp.routing import route

    return route(kind, *_inputs(session, kind, *shape), group=dist.group.WORLD, sequence_parallel=True).context


def _decisions(monkeypatch, tmp_path, session, kind):
    monkeypatch.setenv("DITRON_PLAN", str(tmp_path / "plan.json"))
    context = _route(session, kind)
    module = sys.modules["ditron_train.policy.decide"]
    (decision,) = module._plan().entries.values()
    return context, decision


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("where", ["forward", "wgrad", "dgrad", "forward of the call's own tensors"])
def test_one_wrong_bit_on_one_rank_falls_back(session, monkeypatch, tmp_path, kind, where):
    from ditron_train.megatron.tp import spec

    monkeypatch.setenv("DITRON_POLICY", "bits")
    right = getattr(spec, f"{kind}_linear")
    context, decision = _decisions(monkeypatch, tmp_path, session, kind)
    assert context is not None and decision.bits_equal

    own = _inputs(session, kind)[0]

    def wrong(x, weight, **options):
        is_own = torch.equal(x, own)
        if where == "dgrad":
            x = _FlipBitOfGradient.apply(x)
        if where == "wgrad":
            weight = _FlipBitOfGradient.apply(weight)
        y = right(x, weight, **options)
        return _FlipBit.apply(y) if where == "forward" or (is_own and "own" in where) else y

    monkeypatch.setattr(spec, f"{kind}_linear", wrong)
    gate.forget()
    forget_plans()
    (tmp_path / "plan.json").unlink(missing_ok=True)
    context, decision = _decisions(monkeypatch, tmp_path, session, kind)
    assert context is None and decision.bits_equal is False and "bits would not be" in decision.reason


@pytest.mark.parametrize("kind", ["column", "row"])
def test_other_bits_of_transformer_engines_products_on_one_rank_fall_back(session, monkeypatch, tmp_path, kind):
    te_ops = pytest.importorskip(
        "transformer_engine.pytorch.cpp_extensions", reason="Transformer Engine is not installed"
    )
    right, calls = te_ops.general_gemm, []

    def wrong(*args, **options):
        calls.append(options)
        result, *more = right(*args, **options)
        return (_flip(result) if options.get("grad") else result), *more

    monkeypatch.setattr(te_ops, "general_gemm", wrong)
    context, decision = _decisions(monkeypatch, tmp_path, session, kind)
    assert len(calls) == 2
    assert context is None and decision.bits_equal is False and "bits would not be" in decision.reason


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_slow_variant_falls_back(session, monkeypatch, tmp_path, kind):
    from ditron_train.megatron.tp import spec

    right = getattr(spec, f"{kind}_linear")

    def slow(x, weight, **options):
        if dist.get_rank() == 0:
            torch.cuda._sleep(10_000_000)  # about 5 ms on one rank alone
        return right(x, weight, **options)

    monkeypatch.setattr(spec, f"{kind}_linear", slow)
    context, decision = _decisions(monkeypatch, tmp_path, session, kind)
    assert context is None and decision.bits_equal and decision.ditron_us > decision.native_us + 2000
    assert "not faster" in decision.reason


def test_a_plan_saves_the_probe(session, device, monkeypatch, tmp_path):
    paths = [None] * session.world_size
    dist.all_gather_object(paths, str(tmp_path / "plan.json"))
    monkeypatch.setenv("DITRON_PLAN", paths[0])
    calls = []

    def native():
        calls.append("native")
        return [torch.ones(4, device=device)]

    def once():
        forget_plans()
        dist.barrier()
        return decide("tp op", native, native, group=dist.group.WORLD, device=device, sums=torch.bfloat16)

    first = once()
    dist.barrier()
    num_calls = len(calls)
    second = once()
    assert first == second and len(calls) == num_calls + int(first.use_ditron)
    assert list(json.loads(open(paths[0]).read())["decisions"]) == [
        f"tp op on {session.world_size} ranks, ring (strict)"
    ]


def test_probing_a_model_is_quick_and_leaves_no_memory(session, device, capsys):
    """A LLaMA-70B-like model: its four linear layers and the output layer."""
    from ditron_train.tools.verify.cases import model_cases, model_sizes

    cases = model_cases(dataclasses.replace(model_sizes([], True), vocabulary=128256), torch.bfloat16)
    held, seconds, routes = [_memory(session)], [], {}
    for _ in range(2):  # the first makes what stays: symmetric memory, cuBLAS's workspaces
        gate.forget()
        start_s = time.perf_counter()
        routes = {case.name: _route(session, case.kind, (case.m, case.n, case.k)) for case in cases}
        seconds.append(time.perf_counter() - start_s)
        held.append(_memory(session))
    with capsys.disabled():
        if session.rank == 0:
            print(
                f"\nprobe of {len(cases)} layers: {seconds} s; allocated, reserved, symmetric MiB before and after "
                f"each: {held}; the fused path: {[name for name, context in routes.items() if context]}"
            )
    assert seconds[0] < PROBE_LIMIT_S
    allocated, reserved, symmetric = (list(values) for values in zip(*held))
    assert allocated[2] - allocated[1] < 1 and reserved[2] - reserved[1] < 1024  # the last case's inputs are cached
    assert allocated[1] - allocated[0] < 256 + symmetric[1] - symmetric[0]


def _memory(session):
    """MiB: allocated, reserved, symmetric."""
    from ditron_train.tp import get_tp_context

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    arena = get_tp_context(dist.group.WORLD, session.device).arena
    values = torch.cuda.memory_allocated(session.device), torch.cuda.memory_reserved(session.device), arena.num_bytes
    return tuple(round(value / 2**20, 2) for value in values)


def test_strict_costs_nothing_after_its_probe(session, capsys):
    """A LLaMA-70B layer under strict, against force, in turns; strict may be faster where it keeps native layers. What
    counts is the low end of the interval: GPUs that clock differently spread the rounds by more than the limit."""
    from ditron_train.tools.bench.megatron_tp import layer_contenders
    from tests.support.policy_turns import compare_policies, ratio_of

    layers = layer_contenders(session)
    times, natively = compare_policies(session, layers["fused"], layers["native"], rounds=24, calls=3)
    ratio = ratio_of(times["strict"], times["force"])
    with capsys.disabled():
        if session.rank == 0:
            medians = {name: round(statistics.median(values)) for name, values in times.items()}
            print(f"\nlayer forward + backward: {medians} us; strict over force {ratio}; natively {natively}")
    assert ratio.low <= STRICT_OVER_FORCE and ratio.median <= MOST_OF_MEDIAN
