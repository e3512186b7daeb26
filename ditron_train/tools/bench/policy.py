"""Benchmark of the policy: what the probes of ``strict`` cost, and what it costs once they are done, against
``force``, which never probes.

A whole transformer layer, forward and backward, under ``strict`` and under ``force``. The two take turns, a few calls
each, in an order that is reversed from round to round, so that drift of clocks hits both alike; what counts is the
ratio within each round. Native is timed behind them, on its own: it leaves the GPU cooler, and whoever runs after it
is quicker for a while (with native in the turns one of two modes that run the same code was 1.2 % ahead of the other,
95 % interval 0.7 to 1.8 %). Times are the host's, from a barrier to the end of the device's work: what the host does
counts, too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.policy import Gate, gate
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.settings import under_policy
from ditron_train.tools.arguments import add_common_arguments
from ditron_train.tools.nothing_compared import require_compared
from ditron_train.tools.results import Row, write_results
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.stamp import collect_stamp
from ditron_train.tools.tables import show_rows
from ditron_train.tools.timing import Timing

MODES = ("strict", "force")
Run = Callable[[int], object]


@dataclass(frozen=True)
class Ratio:
    """Median of the rounds' ratios, and the interval in which the true one lies with 95 % confidence."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class ProbeCost:
    """Of a layer's first call under ``strict``: the maximum over ranks.

    Attributes:
        first_s: Everything that is made once included: groups, symmetric memory, kernels that were never compiled.
        again_s: With all of that there.
        left_bytes: Memory of tensors that is more after the second than before it.
    """

    first_s: float
    again_s: float
    left_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench policy``."""
    add_common_arguments(parser, model_option=False, counts=False)
    parser.add_argument(
        "--rounds", type=int, default=40, metavar="N", help="how often the contenders take turns (default %(default)s)"
    )
    parser.add_argument("--calls", type=int, default=3, metavar="N", help="calls of each turn (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measures a LLaMA-70B layer; returns 1 where bits differ.

    Raises:
        SettingError: A number of rounds or calls below 1.
        NotSupportedError: megatron-core is not installed, or there is no GPU.
    """
    try:
        from ditron_train.tools.bench.megatron_tp import LAYER_SHAPE, layer_contenders, megatron_world
    except ImportError as error:
        raise NotSupportedError(f"bench policy times layers of megatron-core: {error}") from None
    with bench_session("policy", arguments) as session, megatron_world(session):
        if session.device.type != "cuda":
            raise NotSupportedError("bench policy needs GPUs: in the interpreter nothing is timed")
        contenders = layer_contenders(session)
        cost = probe_cost(session, contenders["ditron"])
        with under_policy("force"):
            equal = session.equal_layer("tp", contenders["ditron"], contenders["native"])
        require_compared({"tp": equal is not None}, "no fused call ran in the layer under DITRON_POLICY=force")
        times, natively = compare_policies(
            session, contenders["ditron"], contenders["native"], rounds=arguments.rounds, calls=arguments.calls
        )
        row = _row(session, times, LAYER_SHAPE, equal)
        return _finish(session, arguments, row, _summary(times, natively, cost))


