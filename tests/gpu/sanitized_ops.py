"""Small calls of every subpackage's ops, for compute-sanitizer: started by ``scripts/sanitizer.sh``, two ranks on one
GPU.

    sanitized_ops.py peers [JOB ...]      ops of all subpackages, forward and backward (RANK and WORLD_SIZE as torchrun
                                          sets them)
    sanitized_ops.py alone                kernels of one process: GEMMs of one matrix and of experts, a step of Muon

It prints what has run, one line a job, then the kernels that were launched.
"""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]
import shared_gpus  # noqa: E402

_PACKAGES = ("tp", "sp", "ep", "pp", "muon", "fused", "seldom")
_OF_CATALOG = ("tp", "sp", "pp")
_MOST_WAYS = 5  # of moving data, of an op


def _peers() -> None:
    os.environ["SHARED_GPUS_GLOO"] = "1"  # NCCL's own kernels are not what is looked at
    shared_gpus.set_up()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=150)
    store = dist.FileStore(os.environ["DITRON_SANITIZER_STORE"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    device = torch.device("cuda", 0)
    for name in sys.argv[2:] or (*_PACKAGES, *(f"ways of {room}" for room in _OF_CATALOG)):
        if name.startswith("ways of "):
            for op in _every_way(name.removeprefix("ways of "), device):
                torch.cuda.synchronize()
                print(f"ran {op}", flush=True)
            continue
        _run(name, device)
        print(f"ran {name}", flush=True)


def _run(name: str, device: torch.device) -> None:
    """A step twice, with the same bits."""
    from tests.faults.jobs import JOBS

    step = {"fused": _fused, "seldom": _seldom}.get(name, JOBS.get(name))(device)
    first = [tensor.clone() for tensor in step()]
    again = step()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), name


def _every_way(room: str, device: torch.device) -> Iterator[str]:
    """The ops of a subpackage at a small shape, as they run untuned and by each way of moving data that ``tune``
    tries."""
    from ditron_train.policy import fused_results
    from ditron_train.tools.cases import RunEnvironment
    from ditron_train.tools.catalog import cases_of, spaces_of

    environment = RunEnvironment(dist.group.WORLD, device, torch.bfloat16)
    spaces = {space.case.op.name: space for space in spaces_of(room)}
    for case in cases_of(room):
        op, shapes = case.op, case.shapes(environment.world_size, False)
        if op.name.endswith(" nn") or not shapes:
            continue
        call = case.sample(shapes[0], environment, 1)
        context = op.make_context(call)
        fused_results(op, call, context)
        yield op.name.replace(" ", "-")
        space = spaces.get(op.name)
        for number, way in enumerate(() if space is None else space.candidates(call, context, ())[:_MOST_WAYS]):
            space.run_as(call, context, way)(*op.inputs(call))
            yield f"{op.name.replace(' ', '-')}-{number}"


def _fused(device: torch.device):
    """Tokens that travel ahead of the host, grouped GEMMs, and the one that combines."""
    from ditron_train.ep import begin_layout, dispatch, dispatch_ahead, get_ep_context
    from ditron_train.ep.combine import begin_combine
    from ditron_train.ep.gemm_combine import gemm_combine, layout_tiles
    from ditron_train.ep.grouped_gemm import group_gemm, group_wgrad

    world, tokens, hidden, ffn = dist.get_world_size(), 64, 256, 128
    context = get_ep_context(dist.group.WORLD, device, 2 * world, 2)
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=generator)

    x, weights, back = normal(tokens, hidden), [normal(ffn, hidden) for _ in "ab"], [normal(hidden, ffn) for _ in "ab"]
    scores = torch.rand(tokens, 2 * world, device=device, generator=generator)
    routed = torch.zeros(scores.shape, dtype=torch.bool, device=device).scatter_(1, scores.topk(2).indices, True)

    def step() -> list[torch.Tensor]:
        pending = begin_layout(routed, scores * routed, hidden, x.dtype, context)
        dispatch_ahead(x, pending)
        layout = pending.finish()
        rows, _ = dispatch(x, layout, context)
        tiles = layout_tiles(layout)
        y = group_gemm(rows, weights, tiles)
        out = gemm_combine(y, layout, context, back, order="descending")
        wgrad = group_wgrad(y, rows, tiles)
        returning = begin_combine(group_gemm(y, back, tiles), layout, context, order="descending")
        context.check()
        return [out.clone(), wgrad.clone(), returning.finish()[0].clone()]

    return step


