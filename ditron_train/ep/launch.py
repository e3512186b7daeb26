"""What every op of expert parallelism does first: check its tokens, find its launch, make its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch

from ditron_train.ep.arguments import MoveSizes, SumSizes, as_constant
from ditron_train.ep.context import EPContext
from ditron_train.ep.layout import Layout
from ditron_train.ep.orders import SumOrder
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import KernelLaunch, compiled_together
from ditron_train.symm.channel import Channel, ChannelPointers

#: Types of tokens, and their code in a signature.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Kind(IntEnum):
    """What an op is, in its signature: ranks that disagree raise."""

    COUNTS = 0
    DISPATCH = 1
    DISPATCH_GRAD = 2
    COMBINE = 3
    COMBINE_GRAD = 4
    GEMM_COMBINE = 5


def pointers(
    context: EPContext, channel: Channel, hidden: int, dtype: torch.dtype, kind: Kind, row_capacity: int = 0
) -> ChannelPointers:
    """The channel for a launch of an op of kind ``kind``, with what travels along with its start signal; every call of
    an op asks for it once."""
    shape = context.shape
    if is_capturing(context.device):
        context.arena.graph_captured = True  # replays go on to use the buffers of now, whatever grows meanwhile
    context.record(channel.op_name, kind.name.lower().replace("_", " "), hidden, dtype)
    return channel.pointers(channel.signature((hidden, dtype, shape.num_experts, shape.topk, int(kind), row_capacity)))


def launch(
    context: EPContext,
    kernel: Any,
    num_programs: int,
    constants: dict[str, Any],
    num_warps: int,
    *dtypes: torch.dtype,
    num_stages: int = 3,
) -> Callable[..., None]:
    """The launch of a kernel with these constants and types of arguments; kept, so that only the first one goes all
    the way through Triton. Inside ``compiling`` it does not launch."""
    key = (kernel.__name__, num_programs, num_warps, num_stages, dtypes, *constants.values())
    launch = context.launches.get(key)
    if launch is None:
        constants = {name: as_constant(value) for name, value in constants.items()}
        launch = context.launches[key] = KernelLaunch(
            kernel, num_programs, constants, num_warps=num_warps, num_stages=num_stages
        )
    if context.only_compiles:
        return lambda *arguments, stream=None: launch.compile(*arguments)
    return launch


@contextmanager
def compiling(context: EPContext) -> Iterator[None]:
    """Inside, ops of the context compile their kernels, several at a time, and launch none: their results are not to
    be used.

    The grouped GEMMs without movement are no ops of a context: they run.
    """
    context.only_compiles = True
    try:
        with compiled_together(context.device):
            yield
    finally:
        context.only_compiles = False


def check_tokens(name: str, tensor: torch.Tensor, context: EPContext) -> None:
    """Raises ``NotSupportedError`` for rows that no op of the context takes."""
    if tensor.dim() != 2:
        raise NotSupportedError(f"{name}: needs [rows, hidden], got {tuple(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        raise NotSupportedError(f"{name}: {tensor.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if tensor.device != context.device:
        raise NotSupportedError(f"{name}: a tensor on {tensor.device}, the context is on {context.device}")


def _move_tile(hidden: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a tile of about ``elements`` elements."""
    columns = min(1 << max(hidden - 1, 0).bit_length(), 8192)
    return max(elements // columns, 1), columns


def move_sizes(
    context: EPContext, hidden: int, elements: int, *, with_entries: bool = True, zero_probs: bool = False
) -> MoveSizes:
    """Constants of a kernel that moves tokens of ``hidden`` elements, about ``elements`` at a time."""
    shape, (rows, columns) = context.shape, _move_tile(hidden, elements)
    is_shared = context.target == "interpreter"
    return MoveSizes(
        with_entries,
        zero_probs,
        shape.world_size,
        shape.ranks,
        shape.num_chunks,
        rows,
        columns,
        context.target,
        context.senders("dispatch", hidden),
        is_shared,
    )


def sum_sizes(
    context: EPContext, layout: Layout, order: SumOrder, hidden: int, elements: int, *, with_grads: bool
) -> SumSizes:
    """Constants of a kernel that returns rows of ``hidden`` elements, about ``elements`` at a time."""
    shape, (rows, columns) = layout.shape, _move_tile(hidden, elements)
    return SumSizes(
        WITH_GRADS=with_grads,
        RAGGED=layout.ragged,
        TOPK=shape.topk,
        TOPK_LANES=shape.topk_lanes,
        ROUND_EACH=order == "ascending_rounded",
        DESCENDING=order == "descending",
        WORLD_SIZE=shape.world_size,
        NUM_CHUNKS=shape.num_chunks,
        ROWS=rows,
        SUM_ROWS=_move_tile(hidden, context.move.sum_elements)[0],
        BLOCK_H=columns,
        ITEM_TOKENS=context.move.item_tokens,
        TARGET=context.target,
    )
