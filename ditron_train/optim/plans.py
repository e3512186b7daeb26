"""Which products of a Newton-Schulz step run by our kernels: decided once for a shape, by bits and time on this
device."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from ditron_train.gemm.configs import GemmConfig
from ditron_train.optim.graphs import MAX_GRAPH_ELEMENTS, Steps, make_graph
from ditron_train.optim.products import (
    ProductPlan,
    addmm,
    addmm_choices,
    gram,
    newton_schulz_step,
    scaled_square,
    symmetric_choices,
)
from ditron_train.policy import Decision, Function, Op, gate
from ditron_train.policy.op import dtype_name
from ditron_train.runtime.device import is_interpreter, kernel_target, with_index
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.values import have_same_bits

ProductMode = Literal["strict", "force", "native"]

_MIN_ROWS = 512  # below, launches take longer than the products
_ALIGNED_ELEMENTS = 8  # rows of 16 bytes: other shapes would need padded copies, at which cuBLAS chooses otherwise
_HEAD_START_CYCLES = 2_000_000  # about a millisecond of the GPU's clock
_MIN_GAIN = 1.02  # a kernel must win by more than the timer's noise
_LONG_US = 2000.0  # of one product: measured once instead of five times
_HOST_BOUND_US = 500.0  # of one step on the device: below, the host's time for launches may be what counts
_COEFFICIENTS = (4.0848, -6.8946, 2.9270)
_NUM_STEPS = 5

_NATIVE = ProductPlan(False, False, False, "native products were asked for")
_FORCED = ProductPlan(True, True, True, "our products were asked for")


def _device_us(function: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Time of one call on ``device``, the best of three averages; the host is kept ahead, so its cost does not
    count."""

    def once(repetitions: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        for _ in range(repetitions):
            function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) * 1e3 / repetitions

    once(1)  # compiles
    repetitions = 1 if once(1) > _LONG_US else 5
    return min(once(repetitions) for _ in range(3))


