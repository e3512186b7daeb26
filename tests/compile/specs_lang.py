"""Kernels of the primitives' tests: every primitive that waits or signals, on every target."""

import sys
from pathlib import Path

from tests.support.compile_check import KernelSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "lang"))

_SIGNAL_BUFFERS = {"tickets": "*i64", "control": "*i64"}
_CHANNEL = {
    "signals": "*i32",
    "signals_addresses": "*i64",
    "ready": "*i32",
    "ready_addresses": "*i64",
    "signature": "*i32",
    **_SIGNAL_BUFFERS,
}

SPECS = [
    KernelSpec(
        name="lang_push_all",
        kernel="kernels_lang:push_all",
        signature={
            "source": "*bf16",
            "gathered_addresses": "*i64",
            "signals_addresses": "*i64",
            "ready_addresses": "*i64",
            "ready": "*i32",
            "signature": "*i32",
            **_SIGNAL_BUFFERS,
            "num_elements": "i32",
        },
        constexprs={"WORLD_SIZE": 4, "BLOCK": 2048},  # with 4096 ptxas stops at 40 registers and spills two
        signals=True,
    ),
    KernelSpec(
        name="lang_wait_all",
        kernel="kernels_lang:wait_all",
        signature={"signals": "*i32", **_SIGNAL_BUFFERS},
        constexprs={"WORLD_SIZE": 4, "COUNT": 4},
        signals=None,
    ),
    KernelSpec(
        name="lang_wait_each",
        kernel="kernels_lang:wait_each",
        signature={"signals": "*i32", **_SIGNAL_BUFFERS},
        constexprs={"WORLD_SIZE": 4},
        signals=None,
    ),
    KernelSpec(
        name="lang_scale",
        kernel="ditron_train.lang.self_check:scale_kernel",
        signature={
            "x": "tensordesc<bf16[16,64]>",
            "terms": {"factor": "*fp32", "offset": "*fp32"},
            "out": "*fp32",
            "num_columns": "i32",
        },
        constexprs={"ROWS": 16, "COLUMNS": 64},
        num_warps=4,
    ),
    KernelSpec(
        name="lang_handover",
        kernel="ditron_train.lang.self_check:handover_kernel",
        signature={"channel": _CHANNEL, "values": "*i32", "slot_addresses": "*i64", "slots": "*i32", "out": "*i32"},
        constexprs={"ROUNDS": 16, "BLOCK": 1024},
        num_warps=4,
        signals=True,
    ),
    KernelSpec(name="lang_threads", kernel="kernels_lang:threads", signature={"out": "*i32", "token": "*i32"}),
]
