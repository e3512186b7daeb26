"""Kernels of ``experimental``, as a group of 8 ranks with 128 experts launches them."""

from tests.compile.specs_ep import CHANNEL, PLACED, TO, TOKEN_BUFFERS, fields, move_sizes
from tests.compile.specs_ep_fused import TASKS, descriptors, wide_sizes
from tests.support.compile_check import KernelSpec

SPECS = [
    KernelSpec(
        name="ep_plan_arrival",
        kernel="ditron_train.experimental.dispatch_gemm_kernels:plan_arrival",
        signature=fields(("tiles sources order board", "*i32"), ("max_tiles", "i32")),
        constexprs={"NUM_EXPERTS": 16, "WORLD_SIZE": 8, "SLOTS": 16, "PHASES": 4, "BLOCK_M": 128, "BLOCK": 128},
        num_warps=8,
    ),
    *(
        KernelSpec(
            name=f"ep_dispatch_gemm_{name}",
            kernel="ditron_train.experimental.dispatch_gemm_kernels:dispatch_gemm_kernel",
            signature={
                "x": "*bf16",
                "placed": PLACED,
                "to": TO,
                "recv_offsets": "*i32",
                "buffers": TOKEN_BUFFERS,
                "channel": CHANNEL,
                "limits": "*i32",
                **descriptors(forward),
                "tasks": TASKS,
                **fields(("num_tokens chunk_tokens hidden N", "i32")),
            },
            constexprs={
                "NUM_PLACERS": 24,
                "STRIP": 2,
                "SEND": move_sizes(2, forward),
                "PLACE": move_sizes(4, forward),
                "GEMM": wide_sizes(forward),
            },
            num_warps=8,
            num_stages=4,
            targets=("sm_90",),
            signals=True,
        )
        for name, forward in (("forward", True), ("dgrad", False))
    ),
]
