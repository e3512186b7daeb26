"""Kernels of the ep room at task level, as a group of 8 ranks with 128 experts launches them."""

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


_COMBINE = _signature(
    ("y out buffer", "*bf16"),
    ("row_grads prob_grads grad_buffer", "*fp32"),
    ("origins chunk_entries expert_ids token_places", _INT),
    ("buffer_addresses grad_addresses", "*i64"),
    *_CHANNEL,
    _TABLES,
    ("num_tokens hidden K num_experts", "i32"),
)


def _aligned(signature: dict[str, str]) -> tuple[str, ...]:
    return tuple(name for name in signature if name not in _UNALIGNED)


SPECS = [
    KernelSpec(
        name="ep_plan_tiles",
        kernel="ditron_train.ep.fused_kernels:plan_tiles",
        signature=_signature(("tiles sources order board", _INT), ("control", "*i64"), ("max_tiles", "i32")),
        constexprs={"WORLD_SIZE": 8, "SLOTS": 16, "BLOCK_M": 128, "BLOCK": 128},
        num_warps=8,
        aligned=("tiles",),
    ),
    *(
        KernelSpec(
            name=f"ep_gemm_combine_{name}",
            kernel="ditron_train.ep.fused_kernels:gemm_combine_kernel",
            signature={**_COMBINE, **_descriptors(forward)},
            constexprs={
                **_MOVE,
                **_WIDE,
                "ROWS": 4,
                "WITH_GRADS": not forward,
                "RAGGED": False,
                "TOPK": 8,
                "TOPK_LANES": 8,
                "ROUND_EACH": forward,
                "DESCENDING": not forward,
                "SUM_ROWS": 1,
                "ITEM_TOKENS": 8,
                "TRANSPOSE_B": forward,
                "TILE_COUNT": 8,
            },  # fmt: skip
            num_warps=8,
            num_stages=4,
            targets=("sm_90",),
            aligned=_aligned(_COMBINE),
            signals=True,
        )
        for name, forward in (("forward", True), ("dgrad", False))
    ),
]
