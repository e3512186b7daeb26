"""Benchmark of expert parallelism: dispatch, combine, the experts' GEMMs and the whole MoE layer, balanced and skewed.

Native is megatron-core's alltoall dispatcher, with Transformer Engine's fused permutation and grouped GEMM where TE is
installed; without it PyTorch's deterministic mode, whose bits repeat. Both run in one process on the same inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.data import load_workloads
from ditron_train.runtime.errors import NotSupportedError, SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.versions import pip_command
from ditron_train.tools.arguments import add_common_arguments, check_sizes, choose_models
from ditron_train.tools.op_rows import WIRE_GBPS
from ditron_train.tools.results import Pass, Row
from ditron_train.tools.session import BenchSession, Sink, bench_session, under_policy
from ditron_train.tools.timing import Timing

__all__ = ["add_arguments", "moe_contenders", "run"]

_MOST_ZIPF = 8.0  # above, all tokens go to the same experts
_PARTS = ("dispatch", "combine", "group_gemm", "layer")


@dataclass(frozen=True)
class Case:
    """One MoE layer: tokens of each rank, experts of all ranks, and how unevenly they are chosen (0: evenly).

    ``deterministic``: natively PyTorch's deterministic mode without fused permutation, whatever is installed.
    """

    model: str
    tokens_per_rank: int
    hidden: int
    ffn_hidden: int
    num_experts: int
    topk: int
    zipf: float = 0.0
    deterministic: bool = False

    @property
    def shape(self) -> dict[str, int]:
        """As it stands in a row."""
        return {
            "tokens_per_rank": self.tokens_per_rank,
            "hidden": self.hidden,
            "ffn_hidden": self.ffn_hidden,
            "num_experts": self.num_experts,
            "topk": self.topk,
        }

    def check(self, world_size: int) -> None:
        """Raises SettingError for experts that ``world_size`` ranks cannot share out, or too few to choose ``topk``
        of."""
        if self.num_experts % world_size:
            raise SettingError(f"{self.num_experts} experts do not divide over {world_size} ranks")
        if self.topk > self.num_experts:
            raise SettingError(f"there are no {self.topk} experts to choose among {self.num_experts}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench ep``."""
    add_common_arguments(parser)
    parser.add_argument("--part", action="append", choices=_PARTS, help="only this part (may be repeated)")
    parser.add_argument(
        "--shape",
        nargs=5,
        type=int,
        action="append",
        metavar=("TOKENS", "HIDDEN", "FFN", "EXPERTS", "TOPK"),
        help="instead of workloads.json's: tokens of each rank, experts of all (may be repeated)",
    )
    parser.add_argument(
        "--no-deterministic",
        action="store_true",
        help="leave PyTorch's deterministic mode out, tried at the first model",
    )
    parser.add_argument(
        "--zipf", type=float, default=1.0, metavar="S", help="exponent of the skewed routing (default %(default)s)"
    )


