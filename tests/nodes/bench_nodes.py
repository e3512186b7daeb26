"""Benchmark of every package over nodes: simulated ones, or real ones under torchrun.

    python tests/nodes/simulated_nodes.py --rate-mbit 1400 -m tests.nodes.bench_nodes

Each row has stock Megatron, the fused path (``peer``), and what ``strict`` runs here after its own comparison of bits
and times, which on the CPU takes place, too. Rows say how often one call of the fused path sent something.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.policy import Op, fused_results, gate, native_results
from ditron_train.runtime.errors import NotSupportedError, SettingError, user_errors
from ditron_train.runtime.groups import world_group
from ditron_train.runtime.settings import under_policy
from ditron_train.symm.exchange import exchange
from ditron_train.symm.nodes import NodeGroups, node_groups
from ditron_train.tools.arguments import add_common_arguments
from ditron_train.tools.cases import Pass, RunEnvironment, Shape
from ditron_train.tools.session import BenchSession, bench_session
from tests.support.decisions import comparing_on_cpu

if TYPE_CHECKING:
    from ditron_train.megatron.tp.spec import LinearOp

_EXCHANGES = ("gather", "sums")  # of a linear layer
PARTS = ("tp", "sp", "ep", "pp", "muon")
_LINK_BYTES, _COPY_BYTES = 8 << 20, 1 << 30  # the latter far above what a GPU's cache holds


class _Case(NamedTuple):
    """One op over nodes.

    Attributes:
        op, call: As the gate is asked.
        shape: Of the row.
        native, fused: What is compared and timed.
        strict: Makes what runs from the context of an answer, which may leave a part to stock Megatron; None:
            ``fused``.
        exchanges: What the measured pass moves, ``gather`` or ``sums``: a pass that an answer leaves all of it to the
            process group makes Megatron's calls. Both: of forward and backward.
        row, measured: Of the row.
        is_asked: Whether jobs ask the gate.
    """

    op: Op[Any, Any]
    row: str
    call: Any
    shape: Shape
    native: Callable[[], Any]
    fused: Callable[[], Any]
    strict: Callable[[Any], Callable[[], Any]] | None = None
    exchanges: frozenset[str] = frozenset()
    measured: Pass = "forward"
    is_asked: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_common_arguments(parser, model_option=False)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this subpackage (may be repeated)")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="tokens and layers, for slow links")


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 where bits differ.

    Raises:
        SettingError: All ranks are on one node.
        NotSupportedError: Nodes are no equal blocks of ranks.
    """
    with bench_session("nodes", arguments) as session, comparing_on_cpu(), under_policy("strict"):
        nodes = node_groups(world_group())
        if nodes is None:
            raise SettingError(
                "this takes ranks of several nodes: python tests/nodes/simulated_nodes.py -m tests.nodes.bench_nodes"
            )
        session.notes["summary"] = f"{nodes.num_nodes} nodes of {nodes.local_size} ranks; {_rates(session, nodes)}"
        session.notes["divide"] = str(arguments.divide)
        cases = {"tp": _linears, "sp": _exchanges, "ep": _experts, "pp": _messages, "muon": _matrices}
        for part in arguments.part or PARTS:
            with _groups(session, part), _counting(part) as sends:
                try:
                    for case in cases[part](session, arguments.divide):
                        _add_row(session, case, sends)
                        session.save()
                except NotSupportedError as error:  # on every rank alike: nodes of one rank have no rails to share
                    session.notes["summary"] += f"; {part}: native, {error}"
        return session.finish()


def _rates(session: BenchSession, nodes: NodeGroups) -> str:
    """What one rank at a time sends inside its node, and over the border, in words; with GPUs also what one copies."""
    data, found = torch.ones(_LINK_BYTES, dtype=torch.uint8, device=session.device), []
    for peer in (1, nodes.local_size) if nodes.local_size > 1 else (nodes.local_size,):

        def send(index: int, peer: int = peer) -> None:
            if session.rank == 0:
                dist.send(data, peer)
            elif session.rank == peer:
                dist.recv(data, 0)

        found.append(_LINK_BYTES / session.measure({"send": send}, most=3)["send"].median_us)
    words = f"{found[-1]:.0f} MB/s between nodes"
    if len(found) > 1:
        words += f", {found[0]:.0f} MB/s inside a node, {found[0] / found[-1]:.1f} times as much"
    if session.device.type == "cuda":
        whole = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=session.device)
        copy_us = session.measure({"copy": lambda _: whole.clone()}, most=3)["copy"].median_us
        rate = _COPY_BYTES / copy_us
        words += f", {rate:.0f} MB/s by a copy inside the GPU, {rate / found[-1]:.0f} times as much"
    return words + _shared_gpus(session)


