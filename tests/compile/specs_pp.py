"""Kernels of the pipeline messages that take no copy engine."""

from ditron_train.pp.kernel_channel import BLOCK_WORDS, HEADER_LANES, NUM_WARPS
from tests.support.compile_check import KernelSpec

_WAIT = {"signal": "i64", "epoch": "i32"}

SPECS = [
    KernelSpec(
        name="pp_await",
        kernel="ditron_train.pp.kernel_channel:await_kernel",
        signature={**_WAIT, "control_ptr": "*i64", "peer": "i32", "chunk": "i32"},
        num_warps=1,
        aligned=("control_ptr",),
        signals=None,
    ),
    KernelSpec(
        name="pp_await_message",
        kernel="ditron_train.pp.kernel_channel:await_message_kernel",
        signature={
            **_WAIT,
            "sent": "i64",
            "expected": "i64",
            "seen_ptr": "*i64",
            "control_ptr": "*i64",
            "peer": "i32",
            "message": "i32",
            "lane": "i32",
        },
        constexprs={"LANES": HEADER_LANES},
        num_warps=1,
        aligned=("seen_ptr", "control_ptr"),
        signals=True,
    ),
    KernelSpec(
        name="pp_notify",
        kernel="ditron_train.pp.kernel_channel:notify_kernel",
        signature=_WAIT,
        num_warps=1,
        aligned=(),
        signals=None,
    ),
    *(
        KernelSpec(
            name=f"pp_push{'' if aligned else '_bytes'}",
            kernel="ditron_train.pp.kernel_channel:push_kernel",
            signature={"destination": "i64", "source": "i64", "num_bytes": "i64", **_WAIT, "arrived_ptr": "*i64"},
            constexprs={"IS_ALIGNED": aligned, "BLOCK": BLOCK_WORDS},
            num_warps={"default": NUM_WARPS, "hip": 16},
            aligned=("arrived_ptr",),
            signals=True,
        )
        for aligned in (True, False)
    ),
]
