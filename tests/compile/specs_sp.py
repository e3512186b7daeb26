"""Kernels of the sp subpackage, as its ops launch them, and of the layers below that it launches."""

from tests.support.compile_check import TARGETS, KernelSpec

_CHANNEL = {
    "signals": "*i32",
    "signals_addresses": "*i64",
    "ready": "*i32",
    "ready_addresses": "*i64",
    "signature": "*i32",
    "tickets": "*i64",
    "control": "*i64",
}
_SHAPE = {
    **dict.fromkeys(("M", "half_rows", "slot_rows", "stride", "num_groups"), "i32"),
    "widths": ("i32", "i32", "i32"),
}


def _pointers(dtype):
    return {"parts": (f"*{dtype}", f"*{dtype}", f"*{dtype}"), "buffers": "*i64", "table": "*i32"}


def _store(block_m, block_n):
    return f"tensordesc<bf16[{block_m},{block_n // 2 if block_n >= 256 else block_n}]>"


def _gemm(name, kernel, signature, layout, block, stages, targets, **constexprs):
    block_m, block_n, block_k = block
    b = f"{block_n},{block_k}" if layout == "nt" else f"{block_k},{block_n}"
    return KernelSpec(
        name=name,
        kernel=f"ditron_train.sp.{kernel.removesuffix('_kernel')}:{kernel}",
        signature={
            "a_desc": f"tensordesc<bf16[{block_m},{block_k}]>",
            "b_desc": f"tensordesc<bf16[{b}]>",
            "c_desc": _store(block_m, block_n),
            "channel": _CHANNEL,
            "N": "i32",
            "K": "i32",
            **signature,
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
        max_single_loads=2 if "bias" in signature else 0,
        signals=True,
    )


def _gemm_a2a(name, layout, block, stages, targets, has_bias=False):
    signature = dict.fromkeys(("M", "columns_per_rank", "slot_rows"), "i32")
    constexprs = {"WORLD_SIZE": 8}
    if has_bias:
        signature["bias"] = "*bf16"
    else:
        constexprs["bias"] = None
    return _gemm(name, "gemm_a2a_kernel", signature, layout, block, stages, targets, **constexprs)


def _a2a_gemm(name, layout, block, stages, targets):
    signature = {"pointers": _pointers("bf16"), "shape": _SHAPE, "num_push": "i32", "num_early_tiles": "i32"}
    copy = _copy_blocks(256, 3 if layout == "nn" else 1, 256, towards_heads=False, has_table=False)
    return _gemm(name, "a2a_gemm_kernel", signature, layout, block, stages, targets, COPY=copy, RANKS_POW2=8)


def _copy_blocks(flag_block_rows, num_parts, width, *, towards_heads, has_table):
    """As the ops cut copies of 1 part, or of q, k and v."""
    return {
        "flag_block_rows": flag_block_rows,
        "rows": 128,
        "groups": (1, width // 128, width // 128)[:num_parts],
        "widths": (width, 128, 128)[:num_parts],
        "to_heads": towards_heads,
        "to_all": False,
        "has_table": has_table,
        "world_size": 8,
    }


def _copy(name, kernel, towards_heads, num_parts, signature=None, **constexprs):
    width = 512 if kernel == "receive_kernel" and towards_heads else 256  # a pull, or not
    has_table = towards_heads and num_parts == 3
    return KernelSpec(
        name=name,
        kernel=f"ditron_train.sp.transfer:{kernel}",
        signature={"pointers": _pointers("bf16"), "channel": _CHANNEL, "shape": _SHAPE, **(signature or {})},
        constexprs={
            "COPY": _copy_blocks(128, num_parts, width, towards_heads=towards_heads, has_table=has_table),
            **constexprs,
        },
        targets=TARGETS if num_parts == 3 else ("sm_90",),
        num_warps=16,
        signals=True if kernel == "push_kernel" else None,
        max_spill_bytes=600 if width == 512 else 0,  # measured: with them, twice the block in flight is faster
    )


_WIDE = ((128, 256, 64), 4, ("sm_90", "sm_100"))
_SQUARE = ((128, 128, 64), {"default": 4, "hip": 2, "sm_80": 3}, ("sm_80", "sm_90", "sm_100", "hip"))

SPECS = [
    *(
        KernelSpec(
            name=name,
            kernel="ditron_train.lang.agree:agree_kernel",
            signature={
                "ready_addresses": "*i64",
                "ready_ptr": "*i32",
                "signature_ptr": "*i32",
                "tickets_ptr": "*i64",
                "control_ptr": "*i64",
                "signals_addresses": "*i64",
            },
            constexprs={"NUM_ROLES": 2, "WORLD_SIZE": 8, **others},
            num_warps=1,
            signals=None if others else True,  # without VERIFY nothing is acquired
        )
        for name, others in (("lang_agree", {}), ("lang_agree_on_nothing", {"VERIFY": False, "FLAGS": 128}))
    ),
    *(
        build(f"sp{build.__name__}_{layout}_{size}", layout, *shape)
        for build in (_gemm_a2a, _a2a_gemm)
        for layout in ("nt", "nn")
        for size, shape in (("wide", _WIDE), ("square", _SQUARE))
    ),
    _gemm_a2a("sp_gemm_a2a_bias", "nt", (128, 256, 64), 4, ("sm_90",), has_bias=True),
    *(
        spec
        for towards_heads in (True, False)
        for num_parts in (1, 3)
        for where in [f"{'heads' if towards_heads else 'sequence'}_{num_parts}"]
        for spec in (
            _copy(f"sp_push_{where}", "push_kernel", towards_heads, num_parts),
            _copy(
                f"sp_receive_{where}",
                "receive_kernel",
                towards_heads,
                num_parts,
                {"flags_per_block": "i32"},
                FLAGS=8,
                PULL=towards_heads,
                BEHIND=towards_heads and num_parts == 1,
            ),
        )
    ),
    KernelSpec(
        name="sp_arrived",
        kernel="ditron_train.sp.transfer:arrived_kernel",
        signature={"channel": _CHANNEL, "num_flag_blocks": "i32"},
        constexprs={"WORLD_SIZE": 8},
        num_warps=1,
        signals=None,
    ),
    *(
        KernelSpec(
            name=f"sp_keys_wait_{step}",
            kernel="ditron_train.sp.keys_values:keys_wait_kernel",
            signature={"channel": _CHANNEL, "senders_ptr": "*i32"},
            constexprs={"STEP": step, "LAST": step == 1, "WORLD_SIZE": 8},
            num_warps=1,
            signals=None,
        )
        for step in (0, 1)
    ),
    KernelSpec(
        name="sp_add_steps",
        kernel="ditron_train.sp.keys_values:add_steps_kernel",
        signature={
            **dict.fromkeys(("first_ptr", "second_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(("first_row", "first_end", "second_row", "second_end", "row_elements"), "i32"),
        },
        aligned=("first_ptr", "second_ptr", "out_ptr", "row_elements"),
        constexprs={"BLOCK": 4096},
        num_warps=8,
    ),
    KernelSpec(
        name="sp_sum_keys",
        kernel="ditron_train.sp.keys_values:sum_keys_kernel",
        signature={
            **dict.fromkeys(("partial_ptr", "slots_ptr", "out_ptr"), "*bf16"),
            "channel": _CHANNEL,
            "bounds_ptr": "*i32",
            **dict.fromkeys(("chunk_elements", "row_elements"), "i32"),
        },
        aligned=("partial_ptr", "slots_ptr", "out_ptr", "chunk_elements", "row_elements"),
        constexprs={"BLOCK": 4096, "WORLD_SIZE": 8},
        num_warps=8,
        signals=None,
    ),
]