def probe_cost(session: BenchSession, ours: Run) -> ProbeCost:
    """Has ``strict`` decide about all shapes of ``ours``, and then once more (collective)."""
    on_gpu = session.device.type == "cuda"
    seconds, held = [], []
    with under_policy("strict"):
        for _ in range(2):
            fresh = Gate()
            gate.swap(fresh)
            start_s = time.perf_counter()
            ours(0)
            if on_gpu:
                torch.cuda.synchronize(session.device)
            seconds.append(time.perf_counter() - start_s)
            gate.swap(fresh)
            del fresh
            held.append(torch.cuda.memory_allocated(session.device) if on_gpu else 0)
    mine = torch.tensor([*seconds, held[1] - held[0]], dtype=torch.float64, device=session.device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    first_s, again_s, left_bytes = mine.tolist()
    return ProbeCost(first_s, again_s, int(left_bytes))


def compare_policies(
    session: BenchSession, ours: Run, native: Run, *, rounds: int, calls: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Times ``ours`` under every mode in turns, and then ``native`` (collective).

    Returns:
        us a call in every round by name (``native`` and ``MODES``), the maximum over ranks; and by mode, how many
        shapes it left to the native path.
    """
    gates: dict[str, Gate] = {mode: Gate() for mode in MODES}
    for mode in MODES:
        with under_policy(mode):
            gate.swap(gates[mode])
            ours(0)  # every shape of the layer is decided on here
            gate.swap(gates[mode])

    def under(mode: str) -> Run:
        def decided(index: int) -> None:
            gate.swap(gates[mode])
            ours(index)
            gate.swap(gates[mode])

        return decided

    times = _in_turns(session, {mode: under(mode) for mode in MODES}, rounds, calls)
    times.update(_in_turns(session, {"native": native}, -(-rounds // 4), calls))
    return times, {mode: sum(one.context is None for one in decided.answers()) for mode, decided in gates.items()}


def _in_turns(session: BenchSession, contenders: Mapping[str, Run], rounds: int, calls: int) -> dict[str, list[float]]:
    on_gpu = session.device.type == "cuda"
    measured = []
    for number in range(-1, rounds):  # the first warms up
        names = list(contenders) if number % 2 else list(contenders)[::-1]
        times = dict.fromkeys(contenders, 0.0)
        for name in names:
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize(session.device)
            start_s = time.perf_counter()
            for index in range(calls):
                contenders[name](index)
            if on_gpu:
                torch.cuda.synchronize(session.device)
            times[name] = (time.perf_counter() - start_s) / calls * 1e6
        if number >= 0:
            measured.append(list(times.values()))
    slowest = torch.tensor(measured, dtype=torch.float64, device=session.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(contenders, slowest.t().tolist()))


def ratio_of(times: Sequence[float], of: Sequence[float]) -> Ratio:
    """Ratio of two contenders that took turns, round by round; the interval is that of order statistics of the
    median."""
    ratios = sorted(mine / other for mine, other in zip(times, of, strict=True))
    first = max(math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2), 0)
    return Ratio(statistics.median(ratios), ratios[first], ratios[len(ratios) - 1 - first])


def _summary(times: dict[str, list[float]], natively: dict[str, int], cost: ProbeCost) -> str:
    ratio, rounds = ratio_of(times["strict"], times["force"]), len(times["strict"])
    return (
        f"After its probes `strict` takes {ratio.median:.4f} of the time of `force` (95 % interval {ratio.low:.4f} to "
        f"{ratio.high:.4f}, {rounds} rounds in turns); {natively['strict']} of the layer's shapes stay "
        "native under `strict`. "
        f"Probing them took {cost.first_s:.1f} s with what is made once, {cost.again_s:.1f} s again, and left "
        f"{cost.left_bytes / 2**20:.1f} MiB"
    )


def _row(session: BenchSession, times: dict[str, list[float]], shape: dict[str, int], equal: bool | None) -> Row:
    timings = {name: _timing(values) for name, values in times.items()}
    timings["ditron"] = timings["strict"]
    options: dict[str, Any] = dict(dtype=torch.bfloat16, peer="force", peer_us=timings["force"].median_us)
    return session.row("layer_under_strict", "forward_backward", "LLaMA3.1-70B", shape, timings, equal, **options)


def _timing(values: Sequence[float]) -> Timing:
    """The spread: between every other round and the rest."""
    median, halves = statistics.median(values), (values[::2], values[1::2] or values)
    one, other = map(statistics.median, halves)
    return Timing(median, abs(one - other) / median)


def _finish(session: BenchSession, arguments: argparse.Namespace, row: Row, summary: str) -> int:
    if session.rank == 0:
        stamp = collect_stamp(
            session.device, session.world_size, rounds=arguments.rounds, calls=arguments.calls, summary=summary
        )
        show_rows([row], stamp)
        get_logger("bench").info("%s", summary)
        path = write_results(arguments.output, "policy", stamp, [row])
        get_logger("bench").info("written: %s", path)
    return 0 if row.bitwise_equal else 1