def _cases(arguments: argparse.Namespace, session: BenchSession) -> list[Case]:
    w = session.world_size
    check_sizes("--shape", arguments.shape)
    if not 0 <= arguments.zipf <= _MOST_ZIPF:
        raise SettingError(f"--zipf has to be from 0 to {_MOST_ZIPF}")
    if arguments.shape:
        cases = [Case("custom", *shape) for shape in arguments.shape]
        for case in cases:
            case.check(w)
    elif session.device.type == "cpu":
        cases = [Case("small", 24, 32, 48, 4 * w, 2)]
    else:
        data = load_workloads()
        ep = data["ep"]
        tokens, topk, hidden = ep["tokens_per_rank"], ep["topk"], ep["hidden"]
        cases = [
            Case("facts", tokens, hidden, 2048, 128, topk),
            Case("weak scaling", tokens, hidden, 2048, ep["weak_scaling_experts_per_rank"] * w, topk),
            Case("strong scaling", tokens, hidden, 2048, ep["strong_scaling_experts_total"], topk),
            *(
                Case(s["model"], s["num_tokens"] // w, s["hidden"], s["intermediate"], s["num_experts"], s["topk"])
                for s in data["moe"]["shapes"]
            ),
        ]
        cases = [case for case in cases if case.num_experts % w == 0]
    models = [case.model for case in cases]
    chosen = [case for model in choose_models(arguments.model, models) for case in cases if case.model == model]
    variants = [replace(case, zipf=zipf) for case in chosen for zipf in (0.0, arguments.zipf)]
    if arguments.no_deterministic:
        return variants
    return variants + [replace(case, deterministic=True) for case in chosen if case.model == models[0]]


@contextmanager
def _deterministic(is_on: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(is_on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = not is_on  # type: ignore[attr-defined]  # it would fill buffers that are being written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def run(arguments: argparse.Namespace, sink: Sink | None = None) -> int:
    """Measures what the command line asks for, shows and writes it or gives it to ``sink``; returns 1 where bits
    differ.

    Raises:
        SettingError: An unknown model, sizes that cannot be, or a single rank, which dispatches nothing.
        NotSupportedError: megatron-core is not installed.
    """
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        raise NotSupportedError(f"bench ep needs megatron-core: {pip_command('megatron-core')}") from None
    from ditron_train.tools.bench.megatron_ep import HAVE_TE, expert_parallel_world

    parts = arguments.part or _PARTS
    with bench_session("ep", arguments, sink) as session, expert_parallel_world():
        if session.world_size < 2:
            raise SettingError("bench ep takes 2 ranks or more: torchrun --nproc-per-node N -m ditron_train bench ep")
        if not HAVE_TE:
            get_logger("bench").info(
                "Transformer Engine is not installed: native runs in PyTorch's deterministic mode"
            )
        for case in _cases(arguments, session):
            with _deterministic(case.deterministic or not HAVE_TE):
                for row in _rows(session, case, parts):
                    session.add(row)
            session.save()
            if session.device.type == "cuda":
                torch.cuda.empty_cache()
        return session.finish()


def _rows(session: BenchSession, case: Case, parts: tuple[str, ...]) -> Iterator[Row]:
    from ditron_train.tools.bench.megatron_ep import moe_config

    config = moe_config(
        hidden=case.hidden, ffn_hidden=case.ffn_hidden, num_experts=case.num_experts, topk=case.topk,
        dtype=session.dtype, fused=False if case.deterministic else None,
    )  # fmt: skip
    if "dispatch" in parts or "combine" in parts:
        with torch.no_grad(), under_policy("force"):  # ours wherever it can: this is what the policy would measure
            yield from _movement_rows(session, case, config, parts)
    if "group_gemm" in parts and not case.deterministic:
        yield from _gemm_rows(session, case)
    if "layer" in parts:
        with under_policy("strict"):  # what a user gets
            yield from _layer_rows(session, case, config)


def busiest_link(amounts: torch.Tensor) -> float:
    """What the rank that sends or receives most has on its links, of ``[source, destination]`` amounts; its own do not
    count."""
    others = amounts * (1 - torch.eye(len(amounts), dtype=amounts.dtype, device=amounts.device))
    return float(torch.maximum(others.sum(0).max(), others.sum(1).max()))


def _bytes_moved(case: Case, routed: torch.Tensor, dtype: torch.dtype) -> tuple[float, float, float]:
    """Bytes of distinct (token, rank) rows on the busiest link; the most that one rank has of them, its own included;
    bytes of (token, expert) copies on the busiest link."""
    w = dist.get_world_size()
    per_rank = routed.view(len(routed), w, -1).sum(2)
    mine = torch.stack([(per_rank > 0).sum(0), per_rank.sum(0)])
    everyone = [torch.empty_like(mine) for _ in range(w)]
    dist.all_gather(everyone, mine)
    distinct, copies = torch.stack(everyone, 1).double()
    rows = busiest_link(distinct), float(distinct.sum(1).max()), busiest_link(copies)
    link, most, copied = (number * case.hidden * dtype.itemsize for number in rows)
    return link, most, copied


def _movement_rows(session: BenchSession, case: Case, config: object, parts: tuple[str, ...]) -> Iterator[Row]:
    from ditron_train.ep import combine
    from ditron_train.tools.bench.megatron_ep import DispatcherPair, zipf_routing

    pair = DispatcherPair(config)
    generator = torch.Generator(session.device).manual_seed(session.rank)
    x = torch.empty(case.tokens_per_rank, case.hidden, device=session.device, dtype=session.dtype).normal_(
        generator=generator
    )
    routed, probs = zipf_routing(
        case.tokens_per_rank, case.num_experts, case.topk, exponent=case.zipf, device=session.device, seed=session.rank
    )
    distinct, logical, copies = _bytes_moved(case, routed, session.dtype)
    results = {name: pair.dispatch(name, x, routed, probs) for name in ("native", "ditron")}
    dispatcher: Any = pair.ditron
    (layout, order), context = dispatcher.dispatched, dispatcher.ep_context
    comm_sms = 0 if context.target == "interpreter" else context.move.num_senders
    rows = results["native"][0].clone()
    equal = session.equal(results["ditron"], results["native"])
    del results
    if "dispatch" in parts:
        timings = session.measure({n: lambda i, n=n: pair.dispatch(n, x, routed, probs) for n in ("native", "ditron")})
        yield _row(session, "dispatch", "forward", case, equal, timings, comm_sms, wire=distinct, logical=logical)
    if "combine" in parts:
        pair.dispatch("native", x, routed, probs)
        contenders = {
            "native": lambda i: pair.combine("native", rows),
            "ditron": lambda i: combine(rows, layout, context, order=order)[0],
        }
        equal = session.equal([contenders["ditron"](0)], [contenders["native"](0)])
        timings = session.measure(contenders)
        yield _row(session, "combine", "forward", case, equal, timings, comm_sms, wire=copies)
    context.check()


def _fewest_rows(counts: torch.Tensor, device: torch.device) -> int | None:
    """What decides whether a layer takes our GEMMs; None on CPU, where the values are integers and every sum exact."""
    return None if device.type == "cpu" else int(counts[counts > 0].min())


def _gemm_rows(session: BenchSession, case: Case) -> Iterator[Row]:
    from ditron_train.tools.bench.ep_gemm import group_gemm_rows, products_of_native_bits
    from ditron_train.tools.bench.megatron_ep import zipf_routing

    routed, _ = zipf_routing(
        case.tokens_per_rank, case.num_experts, case.topk, exponent=case.zipf, device=session.device, seed=session.rank
    )
    counts = routed.sum(0)
    dist.all_reduce(counts)
    fewest = _fewest_rows(counts, session.device)
    mine = counts.view(session.world_size, -1)[session.rank].tolist()
    for n, k in ((2 * case.ffn_hidden, case.hidden), (case.hidden, case.ffn_hidden)):
        products = products_of_native_bits(fewest, n, k)
        if len(products) < 3:
            get_logger("bench").info(
                "%s, experts %dx%d: of our grouped GEMMs %s measured, an expert has %d rows "
                "and a layer leaves the others native",
                _model(case), n, k, "only wgrad is" if products else "none is", fewest,
            )  # fmt: skip
        yield from group_gemm_rows(
            session, model=_model(case), shape=case.shape, counts=mine, products=products, n=n, k=k
        )


def _model(case: Case) -> str:
    words = [case.model, f"Zipf {case.zipf:g}" if case.zipf else "", "deterministic" if case.deterministic else ""]
    return ", ".join(word for word in words if word)


class _MoeLayers:
    """A MoE layer, native and with ``ep``, forward, and forward and backward, on the same values."""

    def __init__(self, session: BenchSession, case: Case, config: object) -> None:
        from ditron_train.tools.bench.megatron_ep import layer_pair, zipf_routing

        self.layers = layer_pair(config, session.device)
        generator = torch.Generator(session.device).manual_seed(session.rank)
        shape = (case.tokens_per_rank, 1, case.hidden)
        self._x, self._grad = (
            torch.empty(shape, device=session.device, dtype=session.dtype).normal_(generator=generator)
            for _ in range(2)
        )
        self._is_routed = bool(case.zipf)
        if case.zipf:  # a router with random weights routes evenly: this one's choice is given
            routed, probs = zipf_routing(
                case.tokens_per_rank,
                case.num_experts,
                case.topk,
                exponent=case.zipf,
                device=session.device,
                seed=session.rank,
            )
            for layer in self.layers.values():
                layer.route = lambda hidden_states, padding_mask=None: (probs, routed)  # type: ignore[assignment]

    def forward(self, name: str) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.layers[name](self._x)[0]]

    def forward_backward(self, name: str) -> list[torch.Tensor]:
        leaf = self._x.detach().requires_grad_()
        y, _ = self.layers[name](leaf)
        named = self.layers[name].named_parameters()
        parameters = [parameter for key, parameter in named if not (self._is_routed and key.startswith("router"))]
        return [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], self._grad)]


