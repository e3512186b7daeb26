"""What ranks of simulated nodes run."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError, PeerTimeoutError
from ditron_train.symm import SymmetricArena
from ditron_train.symm.exchange import exchange, store_of
from ditron_train.symm.groups import make_group
from ditron_train.symm.transport import is_one_node, node_of_process
from tests.support.exact import exact_sums
from tests.support.patience import Lateness


def places():
    """Names of the nodes of all ranks, and whether the job takes itself for one of one node."""
    return [name for name, _, _ in exchange(dist.group.WORLD, node_of_process())], is_one_node()


def shared_memory(ranks_per_node):
    """What a node's ranks hand each other through memory; and what all ranks get that ask for it together."""
    rank, num = dist.get_rank(), dist.get_world_size()
    node = rank // ranks_per_node * ranks_per_node
    group = make_group(dist.group.WORLD, list(range(node, node + ranks_per_node)), "node")
    arena = SymmetricArena(group, torch.device("cpu"))
    box = arena.tensor("box", (num,), torch.int32)
    for peer in range(ranks_per_node):
        box.peer(peer)[rank] = rank + 1
    arena.quiesce()
    found = box.local.tolist()
    arena.close()
    try:
        SymmetricArena(dist.group.WORLD, torch.device("cpu")).tensor("box", (num,), torch.int32)
    except ArenaError as error:
        return found, str(error)
    return found, None


def rates(num_bytes):
    """MB/s from rank 0 to rank 1 of its node, and to the first rank of the last node: inside a node the best of
    several times, since a busy machine may not run one of the two for a while; between nodes the second, since the
    link gives its first bytes away."""
    rank, far = dist.get_rank(), dist.get_world_size() - int(os.environ["LOCAL_WORLD_SIZE"])
    data, found = torch.ones(num_bytes, dtype=torch.uint8), []
    for peer, repeats in ((1, 8), (far, 2)):
        taken_s = []
        for _ in range(repeats):
            dist.barrier()
            begun_s = time.perf_counter()
            if rank == 0:
                dist.send(data, peer)
            elif rank == peer:
                dist.recv(data, 0)
            dist.barrier()
            taken_s.append(time.perf_counter() - begun_s)
        found.append(num_bytes / (min(taken_s) if peer == 1 else taken_s[-1]) / 1e6)
    return found


def peers_fail(op, cases, timeout_s):
    """What each rank gets, when, of a second call of ``op`` in which ranks die or are late; of all ranks that answer,
    by the case.

    Args:
        cases: ``(fault, failing ranks)``, the deaths last; each has a group of its own, so nothing of one is left in
            the next.
    """
    os.environ["DITRON_TIMEOUT_S"] = str(timeout_s)
    everybody, calls = list(range(dist.get_world_size())), []
    for number in range(len(cases)):
        calls.append(_CALLS[op](make_group(dist.group.WORLD, everybody, f"case{number}")))
        calls[-1]()
    store, rank = store_of(dist.group.WORLD), dist.get_rank()
    for number, (fault, failing) in enumerate(cases):
        if fault == "late" or cases[number - 1][0] == "late":
            dist.barrier()
        if fault == "killed" and rank in failing:
            os.kill(os.getpid(), signal.SIGKILL)
        store.set(f"{number} {rank}", repr(_outcome(calls[number], fault == "late" and rank in failing, timeout_s)))
    found, alive = [], set(everybody)
    for number, (fault, failing) in enumerate(cases):
        alive -= set(failing) if fault == "killed" else set()
        found.append({one: ast.literal_eval(store.get(f"{number} {one}").decode()) for one in alive})
    return found


def _outcome(call, is_late, timeout_s):
    """Who waited, who was missing, seconds to the first error, how many errors: of two calls."""
    if is_late:
        time.sleep(2 * timeout_s + 3)
    errors, begun_s = [], time.monotonic()
    with Lateness() as lateness:
        for _ in range(2):  # a late rank finds what the others sent before they gave up
            try:
                call()
            except PeerTimeoutError as error:
                errors.append((error, time.monotonic() - begun_s - lateness.seconds))
    first, taken_s = errors[0]
    return first.waiting_rank, {error.missing_rank for error, _ in errors}, taken_s, len(errors)


def link_chokes(op, folder, timeout_s):
    """What this rank gets of a second call of ``op``, while a node's link carries hardly anything: ``choked`` in
    ``folder`` says that it does, behind ``ready`` of rank 0. ``done`` of a rank says that it has an answer."""
    os.environ["DITRON_TIMEOUT_S"] = str(timeout_s)
    call, folder, rank = _CALLS[op](dist.group.WORLD, 256), Path(folder), dist.get_rank()
    call()
    dist.barrier()
    if rank == 0:
        (folder / "ready").touch()
    while not (folder / "choked").exists():
        time.sleep(0.01)
    try:
        return _outcome(call, False, timeout_s)
    finally:
        (folder / f"done{rank}").touch()


