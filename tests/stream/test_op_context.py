"""What a context keeps for the shapes it has seen is bounded: sequences of ever new lengths fill no memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.testing.processes import run_workers

_LIMIT = 7


def _ever_new_shapes(num_shapes: int) -> tuple[bool, list[int]]:
    from ditron_train.stream import op_context
    from ditron_train.tp import ag_gemm, gemm_rs, get_context

    limit, op_context.MAX_KNOWN_SHAPES = op_context.MAX_KNOWN_SHAPES, _LIMIT
    try:
        context = get_context(dist.new_group(list(range(dist.get_world_size()))), torch.device("cpu"))
        world, right, kept = context.world_size, True, [0] * 4
        for number in range(num_shapes):
            rows = 1 + (number * number) % 23  # some come again, before and after they were forgotten
            generator = torch.Generator().manual_seed(number)
            whole = torch.randint(-3, 4, (rows * world, 16), generator=generator).float()
            weight = torch.randint(-3, 4, (8, 16), generator=generator).float()
            mine = slice(context.rank * rows, (context.rank + 1) * rows)
            right &= torch.equal(ag_gemm(whole[mine], weight, context=context), whole @ weight.t())
            right &= torch.equal(gemm_rs(whole, weight, context=context), world * (whole @ weight.t())[mine])
            channels = (context.gather_channel, context.scatter_channel)
            sizes = (len(context._agreed), len(context.prepared), max(len(c._signatures) for c in channels), len(context._tables))
            kept = [max(pair) for pair in zip(kept, sizes)]
        context.synchronize()
        context.arena.close()
        return right, kept
    finally:
        op_context.MAX_KNOWN_SHAPES = limit


def test_what_is_kept_for_shapes_is_bounded() -> None:
    for right, (agreed, prepared, signatures, tables) in run_workers(2, _ever_new_shapes, 40):
        assert right
        assert agreed == _LIMIT and signatures <= _LIMIT and prepared <= _LIMIT + 1 and tables <= 3 * _LIMIT
