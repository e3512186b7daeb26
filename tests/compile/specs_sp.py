"""Kernels of the sp room, as its ops launch them, and of the floors below that it launches."""

from tests.support.compile_check import TARGETS, KernelSpec

_CHANNEL = {"tickets_ptr": "*i64", "control_ptr": "*i64"}
_READY = {"ready_addresses": "*i64", "ready_ptr": "*i32", "signature_ptr": "*i32"}
_PARTS = {"part0_ptr": "*bf16", "part1_ptr": "*bf16", "part2_ptr": "*bf16"}
_SHAPE = dict.fromkeys(
    ("M", "half_rows", "slot_rows", "buffer_stride", "num_groups", "width0", "width1", "width2"), "i32"
)


def _store(block_m, block_n):
    return f"tensordesc<bf16[{block_m},{block_n // 2 if block_n >= 256 else block_n}]>"


def _gemm(name, kernel, signature, layout, block, stages, targets, signals, **constexprs):
    block_m, block_n, block_k = block
    b = f"{block_n},{block_k}" if layout == "nt" else f"{block_k},{block_n}"
    return KernelSpec(
        name=name,
        kernel=f"ditron_train.sp.gemm_kernels:{kernel}",
        signature={
            "a_desc": f"tensordesc<bf16[{block_m},{block_k}]>",
            "b_desc": f"tensordesc<bf16[{b}]>",
            **signature,
            **_CHANNEL,
            "M": "i32",
            "N": "i32",
            "K": "i32",
        },
        constexprs={
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "GROUP_M": 8,
            "TRANSPOSE_B": layout == "nt",
            "SPLIT_STORE": block_n >= 256,
            **constexprs,
        },
        num_stages=stages,
        targets=targets,
        signals=signals,
    )


def _gemm_a2a(name, layout, block, stages, targets, world_size=8):
    signature = {
        "c_desc": _store(*block[:2]),
        "signals_addresses": "*i64",
        **_READY,
        "columns_per_rank": "i32",
        "slot_rows": "i32",
    }
    return _gemm(name, "gemm_a2a_kernel", signature, layout, block, stages, targets, True, WORLD_SIZE=world_size)


def _a2a_gemm(name, layout, block, stages, targets):
    signature = {
        "c_desc": _store(*block[:2]),
        **_PARTS,
        "buffer_addresses": "*i64",
        "signals_addresses": "*i64",
        "signals_ptr": "*i32",
        **_READY,
        "table_ptr": "*i32",
        **{size: type for size, type in _SHAPE.items() if size not in ("M", "slot_rows")},
        "num_push": "i32",
        "num_early_tiles": "i32",
    }
    return _gemm(
        name,
        "a2a_gemm_kernel",
        signature,
        layout,
        block,
        stages,
        targets,
        True,
        GRANULE_ROWS=256,
        **_blocks(3 if layout == "nn" else 1, 256),
        HAS_TABLE=False,
        WORLD_SIZE=8,
        RANKS_POW2=8,
    )


def _blocks(num_parts, width):
    """As the ops cut copies of 1 part, or of q, k and v."""
    return {
        "ROWS": 128,
        "NUM_PARTS": num_parts,
        "BLOCK_G0": 1,
        "BLOCK_G1": width // 128 if num_parts > 1 else 1,
        "BLOCK_G2": width // 128 if num_parts > 1 else 1,
        "BLOCK_W0": width,
        "BLOCK_W1": 128 if num_parts > 1 else 1,
        "BLOCK_W2": 128 if num_parts > 1 else 1,
    }


def _copy(name, kernel, signature, towards_heads, num_parts, dtype="bf16", **constexprs):
    width = 512 if kernel == "receive_kernel" and towards_heads else 256  # a pull, or not
    return KernelSpec(
        name=name,
        kernel=f"ditron_train.sp.kernels:{kernel}",
        signature={**dict.fromkeys(_PARTS, f"*{dtype}"), **signature, "table_ptr": "*i32", **_CHANNEL, **_SHAPE},
        constexprs={
            "GRANULE_ROWS": 128,
            **_blocks(num_parts, width),
            "TO_HEADS": towards_heads,
            "HAS_TABLE": towards_heads and num_parts == 3,
            "WORLD_SIZE": 8,
            **constexprs,
        },
        targets=TARGETS if num_parts == 3 else ("sm_90",),
        num_warps=16,
        signals=True if kernel == "push_kernel" else None,
        max_spill_bytes=600 if width == 512 else 0,  # measured: with them, twice the block in flight is faster
    )


_WIDE = ((128, 256, 64), 4, ("sm_90", "sm_100"))
_SQUARE = ((128, 128, 64), {"default": 4, "hip": 2, "sm_80": 3}, ("sm_80", "sm_90", "sm_100", "hip"))
_PUSH = {"buffer_addresses": "*i64", "signals_addresses": "*i64", **_READY}
_RECEIVE = {"buffer_addresses": "*i64", "signals_ptr": "*i32", "flags_per_granule": "i32"}

SPECS = [
    KernelSpec(
        name="lang_agree",
        kernel="ditron_train.lang.agree:agree_kernel",
        signature={**_READY, **_CHANNEL},
        constexprs={"NUM_ROLES": 2, "WORLD_SIZE": 8},
        num_warps=1,
        signals=True,
    ),
    *(
        build(f"sp{build.__name__}_{layout}_{size}", layout, *shape)
        for build in (_gemm_a2a, _a2a_gemm)
        for layout in ("nt", "nn")
        for size, shape in (("wide", _WIDE), ("square", _SQUARE))
    ),
    *(
        spec
        for towards_heads in (True, False)
        for num_parts in (1, 3)
        for where in [f"{'heads' if towards_heads else 'sequence'}_{num_parts}"]
        for spec in (  # fmt: skip
            _copy(f"sp_push_{where}", "push_kernel", _PUSH, towards_heads, num_parts),
            _copy(
                f"sp_receive_{where}",
                "receive_kernel",
                _RECEIVE,
                towards_heads,
                num_parts,
                FLAGS=8,
                PULL=towards_heads,
                BEHIND=towards_heads and num_parts == 1,
            ),
        )
    ),
    KernelSpec(
        name="sp_arrived",
        kernel="ditron_train.sp.kernels:arrived_kernel",
        signature={"signals_ptr": "*i32", **_CHANNEL, "num_granules": "i32"},
        constexprs={"WORLD_SIZE": 8},
        num_warps=1,
        signals=None,
    ),
]
