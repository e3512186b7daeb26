"""``gemm_a2a``: a projection, then the exchange of tokens for heads; kernel, plan and op.

    sent = torch.stack((x @ weight.t()).chunk(world, dim=1))
    all_to_all_single(arrived, sent)
    parts = chunks of ``arrived`` in the order of the sequence, split into q, k, v

Timeline of ``gemm_a2a`` on rank r of 4. The pulls run on a few multiprocessors of the communication stream, the last
one on all of them:

    native   compute   | GEMM                                                         |                | reorder |
    native   NCCL      |                                                              | all-to-alls    |
    fused    compute   | GEMM: heads of r+1 | heads of r+2     | heads of r+3   | own heads     |
    fused    pulls     |                    | tiles of r-1     | tiles of r-2   | tiles of r-3  | rest |
    fused    waits     |                    | ^ flags of tiles | ^ flags        | ^ flags       |

It gives the bits of GEMM, all-to-all and reorder wherever the tile GEMM gives cuBLAS's (``policy.gate`` compares
them): rows and columns are only moved, and every sum runs over all of K in order. What else was tried, with times:
``docs/measurements/sp.md``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.fp8 import check_bias
from ditron_train.gemm.kernels import biased, store_tile, tile_product
from ditron_train.gemm.operands import aligned_operand, make_descriptor, padded_columns
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.schedule.tiles import grouped_tile
from ditron_train.sp import transfer_sizes
from ditron_train.sp.choices import Product, ProjectionChoice, choose
from ditron_train.sp.context import SPContext
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.sp.transfer import (
    GEMM_A2A,
    Receiver,
    TensorKind,
    Transfer,
    WeightLayout,
    check_gemm,
    check_rows,
    kind_of,
    memory_of,
    start_epoch,
    table_kind,
)
from ditron_train.stream.events import current_handle


@triton.jit(do_not_specialize=["M", "slot_rows"])
def gemm_a2a_kernel(
    a_desc,
    b_desc,
    c_desc,
    channel,
    bias,
    M,
    N,
    K,
    columns_per_rank,
    slot_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Own slot[d] [M, N] = A [M, K] @ B[:, d * columns_per_rank :][:, :N], for every rank d; persistent.

    Rank d pulls its slot. Order: all tiles of rank + 1, then of rank + 2, ..., own ones last, so that at any time
    every rank is pulled from by another one. Before the first store: the start signals of all ranks, which have then
    read what the last op left here. A tile is signalled to rank d one tile later, when its asynchronous stores are
    complete (``bulk_store_wait``), by a release after a block barrier; tiles and K blocks are one flattened, pipelined
    loop all the same (``dl.notify_stored``). Waits for nothing but start signals, which every rank sends first: all
    launches make progress.

    ``bias`` [columns of all ranks] is added to the product before it is rounded, or it is None.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    start_epoch(channel, epoch, rank, WORLD_SIZE, TARGET)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    tiles_per_rank = num_tiles_m * num_tiles_n
    pending = tl.cast(0, tl.int64)  # address of the flag of the tile that is still being stored
    for tile_id in tl.range(tl.program_id(0), tiles_per_rank * WORLD_SIZE, tl.num_programs(0), flatten=True):
        peer = (rank + 1 + tile_id // tiles_per_rank) % WORLD_SIZE
        tile_m, tile_n = grouped_tile(tile_id % tiles_per_rank, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        first_col = peer * columns_per_rank + col
        acc = tile_product(a_desc, b_desc, row, first_col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        acc = biased(acc, None, bias, first_col, WORLD_SIZE * columns_per_rank, BLOCK_N)
        if pending != 0:
            dl.notify_stored(pending, epoch, True, TARGET)
        else:
            dl.await_peers(channel.ready, epoch, channel.control, rank, WORLD_SIZE, TARGET, HOLDS_BARRIER=False)
            dl.fence_async_proxy(TARGET)
        store_tile(c_desc, acc, peer * slot_rows + row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        flags = dl.symm_at(channel.signals_addresses, peer, tl.int32)
        pending = (flags + rank * tiles_per_rank + tile_m * num_tiles_n + tile_n).to(tl.int64)
    if pending != 0:
        dl.notify_stored(pending, epoch, True, TARGET)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)


class GemmA2APlan(Transfer):
    """[m, k] times a weight of all heads, each rank's columns to that rank; what arrives is taken apart meanwhile."""

    def __init__(
        self,
        context: SPContext,
        layout: HeadsLayout,
        m: int,
        k: int,
        dtype: torch.dtype,
        weight_layout: WeightLayout,
        choice: ProjectionChoice,
        packed: bool,
    ) -> None:
        config, programs = choice.config, choice.programs
        self.config, self.k, self.weight_layout = config, k, weight_layout
        sizes: dict[str, Any] = dict(flag_block_rows=config.block_m, block_n=config.block_n, copy=transfer_sizes.PULL)
        super().__init__(context, GEMM_A2A, layout, m, dtype, k=k, packed=packed, **sizes)
        world, n = context.world_size, layout.num_columns
        self._receive = Receiver(self, programs, pull=True)
        self._slots = make_descriptor(self.buffer.local[:, :n], config.store_block)
        self._columns_per_rank = n if weight_layout == "nt" else padded_columns(n, dtype)
        self._launch = context.launch(
            gemm_a2a_kernel,
            max(1, min(context.num_sms - programs, world * config.num_tiles(m, n))),
            {
                **config.tile_constants(transpose_b=weight_layout == "nt"),
                "WORLD_SIZE": world,
                "TARGET": context.target,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def _weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight; if a rank's columns are no whole 16 bytes, a copy in which they are."""
        n = self.layout.num_columns
        if self._columns_per_rank != n:
            columns = weight.reshape(self.k, -1, n)
            weight = torch.nn.functional.pad(columns, (0, self._columns_per_rank - n)).flatten(1)
        return aligned_operand(weight)

    def _multiply(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The GEMM; launched again if it comes with the same memory."""
        config = self.config
        key = (rows.data_ptr(), rows.stride(), weight.data_ptr(), weight.stride(), memory_of(bias))
        if self._launch.repeat(key, current_handle(self.context.device)):
            return
        a, b = aligned_operand(rows), self._weight(weight)
        self._launch(
            make_descriptor(a, (config.block_m, config.block_k)),
            make_descriptor(b, config.b_block(self.weight_layout == "nt")),
            self._slots,
            self.channel.pointers(self.signature),
            bias,
            self.m,
            self.layout.num_columns,
            self.k,
            self._columns_per_rank,
            self.slot_rows,
            key=key if a is rows and b is weight else None,
        )

    def mixed(self) -> torch.Tensor:
        """A copy of the last call's product [m, columns of all ranks], from the slots that peers have read."""
        slots = self.buffer.local.unflatten(0, (self.context.world_size, self.slot_rows))
        own = slots[:, : self.m, : self.layout.num_columns]
        return own.transpose(0, 1).contiguous().flatten(1)

    def run(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        lead: Sequence[int],
        table: torch.Tensor | None,
        meanwhile: Callable[[], object] | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """``rows`` [m, k]; ``lead``: leading dimensions of the parts; ``meanwhile``: enqueued while the last ones
        arrive."""
        context = self.context
        parts = self._receive.empty(lead)
        context.fork()
        with self.aborting:  # what the other stream writes to must not be freed under it
            self._multiply(rows, weight, bias)
            self._receive(parts, table)
            if meanwhile is not None:
                meanwhile()
            else:
                self._receive.finish(parts, table)
        context.join()
        context.leave(self.channel)
        return parts


def _plan_gemm_a2a(
    context: SPContext,
    x_kind: tuple,
    weight_kind: tuple,
    layout: HeadsLayout,
    weight_layout: WeightLayout,
    choice: ProjectionChoice | None,
    table: tuple | None,
) -> GemmA2APlan:
    """What ``gemm_a2a`` needs for operands of these kinds (collective)."""
    x, weight, n = TensorKind(*x_kind), TensorKind(*weight_kind), context.world_size * layout.num_columns
    if len(x.shape) < 2:
        raise NotSupportedError(f"gemm_a2a: x has {len(x.shape)} dimensions, needed are 2 or more")
    m, k = x.shape[:-1].numel(), x.shape[-1]
    check_gemm("gemm_a2a", context, x, k, n, weight, weight_layout)
    check_rows("gemm_a2a", context, x.shape[:-1], 1, table)
    chosen = choice or choose(Product("gemm_a2a", weight_layout, m, n, k, x.dtype), context)
    return GemmA2APlan(context, layout, m, k, x.dtype, weight_layout, chosen, table is not None)


@outside_compile
def gemm_a2a(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    weight_layout: WeightLayout = "nt",
    row_table: torch.Tensor | None = None,
    choice: ProjectionChoice | None = None,
    meanwhile: Callable[[], object] | None = None,
    bias: torch.Tensor | None = None,
    return_mixed: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Projects ``x`` and gives every rank its heads of the whole sequence: QKV's forward, the output projection's
    dgrad.

    The bits are those of ``x @ weight.T``, split into parts, then for each part an all-to-all and the reorder of
    chunks.

    Args:
        x: [s / world, ..., K], this rank's two chunks of the sequence; bf16 or fp16 (on CPU fp32 too), any
            strides.
        weight: [world * layout.num_columns, K] (``nt``) or its transpose (``nn``).
        context: The group's context.
        layout: Columns of one rank.
        weight_layout: How ``weight`` is.
        row_table: Rows of the whole that each rank's rows are, int32 [world, local rows] (``packed_rows``); None: its
            two chunks of one sequence.
        choice: Tile sizes and programs that move data; by the shape if None. They do not change bits.
        meanwhile: Called when all is enqueued; what it enqueues runs during the last transfers, and may use what is
            given here but not what is returned.
        bias: [world * layout.num_columns] with ``nt``, added before the product is rounded, as of ``tp.ag_gemm``.
        return_mixed: Also return what was sent, as the last tensor: [s / world, ..., world * layout.num_columns].

    Returns:
        One tensor a part, [s, ..., heads of this rank, head size], in the order of the sequence.

    Raises:
        NotSupportedError: What this rank sees alone does not fit.
        MismatchError: The ranks' calls differ (at the first call of a shape here, else at the next ``check``).
        PeerTimeoutError: A peer did not arrive (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    if bias is not None:
        check_bias("gemm_a2a", x, bias, weight.shape[0] if weight.dim() else 0)
    context.enter("gemm_a2a", x.shape, weight.shape, x.dtype)
    table = table_kind(row_table)
    plan = context.plan(_plan_gemm_a2a, kind_of(x), kind_of(weight), layout, weight_layout, choice, table)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    lead = (x.shape[0] * context.world_size, *x.shape[1:-1])
    parts = plan.run(rows, weight, lead, row_table, meanwhile, bias)
    return (*parts, plan.mixed().view(*x.shape[:-1], -1)) if return_mixed else parts