def _wall_us(function: Callable[[], torch.Tensor], device: torch.device, repetitions: int = 5) -> float:
    """Time of one call as a program that only calls it sees it, host included; the best of three averages."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repetitions):
            function()
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e6 / repetitions)
    return min(times)


def _measure_products(x: torch.Tensor, native_xs: list[torch.Tensor]) -> tuple[ProductPlan, list[str], float]:
    """Compares bits, then times, of each product on random data, over the tile sizes worth trying: which run by our
    kernels, words for the log, time of all three in us."""
    device = x.device
    m, n = x.shape
    a, b, c = _COEFFICIENTS
    a_matrix = x @ x.mT
    natives = (
        lambda x: x @ x.mT,
        lambda x: torch.addmm(a_matrix, a_matrix, a_matrix, beta=b, alpha=c),
        lambda x: torch.addmm(x, a_matrix, x, beta=a),
    )
    fused = (
        lambda config: gram(x, config=config),
        lambda config: scaled_square(a_matrix, b, c, config=config),
        lambda config: addmm(x, a_matrix, x, alpha=1.0, beta=a, config=config),
    )
    choices = (
        symmetric_choices(m, n, x.dtype, device),
        symmetric_choices(m, m, x.dtype, device),
        addmm_choices(m, n, m, x.dtype, device),
    )
    uses: list[bool] = []
    configs: list[GemmConfig | None] = []
    words, step_us = [], 0.0
    for name, native, our, tried in zip(("gram", "square", "update"), natives, fused, choices):
        expected = [native(native_x) for native_x in native_xs]
        equal = [config for config in tried if all(have_same_bits(our(config), result) for result in expected)]
        del expected
        native_us = _device_us(lambda: native(x), device)  # noqa: B023  (called in this turn)
        times_us = {config: _device_us(lambda: our(config), device) for config in equal}  # noqa: B023
        best = min(equal, key=times_us.__getitem__, default=None)
        configs.append(best)
        if best is None:
            uses.append(False)
            step_us += native_us
            words.append(f"{name}: other bits")
            continue
        gain = native_us / times_us[best]
        uses.append(gain >= _MIN_GAIN)
        step_us += min(native_us, times_us[best])
        words.append(f"{name}: {gain:.2f}x ({best.block_m}x{best.block_n} by {best.num_warps} warps)")
    use_gram, use_square, use_addmm = uses
    of_gram, of_square, of_addmm = configs
    plan = ProductPlan(use_gram, use_square, use_addmm, reason="", configs=(of_gram, of_square, of_addmm))
    return plan, words, step_us


def _measure(m: int, n: int, dtype: torch.dtype, device: torch.device, transposed: bool) -> ProductPlan:
    """Chooses the products of one shape by bits and time, and whether to launch them as a graph.

    Native's X is a transposed view in the first step of a matrix with more rows than columns, and contiguous later:
    the fused path must have the bits of both. Launches cost the host more than the device takes for short steps: these
    are timed as a whole, host included, by single launches of cuBLAS, of the chosen products and as a graph.
    """
    x = _random_matrix(m, n, dtype, device)
    plan, words, step_us = _NATIVE, ["cuBLAS serves this type, size or alignment better"], 0.0
    if _has_kernels(m, n, dtype):
        plan, words, step_us = _measure_products(x, [x, x.t().contiguous().t()] if transposed else [x])
    plan = replace(plan, reason=", ".join(words))
    if step_us > _HOST_BOUND_US or m * n > MAX_GRAPH_ELEMENTS:
        return plan
    steps = Steps(m, n, dtype, device, False, (_COEFFICIENTS,) * _NUM_STEPS, plan)
    native = steps._replace(plan=_NATIVE)
    native_us = _wall_us(lambda: native(x), device)
    single_us = _wall_us(lambda: steps(x), device) if any(plan.uses) else native_us
    words.append(f"with the host: {native_us / single_us:.2f}x")
    graph = make_graph(steps)
    graph_us = _wall_us(graph.replay, device) if graph is not None else float("inf")
    if graph is not None:
        words.append(f"as a graph: {native_us / graph_us:.2f}x")
    if graph_us < min(single_us, native_us):
        return replace(plan, reason=", ".join(words), use_graph=True)
    return replace(plan if single_us < native_us else _NATIVE, reason=", ".join(words))


def _random_matrix(m: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(1)
    return torch.empty(m, n, dtype=dtype, device=device).normal_(std=(m * n) ** -0.5, generator=generator)


def _has_kernels(m: int, n: int, dtype: torch.dtype) -> bool:
    """Whether our products can win: their types, more than a wave of tiles, no padded copies."""
    aligned = m % _ALIGNED_ELEMENTS == 0 and n % _ALIGNED_ELEMENTS == 0
    return dtype in (torch.bfloat16, torch.float16) and m >= _MIN_ROWS and aligned


class StepCall(NamedTuple):
    """A Newton-Schulz step of one matrix ``[m, n]`` (m <= n); ``transposed``: the matrix has more rows than columns,
    so the path without our kernels begins with a transposed view."""

    m: int
    n: int
    dtype: torch.dtype
    device: torch.device
    transposed: bool


class NewtonSchulzOp(Op[StepCall, ProductPlan]):
    """The three products of a step. The choice cannot make ranks differ, since it changes no bit: each process decides
    alone, product by product, and the context is what it chose."""

    name = "muon newton_schulz"
    logs_native = False  # a product by torch is no other path of the optimizer

    def group(self, call: StepCall) -> None:
        """None: each process decides alone."""

    def device(self, call: StepCall) -> torch.device:
        return call.device

    def key(self, call: StepCall) -> tuple[Hashable, ...]:
        return call.m, call.n, call.dtype, with_index(call.device).index, call.transposed

    def unsupported_reason(self, call: StepCall) -> str | None:
        if call.device.type != "cuda" or is_interpreter():
            return "no GPU: whole products of torch"
        if not _has_kernels(call.m, call.n, call.dtype) and call.m * call.n > MAX_GRAPH_ELEMENTS:
            return "a type, size or alignment that cuBLAS serves better"
        return None

    def make_context(self, call: StepCall) -> ProductPlan:
        """Measured here."""
        device = with_index(call.device)
        with torch.cuda.device(device):
            plan = _measure(call.m, call.n, call.dtype, device, call.transposed)
        path = "fused" if any(plan.uses) or plan.use_graph else "native"
        log_once(
            f"newton_schulz {self.key(call)}",
            f"Newton-Schulz {call.m} x {call.n}: {path}, {plan.reason}",
            name="ditron_train.optim",
        )
        return plan

    def decide(self, call: StepCall, context: ProductPlan) -> Decision:
        """The plan says it product by product."""
        return Decision(True, context.reason, None, None, None)

    def describe(self, call: StepCall, context: ProductPlan) -> str:
        return f"{self.name} {call.m}x{call.n} {dtype_name(call.dtype)}"

    def inputs(self, call: StepCall) -> Sequence[torch.Tensor]:
        """A random matrix."""
        return (_random_matrix(call.m, call.n, call.dtype, call.device),)

    def native(self, call: StepCall) -> Function:
        """Products of torch."""
        return lambda x: [newton_schulz_step(x, *_COEFFICIENTS, _NATIVE)]

    def fused(self, call: StepCall, context: ProductPlan) -> Function:
        return lambda x: [newton_schulz_step(x, *_COEFFICIENTS, context)]


NEWTON_SCHULZ = NewtonSchulzOp()
OPS: Sequence[Op[Any, Any]] = (NEWTON_SCHULZ,)


@outside_compile
def plan_products(
    m: int, n: int, dtype: torch.dtype, device: torch.device, mode: ProductMode = "strict", *, transposed: bool = False
) -> ProductPlan:
    """Decides, once for a shape, which products of an [m, n] step (m <= n) run by our kernels.

    ``strict``: those whose bits equal cuBLAS's and whose time is lower, both seen on this device with random data.
    ``force``: all. ``native``: none. The choice cannot make ranks differ, since it does not change bits.
    ``transposed``: the matrix has more rows than columns, so native begins with a transposed view.

    Raises:
        NotSupportedError: An unknown mode, or ``force`` if there is no kernel.
    """
    if mode == "native":
        return _NATIVE
    if mode == "force":
        kernel_target(device)
        return _FORCED
    if mode != "strict":
        raise NotSupportedError(f"mode {mode!r} is not strict, force or native")
    answer = gate.answer_for(NEWTON_SCHULZ, StepCall(m, n, dtype, device, transposed))
    return ProductPlan(False, False, False, answer.reason or "") if answer.context is None else answer.context
