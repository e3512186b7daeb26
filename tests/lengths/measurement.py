"""What ``python -m tests.lengths`` measures: Megatron's linear layers of a transformer layer, native and fused.

The lengths follow a GRPO run: 64 samples a step (log-normal responses), packed to a budget of tokens, each sequence
padded to the group. Native and fused layers share weights, and outputs and gradients of every microbatch are compared.
A few layers stand for all of the model: the first pass of a microbatch, with its proofs of bits and whatever else a
new length costs, stands for so many layers, and a second pass for the other layers, by both paths. Attention is left
out, and so is the time to compile.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig

from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS
from ditron_train.megatron.tp.layers import class_map
from ditron_train.policy import gate
from ditron_train.policy.lengths import Family, Lengths
from ditron_train.runtime.settings import under_policy
from ditron_train.symm.arena import peak_bytes
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession, same_result

_SAMPLES, _MEAN, _SIGMA, _PROMPT = 64, 1500 / 8192, 0.6, (100, 1000)  # of a step; mean in budgets
_HOST_CALLS = 20


class _Model(NamedTuple):
    """Features of a layer's four linear layers, before they are divided over ranks."""

    hidden: int
    qkv: int
    attended: int
    ffn: int
    layers: int


MODELS = {
    "LLaMA3.1-8B": _Model(4096, 6144, 4096, 14336, 32),
    "Qwen3-32B": _Model(5120, 10240, 8192, 25600, 64),
    "tiny": _Model(32, 48, 32, 64, 2),
}