def _ep_call(group, factor=1):
    """Dispatch and combine over nodes by rails; ``factor``: how many times as much is sent, as of the other calls."""
    from ditron_train.ep import get_rail_context, rails

    context = get_rail_context(group, torch.device("cpu"), 8, 2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, scores = torch.randn(12, 16 * factor, generator=generator), torch.rand(12, 8, generator=generator)
    routed = torch.zeros(12, 8, dtype=torch.bool).scatter_(1, scores.topk(2).indices, True)

    def call():
        layout = rails.begin_layout(routed, scores * routed, x.shape[1], torch.float32, context).finish()
        rows, _ = rails.dispatch(x, layout, context)
        rails.combine(rows, layout, context, order="ascending")

    return call


def _sp_call(group, factor=1):
    """Ulysses' exchanges over nodes by rails."""
    from ditron_train.megatron.sp.nodes import get_nodes_context
    from ditron_train.sp import qkv_layout

    world = dist.get_world_size()
    context = get_nodes_context(group, torch.device("cpu"))
    layout = qkv_layout(2 * world, world, 8 * factor, world)
    parts = [torch.randn(4, 1, heads, 8 * factor) for heads in (2 * world, world, world)]
    return lambda: context.to_heads(parts, layout, None)


def moe_layer(rails, link_mbit=None):
    """Whether megatron-core's MoE layer moves its tokens by rails under ``DITRON_EP_RAILS=rails``, with times compared
    on the CPU, too, and why not; its bits are native's. By the host's clock, or by what passes the node's link at the
    rate of ``link_mbit``."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
    import ep_workers as workers

    from ditron_train.policy import gate
    from tests.support.decisions import comparing_on_cpu

    os.environ["DITRON_EP_RAILS"] = rails
    gate.forget("ep")
    options = {"params_dtype": torch.float32, "num_moe_experts": 8, "moe_router_topk": 8, "hidden_size": 256}
    torch.use_deterministic_algorithms(True)
    try:
        with workers.groups(**workers.sizes_of(options)), comparing_on_cpu(), _clock_of_link(link_mbit):
            native, fused = workers.build(options, False), workers.build(options, True)
            generator = torch.Generator().manual_seed(dist.get_rank())
            x, grad = (torch.randn(16, 1, options["hidden_size"], generator=generator) for _ in range(2))
            workers.assert_equal(workers.run_layer(native, x, grad), workers.run_layer(fused, x, grad))
            dispatcher = fused.token_dispatcher
            return dispatcher.ep_context is not None, dispatcher._native_because
    finally:
        torch.use_deterministic_algorithms(False)
        del os.environ["DITRON_EP_RAILS"]


@contextlib.contextmanager
def _clock_of_link(link_mbit):
    """Times a call by the bytes that leave the node meanwhile, if ``link_mbit`` is a rate: however busy the machine
    is, they are the same."""

    def times_us(run, device, group, launches_us, is_ahead):
        dist.barrier(group)
        before = _bytes_sent()
        run()
        dist.barrier(group)
        return [(_bytes_sent() - before) * 8 / link_mbit]

    with mock.patch("ditron_train.policy.probe.times_us", times_us) if link_mbit else contextlib.nullcontext():
        yield


def _bytes_sent():
    """By this node, over its link."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))


def tp_linears(ranks, batch, dtype):
    """A column and a row layer of megatron-core by rails, of a group of the first ranks over all nodes: bits as
    natively, forward and backward; how often rows, and sums, went along rails, None on the other ranks.

    Random activations, and a weight whose products are exact: each result is a sum over ranks in one order."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
    import ep_workers as workers

    from ditron_train.megatron.tp.linear_call import LinearCall
    from ditron_train.megatron.tp.spec import COLUMN, ROW
    from ditron_train.policy import fused_results, gate, native_results
    from ditron_train.tp import nodes as tp_nodes

    rank, found, local_size = dist.get_rank(), [], int(os.environ["LOCAL_WORLD_SIZE"])
    members = [one for one in range(dist.get_world_size()) if one % local_size < ranks]
    world, generator = len(members), torch.Generator().manual_seed(rank)
    weight = torch.zeros(16, 24).fill_diagonal_(2.0 ** (rank % 3)).to(dtype)

    def values(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    with workers.groups(), _counting(tp_nodes, "_parts", found), _counting(tp_nodes._Rail, "send", found):
        is_member = rank in members
        same = [one for one in range(dist.get_world_size()) if (one in members) == is_member]
        group = make_group(dist.group.WORLD, same, "linears")
        if not is_member:
            return None
        for spec, rows, of_result in ((COLUMN, 6, world), (ROW, 6 * world, 1 / world)):
            lead = (rows, batch) if batch else (rows,)
            x, grad_y = values(*lead, 24), values(int(rows * of_result), *lead[1:], 16)
            call = LinearCall(x, weight, group, grad_y=grad_y)
            context = gate.answer_for(spec, call).context
            assert type(context).__name__ == "NodesTPContext"
            del found[:]
            for expected, fused in zip(native_results(spec, call), fused_results(spec, call, context), strict=True):
                assert torch.equal(expected, fused)
            assert found.count("_parts") == 1  # forward of the column layer, backward of the row layer
    return found.count("send")


def tp_trials(kind, slower):
    """What goes by rails in a layer, forward alone and then with its backward, where the trials whose words one of
    ``slower`` matches are not faster; None where it runs natively. With that what was tried."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
    import ep_workers as workers

    from ditron_train.megatron.tp.linear_call import LinearCall
    from ditron_train.megatron.tp.spec import COLUMN, ROW
    from ditron_train.policy import Decision, fused_results, gate, native_results
    from ditron_train.policy import op as policy_op
    from ditron_train.tp import linear
    from ditron_train.tp import nodes as tp_nodes
    from tests.support.decisions import comparing_on_cpu

    tried, found, calls = [], [], []

    def decide(words, native, fused, **_):
        tried.append(words.split(" nodes, ")[1])
        is_slower = any(re.fullmatch(one, tried[-1]) for one in slower)
        with _counting(tp_nodes, "_parts", calls), _counting(linear, "gemm_rs_over_nodes", calls):
            del calls[:]
            expected, in_its_place = native(), sorted(calls)
            is_equal = all(map(torch.equal, expected, fused()))
        # The forward that was chosen, the backward being the process group's; else stock Megatron.
        by_rails = ["_parts" if kind == "column" else "gemm_rs_over_nodes"] if "instead of" in words else []
        assert in_its_place == by_rails and len(calls) > len(by_rails)
        return Decision(is_equal and not is_slower, "simulated", True, None, None)

    world, generator = dist.get_world_size(), torch.Generator().manual_seed(dist.get_rank())
    spec, rows, rows_out = (COLUMN, 6, 6 * world) if kind == "column" else (ROW, 6 * world, 6)
    x, grad_y = torch.randn(rows, 24, generator=generator), torch.randn(rows_out, 16, generator=generator)
    weight = torch.zeros(16, 24).fill_diagonal_(2.0 ** (dist.get_rank() % 3))  # products are exact
    with workers.groups():
        group = make_group(dist.group.WORLD, range(world), "trials")
        call = LinearCall(x, weight, group, grad_y=grad_y)
        with comparing_on_cpu(), mock.patch.object(policy_op, "decide", decide):
            context = gate.answer_for(spec, call).context
        if context is None:
            return None, tried
        with _counting(tp_nodes, "_parts", found), _counting(linear, "gemm_rs_over_nodes", found):
            with torch.no_grad():
                (y,) = spec.fused(call, context)(x, weight)
            forward = sorted(found)
            del found[:]
            expected = native_results(spec, call)
            assert all(map(torch.equal, expected, fused_results(spec, call, context))) and torch.equal(expected[0], y)
        return (forward, sorted(found)), tried


@exact_sums()
def tp_strides(layout, frozen):
    """How often sums went along rails for the gradient of a column layer's input, from a gradient with strides or a
    whole one. It is bitwise identical to Megatron's."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
    import ep_workers as workers

    from ditron_train.megatron.tp.linear_call import LinearCall
    from ditron_train.megatron.tp.spec import COLUMN
    from ditron_train.policy import gate
    from ditron_train.tp import linear
    from ditron_train.tp.linear import column_linear

    found, gradients, world = [], [], dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, weight = torch.randn(3, 2, 24, generator=generator), torch.randn(16, 24, generator=generator)
    grad_y = torch.randn(2, 3 * world, 16, generator=generator).transpose(0, 1)
    if layout != "sequences":
        grad_y = grad_y.contiguous() if layout == "whole" else torch.cat([grad_y, grad_y], -1)[..., :16]
    weight.requires_grad_(not frozen)
    with workers.groups():
        group = make_group(dist.group.WORLD, range(world), "strides")
        call = LinearCall(x, weight, group, is_frozen=frozen, grad_y=grad_y)
        context = gate.answer_for(COLUMN, call).context
        for function in (COLUMN.native(call), lambda x, weight: (column_linear(x, weight, context=context),)):
            leaf = x.clone().requires_grad_()
            with _counting(linear, "gemm_rs_over_nodes", found):
                (y,) = function(leaf, weight)
                y.backward(grad_y)
            gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    return len(found)


def tp_answers():
    """Whether layers of one group whose sums are of one size keep the ways that were chosen for them: a column layer
    whose sums go by rails, then a row layer whose forward is slower by them, then the row layer again under ``force``
    where decisions were forgotten."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
    import ep_workers as workers

    from ditron_train.megatron.tp.linear_call import LinearCall
    from ditron_train.megatron.tp.spec import COLUMN, ROW
    from ditron_train.policy import Decision, gate
    from ditron_train.policy import op as policy_op
    from ditron_train.runtime.settings import under_policy
    from tests.support.decisions import comparing_on_cpu

    def decide(words, native, fused, **_):
        is_slower = words.startswith("tp row") and "forward" in words
        return Decision(not is_slower, "simulated", True, None, None)

    world, weights = dist.get_world_size(), (torch.ones(24, 16), torch.ones(16, 24))
    with workers.groups(), comparing_on_cpu():
        group = make_group(dist.group.WORLD, range(world), "answers")
        column = LinearCall(torch.ones(6, 16), weights[0], group, grad_y=torch.ones(6 * world, 24))
        row = LinearCall(torch.ones(6 * world, 24), weights[1], group, grad_y=torch.ones(6, 16))
        summed, found = (6 * world, 16, torch.float32), []
        with mock.patch.object(policy_op, "decide", decide):
            answers = [gate.answer_for(spec, call).context for spec, call in ((COLUMN, column), (ROW, row))]
            found += [answer.sums_by_rails(*summed) for answer in answers]
        gate.forget("tp")
        with under_policy("force"):
            found.append(gate.answer_for(ROW, row).context.sums_by_rails(*summed))
        return found


@contextlib.contextmanager
def _counting(owner, name, calls):
    """Notes each call of a function of ``owner``."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: (calls.append(name), function(*args, **named))[1])
    try:
        yield
    finally:
        setattr(owner, name, function)


def _ring_reduce_scatter(step):
    """A process group's reduce-scatter along a ring of ascending (1) or descending (-1) ranks, each hop rounded."""

    def reduce_scatter(out, x, group=None):
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        of_ranks = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(of_ranks, x.contiguous(), group=group)
        mine = [of_ranks[(rank + step * hop) % world].view(world, -1)[rank] for hop in range(1, world + 1)]
        total = mine[0]
        for one in mine[1:]:
            total = (total.float() + one.float()).to(x.dtype)
        out.copy_(total.view_as(out))

    return reduce_scatter


def sums_along_rings(cases):
    """Of each case the step of the ring that was found, on ranks that take part, else None; products with sums over
    nodes have the bits of that ring's reduce-scatter.

    Args:
        cases: ``(ranks of each node, step, rows of a rank, n, k, layout, dtype, seed)``.
    """
    from ditron_train.tp.nodes import gemm_rs_over_nodes, get_nodes_tp_context

    rank, local_size, found = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"]), []
    groups = {}  # their orders are remembered
    for ranks, step, rows, n, k, layout, dtype, seed in cases:
        everybody = range(dist.get_world_size())
        is_member = rank % local_size < ranks
        if (ranks, step) not in groups:
            members = [one for one in everybody if (one % local_size < ranks) == is_member]
            groups[ranks, step] = make_group(dist.group.WORLD, members, f"ring {ranks} {step}")
        group, reduce_scatter = groups[ranks, step], _ring_reduce_scatter(step)
        if not is_member:
            found.append(None)
            continue
        context = get_nodes_tp_context(group, torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed + rank)
        x = torch.randn(rows * context.world_size, k, generator=generator)
        x = (x * torch.exp2(torch.randint(-6, 7, x.shape, generator=generator))).to(dtype)
        weight = torch.zeros(k, n, dtype=dtype).fill_diagonal_(2.0 ** (rank % 3))  # products are exact
        expected = torch.empty(rows, n, dtype=dtype)
        reduce_scatter(expected, x @ weight, group)
        with mock.patch.object(dist, "reduce_scatter_tensor", reduce_scatter):
            fused = weight if layout == "nn" else weight.t().contiguous()
            assert torch.equal(gemm_rs_over_nodes(x, fused, context=context, layout=layout), expected)
            found.append(context.ring_step(len(x), n, dtype))
    return found


def _tp_call(group, factor=1):
    """A GEMM-RS over nodes, then an AG-GEMM."""
    from ditron_train.tp.nodes import ag_gemm_over_nodes, gemm_rs_over_nodes, get_nodes_tp_context

    context = get_nodes_tp_context(group, torch.device("cpu"))
    x, weight = torch.ones(16, 16), torch.ones(8 * factor, 16)

    def call():
        rows = gemm_rs_over_nodes(x, weight, context=context)
        ag_gemm_over_nodes(rows, weight, context=context, layout="nn")

    return call


_CALLS = {"ep": _ep_call, "sp": _sp_call, "tp": _tp_call}