@contextmanager
def moe_contenders(session: BenchSession) -> Iterator[dict[str, Callable[[int], list[torch.Tensor]]]]:
    """Forward and backward of one MoE layer, ``native`` and ``ditron``, on the same values."""
    from ditron_train.tools.bench.megatron_ep import HAVE_TE, expert_parallel_world, moe_config

    on_gpu = session.device.type == "cuda"
    case = (
        Case("traced", 8192, 7168, 2048, 128, 8) if on_gpu else Case("traced", 24, 32, 48, 4 * session.world_size, 2)
    )
    case.check(session.world_size)
    sizes: dict[str, Any] = dict(
        hidden=case.hidden, ffn_hidden=case.ffn_hidden, num_experts=case.num_experts, topk=case.topk
    )
    with expert_parallel_world(), _deterministic(not HAVE_TE), under_policy("strict"):
        pair = _MoeLayers(session, case, moe_config(**sizes, dtype=session.dtype))
        yield {name: lambda index, n=name: pair.forward_backward(n) for name in pair.layers}


def _layer_rows(session: BenchSession, case: Case, config: object) -> Iterator[Row]:
    pair = _MoeLayers(session, case, config)
    direction: Pass
    for direction, body in (("forward", pair.forward), ("forward_backward", pair.forward_backward)):
        ours, native = body("ditron"), body("native")
        equal = session.equal(ours, native)
        del ours, native
        timings = session.measure({name: lambda i, n=name, run=body: run(n) for name in pair.layers})
        yield _row(session, "moe_layer", direction, case, equal, timings, _comm_sms(pair.layers["ditron"]))


def _comm_sms(layer: Any) -> int:
    context = layer.token_dispatcher.ep_context
    return 0 if context is None or context.target == "interpreter" else context.move.num_senders


def _row(
    session: BenchSession,
    op: str,
    direction: Pass,
    case: Case,
    equal: bool,
    timings: dict[str, Timing],
    comm_sms: int,
    *,
    wire: float | None = None,
    logical: float | None = None,
) -> Row:
    ditron_us = timings["ditron"].median_us
    on_gpu = session.device.type == "cuda"
    return session.row(
        op, direction, _model(case), case.shape, timings, equal,
        comm_sms=comm_sms,
        limit_us=wire / WIRE_GBPS / 1e3 if wire and on_gpu else None,
        wire_gbps=None if wire is None else wire / ditron_us / 1e3,
        logical_gbps=None if logical is None else logical / ditron_us / 1e3,
    )  # fmt: skip