def _seldom(device: torch.device):
    """What runs in few jobs: sums in two rounds, parts in turn, gathers under other work, experts' tokens by gathers,
    messages with their header on the device, the self-check beside new libraries."""
    from ditron_train.ep import gather
    from ditron_train.gemm.configs import GemmConfig
    from ditron_train.policy import self_check
    from ditron_train.policy.all_reduce_order import SumMap
    from ditron_train.pp.kernel_channel import HEADER_LANES, await_message_kernel, current_or_none, launch
    from ditron_train.runtime.device import kernel_target
    from ditron_train.sp import gather_sequence, get_sp_context, output_layout
    from ditron_train.symm import Channel, get_arena
    from ditron_train.tp import all_reduce, gemm_ar, get_tp_context
    from ditron_train.tp.all_reduce import largest_of_ranks
    from ditron_train.tp.choices import Choice, GatherPlan
    from ditron_train.tp.gather import start_gather_of_parts
    from ditron_train.tp.nodes import _NodeSum

    world, rank = dist.get_world_size(), dist.get_rank()
    tp, sp = get_tp_context(dist.group.WORLD, device), get_sp_context(dist.group.WORLD, device)
    channel = Channel(get_arena(dist.group.WORLD, device), "sanitized", 4)
    header = torch.zeros((3, HEADER_LANES), dtype=torch.int64, device=device)  # sent and expected; what was seen
    # Whole numbers, whose sums are exact in any order; that of a ring where two ranks would need none.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, columns = (512, 256) if device.type == "cuda" else (32, 16)
    x, weight = (torch.ones(shape, device=device, dtype=dtype) for shape in ((rows, columns), (columns, columns)))
    in_a_ring = mock.patch.object(all_reduce, "sums_of", lambda context, count, dtype: SumMap.ring(count, world))
    in_two_rounds = Choice(GemmConfig(128, 128, 64, 8, 4), GatherPlan("copy"), rounds=2)
    parts = (torch.full((64, 32), float(rank), device=device), torch.full((16,), rank, device=device))
    heads = torch.full((8 * world, 1, 1, 64), float(rank), device=device, dtype=dtype)
    layout = gather.GatheredLayout(torch.arange(2 * world * 64, device=device).view(world * 64, 2) % 3 > 0, world)
    partial, onto = x.new_ones(world * 64, columns), x.new_ones(64, columns)
    node_sum = _NodeSum(tp, len(partial), columns, dtype, 1)  # as of a node between two others
    tokens = torch.arange(world * 64 * 128, device=device).view(world * 64, 128).remainder(7).to(dtype)
    assert self_check._launch_failure(device) is None
    assert self_check._handover_failure(dist.group.WORLD, device) is None

    def step() -> list[torch.Tensor]:
        launch(
            await_message_kernel, current_or_none(channel), channel.signals.local.data_ptr(), 0,
            header[0].data_ptr(), header[1].data_ptr(), header, channel.control, rank, 0, 0,
            LANES=HEADER_LANES, TARGET=kernel_target(device),
        )  # fmt: skip
        with in_a_ring:
            product = gemm_ar(x, weight, context=tp, choice=in_two_rounds)
        started = start_gather_of_parts(parts, context=tp, num_flagged_first=1)
        sources: list[int] = []
        started.consume(lambda source, _: sources.append(source))
        node_sum.hand_out(partial, "whole")
        node_sum.add_up(partial, onto, total := torch.empty_like(onto), "whole")
        arrived = gather_sequence((heads,), context=sp, layout=output_layout(world, 64, world), meanwhile=lambda: None)
        placed = tokens.new_zeros(layout.num_rows, tokens.shape[1])
        sums = torch.empty_like(tokens)
        for source in range(world):
            gather.place(tokens[layout.tokens_of(source)], placed, layout, source)
        for source in range(world):
            part = layout.tokens_of(source)
            gather.sum_to_tokens(placed, sums[part], layout, source, "descending")
        largest = torch.full((1,), float(rank), device=device)
        largest_of_ranks(largest, context=tp)
        for context in (tp, sp):
            context.synchronize()
        channel.check()
        assert largest.item() == world - 1
        assert torch.equal(product, torch.full_like(product, float(columns * world))) and sorted(sources) == list(
            range(world)
        )
        assert torch.equal(total, onto + world)
        return [product, started.totals[1].clone(), arrived.clone(), placed, sums, total, largest]

    return step


def _alone() -> None:
    from ditron_train.ep.grouped_gemm import group_gemm, group_wgrad, row_tiles
    from ditron_train.gemm import matmul_nn, matmul_nt
    from ditron_train.optim import Muon
    from ditron_train.optim.products import addmm, gram, scaled_square

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def step_of_muon() -> None:
        matrices = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((256, 256), (256, 384))]
        for matrix in matrices:
            matrix.grad = torch.randn_like(matrix)
        Muon(matrices).step()

    x, weight, counts = normal(256, 320), normal(192, 320), torch.tensor([100, 0, 156], device="cuda")
    experts, tiles = [normal(192, 320) for _ in counts], row_tiles(counts, 256)

    for name, run in {
        "matmul_nt": lambda: matmul_nt(x, weight),
        "matmul_nn": lambda: matmul_nn(x, weight.t().contiguous()),
        "group_gemm": lambda: group_gemm(x, experts, tiles),
        "group_dgrad": lambda: group_gemm(normal(256, 192), experts, tiles, transpose=False),
        "group_wgrad": lambda: group_wgrad(normal(256, 192), x, tiles),
        "gram": lambda: gram(x),
        "scaled_square": lambda: scaled_square(gram(x), 1.0, 2.0),
        "addmm": lambda: addmm(x, gram(x), x, alpha=1.0, beta=2.0),
        "muon": step_of_muon,
    }.items():
        run()
        torch.cuda.synchronize()
        print(f"ran {name}", flush=True)


def _launched() -> set[str]:
    """Names of this package's kernels that were compiled in this process, to be launched."""
    import triton

    modules = [module for name, module in sys.modules.items() if name.startswith("ditron_train.")]
    found = {var for module in modules for var in vars(module).values() if isinstance(var, triton.JITFunction)}
    return {one.__name__ for one in found if any(cache[0] for cache in one.device_caches.values())}


if __name__ == "__main__":
    torch.cuda.set_device(0)
    try:
        _peers() if sys.argv[1] == "peers" else _alone()
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the peer is told by its deadline
    finally:
        print("kernels", *sorted(_launched()), flush=True)
    if dist.is_initialized():
        from ditron_train.symm import close_all_arenas

        close_all_arenas()
        dist.destroy_process_group()
