"""``dispatch_gemm`` of the experimental room, as a group of 8 ranks with 128 experts launches them."""

from tests.support.compile_check import KernelSpec

_INT = "*i32"


def _signature(*groups: tuple[str, str]) -> dict[str, str]:
    return {name: kind for names, kind in groups for name in names.split()}


_CHANNEL = ("signal_addresses ready_addresses", "*i64"), ("signals ready signature", _INT), ("tickets control", "*i64")
_TABLES = ("places tiles order board limits", _INT)
_WIDE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "SPLIT_STORE": True, "GROUP_M": 8}
_MOVE = {"WORLD_SIZE": 8, "NUM_CHUNKS": 128, "BLOCK_H": 8192, "NUM_SENDERS": 16}
_UNALIGNED = ("num_tokens", "limits", "order", "board", "list_base", "entry_base", "recv_offsets")


def _descriptors(transpose: bool) -> dict[str, str]:
    return {
        "a_desc": "tensordesc<bf16[128,64]>",
        "b_desc": "tensordesc<bf16[1,256,64]>" if transpose else "tensordesc<bf16[1,64,256]>",
        "c_desc": "tensordesc<bf16[1,128,128]>",
    }


_DISPATCH = _signature(
    ("x rows buffer", "*bf16"), ("row_probs", "*fp32"),
    ("kept origins dest_slots send_list chunk_entries list_base entry_base recv_offsets arrived", _INT),
    ("buffer_addresses entry_addresses", "*i64"), *_CHANNEL, _TABLES, ("num_tokens chunk_tokens hidden N", "i32"),
)  # fmt: skip


def _aligned(signature: dict[str, str]) -> tuple[str, ...]:
    return tuple(name for name in signature if name not in _UNALIGNED)


SPECS = [
    KernelSpec(
        name="ep_plan_arrival",
        kernel="ditron_train.experimental.dispatch_gemm_kernels:plan_arrival",
        signature=_signature(("tiles sources order board", _INT), ("max_tiles", "i32")),
        constexprs={"NUM_EXPERTS": 16, "WORLD_SIZE": 8, "SLOTS": 16, "PHASES": 4, "BLOCK_M": 128, "BLOCK": 128},
        num_warps=8,
        aligned=("tiles",),
    ),
    *(
        KernelSpec(
            name=f"ep_dispatch_gemm_{name}",
            kernel="ditron_train.experimental.dispatch_gemm_kernels:dispatch_gemm_kernel",
            signature={**_DISPATCH, **_descriptors(forward)},
            constexprs={
                **_MOVE,
                **_WIDE,
                "RANKS": 8,
                "SEND_ROWS": 2,
                "PLACE_ROWS": 4,
                "WITH_ENTRIES": forward,
                "ZERO_PROBS": forward,
                "TRANSPOSE_B": forward,
                "NUM_PLACERS": 24,
                "STRIP": 2,
            },  # fmt: skip
            num_warps=8,
            num_stages=4,
            targets=("sm_90",),
            aligned=_aligned(_DISPATCH),
            signals=True,
        )
        for name, forward in (("forward", True), ("dgrad", False))
    ),
]