def _shared_gpus(session: BenchSession) -> str:
    """That ranks share GPUs, in words."""
    if session.device.type != "cuda":
        return ""
    mine = (socket.gethostname(), str(torch.cuda.get_device_properties(session.device).uuid))
    num_gpus = len(set(exchange(world_group(), mine)))
    if num_gpus == session.world_size:
        return ""
    return f"; {session.world_size} ranks take turns on {num_gpus} GPU{'s' * (num_gpus > 1)}"


@contextmanager
def _groups(session: BenchSession, part: str) -> Iterator[None]:
    """Megatron's groups with all ranks in the one that the room needs."""
    from ditron_train.cpu import megatron_shim

    if session.device.type != "cuda":
        megatron_shim.install()
    names = {"tp": "tensor_model_parallel_size", "ep": "expert_model_parallel_size"}
    with megatron_shim.parallel_groups(**{names[part]: session.world_size} if part in names else {}):
        yield


@contextmanager
def _counting(part: str) -> Iterator[list[str]]:
    """Notes each message, or round of them, that a room's fused path starts in this process."""
    from ditron_train.optim import LayerShards
    from ditron_train.pp import spec as pp_spec

    places: dict[str, tuple[Any, str]] = {"pp": (pp_spec, "start_fused"), "muon": (LayerShards, "send_round")}
    owner, name = places.get(part, (NodeGroups, "start_along_rail"))
    function = getattr(owner, name)
    calls: list[str] = []

    def counted(*args: Any) -> Any:
        calls.append(name)
        return function(*args)

    setattr(owner, name, counted)
    try:
        yield calls
    finally:
        setattr(owner, name, function)


def _place(session: BenchSession) -> RunEnvironment:
    return RunEnvironment(world_group(), session.device, session.dtype)


def _case(op: Op[Any, Any], row: str, call: Any, shape: Shape, measured: Pass = "forward") -> _Case:
    trial = op.trial(call, op.make_context(call))
    return _Case(op, row, call, shape, trial.native, trial.fused, measured=measured)


def _linears(session: BenchSession, divide: int) -> Iterator[_Case]:
    from ditron_train.megatron.tp.spec import COLUMN, ROW

    m, wide, narrow = (8192, 28672, 8192) if session.device.type == "cuda" else (512, 256, 2048)
    m //= divide
    yield from _linear(session, COLUMN, {"m": m, "n": wide, "k": narrow})
    yield from _linear(session, ROW, {"m": m, "n": narrow, "k": wide})


def _linear(session: BenchSession, op: LinearOp, sizes: dict[str, int]) -> Iterator[_Case]:
    """The layer, forward and backward; its forward alone; its backward alone."""
    from megatron.core import parallel_state

    from ditron_train.tools.cases.tp_linear import LinearCase
    from ditron_train.tp.nodes import NodesTPContext

    group, shape, row = (
        parallel_state.get_tensor_model_parallel_group(),
        Shape("simulated", sizes),
        f"{op.kind}_linear",
    )
    call = LinearCase(op).sample(shape, _place(session), 0)._replace(group=group)
    context: Any = op.make_context(call)

    def run(call: Any, context: Any) -> Callable[[], Any]:
        return lambda: native_results(op, call) if context is None else fused_results(op, call, context)

    def layer(context: Any) -> Callable[[], Any]:
        return run(call, context)

    def forward(context: Any) -> Callable[[], Any]:
        return run(call._replace(is_forward=True), context)

    def backward(context: Any) -> Callable[[], Any]:
        leaves = [tensor.detach().requires_grad_() for tensor in op.inputs(call)]
        function = op.native(call) if context is None else op.fused(call, context)
        found = function(*leaves)
        return lambda: torch.autograd.grad(found, leaves, op.grads(call), retain_graph=True)

    if not isinstance(context, NodesTPContext):  # memory reaches all nodes: nothing goes along rails
        yield _Case(op, row, call, shape, layer(None), layer(context), measured="forward_backward")
        return

    def case(
        make: Callable[[Any], Callable[[], Any]], *exchanges: str, measured: Pass = "forward_backward", row: str = row
    ) -> _Case:
        """The fused path by rails throughout, whatever the answer's context leaves to the process group."""
        native, fused = make(None), make(context)
        return _Case(op, row, call, shape, native, fused, make, frozenset(exchanges), measured=measured)

    passes = ("gather", "sums") if op.kind == "column" else ("sums", "gather")
    yield case(layer, *passes)
    yield case(forward, passes[0], row="ag_gemm" if op.kind == "column" else "gemm_rs", measured="forward")
    yield case(backward, passes[1], measured="backward")


def _exchanges(session: BenchSession, divide: int) -> Iterator[_Case]:
    from ditron_train.megatron.sp.exchange import AttentionShape
    from ditron_train.megatron.sp.spec import EXCHANGE, UlyssesCall

    world, rows = session.world_size, (4096 if session.device.type == "cuda" else 256) // divide
    like = torch.empty(rows, 1, 1, dtype=session.dtype, device=session.device)
    call = UlyssesCall(world_group(), AttentionShape(8 * world, 2 * world, 128, 128), (rows, 1), like)
    shape = Shape("simulated", {"rows": rows, "heads": 8 * world, "groups": 2 * world, "channels": 128})
    yield _case(EXCHANGE, "attention_exchange", call, shape, "forward_backward")