def lengths_of(num_microbatches: int, budget: int, multiple: int) -> list[int]:
    """Tokens of each microbatch, alike on all ranks."""
    rng = random.Random(1)
    found: list[int] = []
    while len(found) < num_microbatches:
        responses = (rng.lognormvariate(math.log(_MEAN * budget), _SIGMA) for _ in range(_SAMPLES))
        prompts = (rng.randint(*_PROMPT) * budget / 8192 for _ in range(_SAMPLES))
        samples = sorted((min(budget, int(a + b) + 1) for a, b in zip(responses, prompts)), reverse=True)
        samples = [min(budget // multiple, -(-length // multiple)) * multiple for length in samples]
        num_bins = max(1, math.ceil(sum(samples) / budget))
        while max(bins := _balanced(samples, num_bins)) > budget:
            num_bins += 1
        found += bins
    return found[:num_microbatches]


def _balanced(samples: Sequence[int], num_bins: int) -> list[int]:
    bins = [0] * num_bins
    for length in samples:
        bins[bins.index(min(bins))] += length
    return bins


class _Layers:
    """The four linear layers, native and fused, on the same weights and data."""

    def __init__(self, session: BenchSession, model: _Model, budget: int) -> None:
        self._session, world = session, session.world_size
        config = TransformerConfig(
            num_layers=1, hidden_size=model.hidden, num_attention_heads=8, tensor_model_parallel_size=world,
            sequence_parallel=True, params_dtype=session.dtype, bf16=session.dtype == torch.bfloat16,
            gradient_accumulation_fusion=False, add_bias_linear=False, use_cpu_initialization=True,
            perform_initialization=False,
        )  # fmt: skip
        shapes = {
            (ColumnParallelLinear, model.hidden, model.qkv): "gather_output",
            (RowParallelLinear, model.attended, model.hidden): "input_is_parallel",
            (ColumnParallelLinear, model.hidden, 2 * model.ffn): "gather_output",
            (RowParallelLinear, model.ffn, model.hidden): "input_is_parallel",
        }
        group = parallel_state.get_tensor_model_parallel_group()
        self._linears: list[tuple[Any, Any, torch.Tensor, torch.Tensor]] = []
        for seed, ((kind, k, n), option) in enumerate(shapes.items()):
            options = {option: option == "input_is_parallel", "skip_bias_add": False, "tp_group": group}
            pair = [one(k, n, config=config, init_method=lambda w: w, bias=False, **options).to(session.device)
                    for one in (kind, class_map()[kind])]  # fmt: skip
            is_column = kind is ColumnParallelLinear
            pair[0].weight.data.copy_(session.values(tuple(pair[0].weight.shape), session.dtype, seed))
            pair[1].weight = pair[0].weight
            x_shape = (budget // world, 1, k) if is_column else (budget, 1, k // world)
            y_shape = (budget, 1, n // world) if is_column else (budget // world, 1, n)
            values = (session.values(shape, session.dtype, 10 + seed) for shape in (x_shape, y_shape))
            self._linears.append((*pair, *values))
        self._budget = budget

    def run(self, is_fused: bool, tokens: int, num_layers: int, has_backward: bool = True) -> list[torch.Tensor]:
        """Forward of all layers, then backward; results and gradients of the first layer and of the last."""
        kept, pending = [], []
        with torch.set_grad_enabled(has_backward):
            for index in range(num_layers):
                for native, fused, inputs, grads in self._linears:
                    layer = fused if is_fused else native
                    x, grad = (one[: len(one) * tokens // self._budget] for one in (inputs, grads))
                    x = x.detach().requires_grad_(has_backward)
                    y, _ = layer(x)
                    pending.append((index in (0, num_layers - 1), y, (x, layer.weight), grad))
            while pending:
                keeps, y, leaves, grad = pending.pop()
                found = [y.detach(), *(torch.autograd.grad(y, leaves, grad) if has_backward else ())]
                kept += found if keeps else []
        return kept


class _Timed(NamedTuple):
    us: float
    proof_us: float
    host_us: float
    model_us: float
    results: list[torch.Tensor]


class _Clock:
    """Times passes; what a pass spends on proofs is counted apart."""

    def __init__(self, session: BenchSession, layers: _Layers) -> None:
        self._device, self._layers, self._proof_us = session.device, layers, 0.0
        self.peak_bytes = {False: 0, True: 0}

    def _synchronize(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() * 1e6

    @contextmanager
    def proofs(self) -> Iterator[None]:
        """Inside, proofs are timed."""

        def timed(family: Family, rows: int) -> None:
            begun_us = self._synchronize()
            Lengths.prove(gate.lengths, family, rows)
            self._proof_us += self._synchronize() - begun_us

        gate.lengths.prove = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            del gate.lengths.prove

    def run(self, is_fused: bool, tokens: int, num_layers: int, num_more: int = 0) -> _Timed:
        """A pass of ``_Layers.run``, and what it takes in a model that has ``num_more`` layers beside these."""
        self._proof_us, begun_us = 0.0, self._synchronize()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            held = torch.cuda.memory_allocated(self._device)
        results = self._layers.run(is_fused, tokens, num_layers)
        host_us = time.perf_counter() * 1e6 - begun_us - self._proof_us
        us = self._synchronize() - begun_us
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - held
            self.peak_bytes[is_fused] = max(self.peak_bytes[is_fused], peak)
        proof_us, model_us = self._proof_us, us
        if num_more:
            begun_us = self._synchronize()
            self._layers.run(is_fused, tokens, num_layers)
            model_us += (self._synchronize() - begun_us) * num_more / num_layers
        return _Timed(us, proof_us, host_us, model_us, results)


def fixed_gain(session: BenchSession, arguments: argparse.Namespace, name: str) -> float:
    """By how much fused passes of the most tokens are faster than native ones, before lengths vary in this process."""
    clock = _Clock(session, _Layers(session, MODELS[name], arguments.budget))
    gate.forget("tp")
    rounds = 22 if session.device.type == "cuda" else 2
    sizes = arguments.budget, arguments.steady_layers
    fixed = [[clock.run(is_fused, *sizes).us for is_fused in (False, True)] for _ in range(rounds)]
    return _sum(fixed[rounds // 10 :], 0) / _sum(fixed[rounds // 10 :], 1) - 1


def measured_row(session: BenchSession, arguments: argparse.Namespace, name: str, fixed_gain: float) -> Row:
    """Native and fused passes at the lengths of an RL job, and what became of the decisions."""
    layers = _Layers(session, MODELS[name], arguments.budget)
    clock = _Clock(session, layers)
    with clock.proofs(), mock.patch.dict(os.environ, DITRON_ROWS=str(arguments.budget)):
        return _measured(session, arguments, name, layers, clock, fixed_gain)


def _measured(
    session: BenchSession, arguments: argparse.Namespace, name: str, layers: _Layers, clock: _Clock, fixed_gain: float
) -> Row:
    model, budget, steady_layers = MODELS[name], arguments.budget, arguments.steady_layers
    FUSED_CALLS.install(("tp",))
    lengths = lengths_of(arguments.microbatches, budget, session.world_size)
    with under_policy("force"):  # compiles
        gate.forget("tp")
        for tokens in (budget, *lengths[-24:]):
            layers.run(True, tokens, 1)
    gate.forget("tp")
    clock.peak_bytes = {False: 0, True: 0}
    FUSED_CALLS.take()
    equal = True
    first: list[tuple[float, float]] = []
    steady: list[tuple[float, float]] = []
    proofs: list[float] = []
    for number, tokens in enumerate(lengths):
        is_first = number < arguments.first
        num_layers = arguments.first_layers if is_first else steady_layers
        if number == 2 * arguments.first:
            FUSED_CALLS.take()
        num_more = model.layers - num_layers
        native, fused = (clock.run(is_fused, tokens, num_layers, num_more) for is_fused in (False, True))
        equal &= len(native.results) == len(fused.results) and all(map(same_result, fused.results, native.results))
        if fused.proof_us:
            proofs.append(fused.proof_us)
        if is_first or number >= 2 * arguments.first:
            (first if is_first else steady).append((native.model_us, fused.model_us))
        del native, fused
    fused_calls = FUSED_CALLS.take().get("tp", 0)
    measured = [family for family in gate.lengths.families.values() if family.is_open]
    proven = {rows: all(one.proven.get(rows, True) for one in measured) for one in measured for rows in one.proven}
    seen = set(lengths)
    figures = {
        "differing_lengths": len(proven) - sum(proven.values()),
        "first_speedup": _sum(first, 0) / max(_sum(first, 1), 1e-9),
        "fixed_gain": fixed_gain,
        "gain_share": (_sum(steady, 0) / max(_sum(steady, 1), 1e-9) - 1) / fixed_gain,
        "proof_us": statistics.median(proofs) if proofs else 0.0,
        "host_ratio": _host_ratio(clock, budget, session.world_size, seen, is_fused=True),
        "native_host_ratio": _host_ratio(clock, budget, session.world_size, seen, is_fused=False),
        "excess_gib": max(0, clock.peak_bytes[True] - clock.peak_bytes[False]) / 2**30,
        "symmetric_gib": peak_bytes() / 2**30,
    }
    return Row(
        op="linear_layers of lengths that vary", direction="forward_backward", model=name,
        world_size=session.world_size, dtype=str(session.dtype).removeprefix("torch."), comm_sms=0,
        shape={"budget": budget}, fused_share=fused_calls / (2 * 4 * steady_layers * len(steady)),
        distinct_lengths=sum(proven.values()),
        native_us=_sum(steady, 0) / len(steady) / model.layers,
        ditron_us=_sum(steady, 1) / len(steady) / model.layers,
        bitwise_equal=session.agree(equal), lengths={key: round(value, 4) for key, value in figures.items()},
    )  # fmt: skip


def _host_ratio(clock: _Clock, budget: int, multiple: int, seen: set[int], *, is_fused: bool) -> float:
    """Time of the host for a pass at a new length, its proof apart, in times of a pass at the same length again;
    cuBLAS chooses an algorithm at each new one, natively and fused."""
    fresh = (tokens for tokens in range(budget * 7 // 8, budget, multiple) if tokens not in seen)
    ratios = []
    for tokens, _ in zip(fresh, range(_HOST_CALLS)):
        seen.add(tokens)
        new, known = (clock.run(is_fused, tokens, 1).host_us for _ in range(2))
        ratios.append(new / known)
    return statistics.median(ratios) if ratios else 0.0


def _sum(times: Sequence[Sequence[float]], column: int) -> float:
    return sum(one[column] for one in times)
