"""Kernels of the ep subpackage at task level, as a group of 8 ranks with 128 experts launches them."""

from tests.compile.specs_ep import CHANNEL, ROW_BUFFERS, SUMS, fields, sum_sizes
from tests.support.compile_check import KernelSpec

TASKS = fields(("places tiles order board", "*i32"))


def wide_sizes(transpose: bool) -> dict[str, object]:
    """``GemmSizes`` of the widest tiles."""
    blocks = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}
    return {**blocks, "GROUP_M": 8, "SPLIT_STORE": True, "TRANSPOSE_B": transpose}


def descriptors(transpose: bool) -> dict[str, str]:
    """Types of the descriptors of such tiles."""
    return {
        "a_desc": "tensordesc<bf16[128,64]>",
        "b_desc": "tensordesc<bf16[1,256,64]>" if transpose else "tensordesc<bf16[1,64,256]>",
        "c_desc": "tensordesc<bf16[1,128,128]>",
    }


SPECS = [
    KernelSpec(
        name="ep_plan_tiles",
        kernel="ditron_train.ep.gemm_combine:plan_tiles",
        signature=fields(("tiles sources order board", "*i32"), ("control", "*i64"), ("max_tiles tile_count", "i32")),
        constexprs={"WORLD_SIZE": 8, "SLOTS": 16, "BLOCK_M": 128, "MIN_ROWS": 257, "BLOCK": 128},
        num_warps=8,
    ),
    KernelSpec(
        name="ep_gemm_combine_forward",
        kernel="ditron_train.ep.gemm_combine:gemm_combine_kernel",
        signature={
            "sent": fields(("rows", "*bf16"), ("grads", "*bf16"), ("origins", "*i32")),
            "sums": SUMS,
            "buffers": ROW_BUFFERS,
            "channel": CHANNEL,
            "limits": "*i32",
            **descriptors(True),
            "tasks": TASKS,
            **fields(("num_tokens hidden K num_experts", "i32")),
        },
        constexprs={"SUM": sum_sizes(False, True, False, tile_count=8), "GEMM": wide_sizes(True)},
        num_warps=8,
        num_stages=4,
        targets=("sm_90",),
        signals=True,
    ),
]