def _experts(session: BenchSession, divide: int) -> Iterator[_Case]:
    from ditron_train.megatron.ep.spec import MOVEMENT, MovementCall
    from ditron_train.tools.cases.ep_layers import moe_layer, routing_of
    from ditron_train.tools.cases.ep_moves import DispatcherPair, moe_config

    tokens, hidden, topk = (8192, 7168, 8) if session.device.type == "cuda" else (64, 4096, 8)
    tokens //= divide
    layer = moe_layer("simulated", tokens, hidden, 64, 4 * session.world_size, topk)
    config = moe_config(
        hidden=hidden, ffn_hidden=64, num_experts=4 * session.world_size, topk=topk, dtype=session.dtype
    )
    routed, probs = routing_of(layer, _place(session), 0)
    x = session.values((tokens, 1, hidden), session.dtype, 0)

    def make(native: bool) -> Any:
        pair = DispatcherPair(config)
        pair.fused.asks_policy = False
        return pair["native" if native else "fused"]

    call = MovementCall(make, x, routed, probs, topk, config.moe_permute_fusion, world_group())
    trial = MOVEMENT.trial(call, None)
    measured: Pass = "forward_backward"
    yield _Case(MOVEMENT, "dispatch_combine", call, layer, trial.native, trial.fused, measured=measured)


def _messages(session: BenchSession, _divide: int) -> Iterator[_Case]:
    from ditron_train.tools.cases.pp import MESSAGES, message_shapes

    for shape in message_shapes(8e6 if session.device.type == "cuda" else 4e6):
        call, op = MESSAGES.sample(shape, _place(session), 0), MESSAGES.op
        native, fused = partial(native_results, op, call), partial(fused_results, op, call, call.context)
        yield _Case(op, MESSAGES.row, call, shape, native, fused)


def _matrices(session: BenchSession, divide: int) -> Iterator[_Case]:
    """Whole matrices over all nodes: each is stepped by one rank and sent to the others, as ``--ditron muon`` does
    whatever the policy."""
    from ditron_train.tools.cases.muon import MUON_STEP, step_shape

    on_gpu = session.device.type == "cuda"
    layer = ((1536, 512), (512, 512), (2048, 512), (512, 1024))
    shape = MUON_STEP.shapes(session.world_size, True)[0] if on_gpu else step_shape("simulated", layer, 2)
    if divide > 1:
        shape = step_shape(shape.model, shape.options["layer"], max(shape.sizes["num_layers"] // divide, 1))
    call = MUON_STEP.sample(shape, _place(session), 0)
    yield _case(MUON_STEP.op, MUON_STEP.row, call, shape)._replace(is_asked=False)


def _add_row(session: BenchSession, case: _Case, sends: list[str]) -> None:
    surroundings: AbstractContextManager[Any] = nullcontext()
    if case.op.name == "ep movement":
        from ditron_train.tools.cases.ep_moves import repeating

        surroundings = repeating(case.shape)
    with surroundings:
        native = list(case.native())
        del sends[:]
        fused = list(case.fused())
        count, equal = len(sends), session.equal(fused, native)
        plan, strict = "sent as soon as they are stepped, under every policy", case.fused
        if case.is_asked:
            answer = gate.answer_for(case.op, case.call)
            plan, strict = f"strict: native, {answer.reason}", case.native
            if answer.is_fused:
                left = [name for name in _EXCHANGES if getattr(answer.context, f"leaves_{name}", False)]
                words = f", {' and '.join(left)} by the process group" if left else ""
                plan = f"strict: the fused path{words}"
                strict = case.fused if case.strict is None else case.strict(answer.context)
                if case.exchanges and case.exchanges <= set(left):
                    plan, strict = f"strict: Megatron's calls{words}", case.native
        # In turn: a link of sockets is slower from one second to the next. Not so a dispatch on GPUs: the fused one
        # took a third longer between calls of stock Megatron, which no job has.
        interleaved = session.device.type != "cuda" or case.op.name != "ep movement"
        paths = {"native": case.native, "fused": case.fused, "strict": strict}
        names = {path: name for name, path in reversed(paths.items())}
        found = session.measure({names[path]: lambda _, path=path: path() for path in names}, interleaved=interleaved)
        timings = {"native": found["native"], "fused": found[names[strict]]}
    fields: dict[str, Any] = dict(peer="fused path", peer_us=found["fused"].median_us, plan=[plan], fused_sends=count)
    sizes = dict(case.shape.sizes)
    session.add(session.row(case.row, case.measured, case.shape.model, sizes, timings, equal, **fields))


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m tests.nodes.bench_nodes", description=__doc__.splitlines()[0])
    add_arguments(options)
    with user_errors():
        sys.exit(run(options.parse_args()))
