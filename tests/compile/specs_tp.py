"""Kernels of the tp subpackage, as its ops launch them."""

from tests.support.compile_check import KernelSpec

_ADDRESSES = dict.fromkeys(("signals_addresses", "ready_addresses", "tickets", "control"), "*i64")
_CHANNEL = {
    name: _ADDRESSES.get(name, "*i32")
    for name in ("signals", "signals_addresses", "ready", "ready_addresses", "signature", "tickets", "control")
}
_MNK = {"M": "i32", "N": "i32", "K": "i32"}
_TABLES = {"order": "*i32", "starts": "*i32"}


def _tile(block_m, block_n, block_k, transpose_b):
    return {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "group_m": 8,
        "transpose_b": transpose_b,
        "split_store": block_n >= 256,
    }


def _operands(block_m, block_n, block_k, transpose_b, dtype="bf16"):
    b = f"{block_n},{block_k}" if transpose_b else f"{block_k},{block_n}"
    scales = {} if dtype == "bf16" else {"scales": {"a": "*fp32", "b": "*fp32"}}
    return {"a_desc": f"tensordesc<{dtype}[{block_m},{block_k}]>", "b_desc": f"tensordesc<{dtype}[{b}]>", **scales}


def _store(block_m, block_n):
    return f"tensordesc<bf16[{block_m},{block_n // 2 if block_n >= 256 else block_n}]>"


def _half_b(block_m, block_n, block_k, transpose_b, dtype="bf16"):
    half = block_n // 2 if block_n >= 256 else block_n
    return f"tensordesc<{dtype}[{half},{block_k}]>" if transpose_b else f"tensordesc<{dtype}[{block_k},{half}]>"


def _unscaled(dtype):
    return {"scales": None} if dtype == "bf16" else {}


def _ag_gemm(name, transpose_b, even, block, stages, targets, dtype="bf16", has_bias=False):
    return KernelSpec(
        name=name,
        kernel="ditron_train.tp.ag_gemm:ag_gemm_kernel",
        signature={
            **_operands(*block, transpose_b, dtype),
            "own_desc": f"tensordesc<{dtype}[{block[0]},{block[2]}]>",
            "half_b_desc": _half_b(*block, transpose_b, dtype),
            "c_desc": _store(*block[:2]),
            "channel": _CHANNEL,
            "tables": _TABLES,
            **({"bias": "*bf16"} if has_bias else {}),
            **_MNK,
            "flag_block_rows": "i32",
            "num_whole_tiles": "i32",
        },
        constexprs={
            **_unscaled(dtype),
            **({} if has_bias else {"bias": None}),
            "OP": {
                "tile": _tile(*block, transpose_b),
                "flags_per_rank": 1024,
                "world_size": 8,
                "even": even,
                "split_last_wave": block[1] >= 256,
            },
        },
        num_stages=stages,
        targets=targets,
        signals=None,
        max_single_loads=2 if has_bias else 0,
    )


def _gemm_rs(name, transpose_b, even, block, stages, targets, world_size=8, dtype="bf16"):
    return KernelSpec(
        name=name,
        kernel="ditron_train.tp.gemm_rs:gemm_rs_kernel",
        signature={
            **_operands(*block, transpose_b, dtype),
            **{f"slots{peer}": _store(*block[:2]) for peer in range(8)},
            "slots": {"local": "*bf16", "addresses": "*i64"},
            "channel": _CHANNEL,
            "out_ptr": "*bf16",
            "tables": _TABLES,
            **_MNK,
            "slot_rows": "i32",
            "slot_stride": "i32",
            "flags_per_rank": "i32",
        },
        constexprs={
            **_unscaled(dtype),
            "OP": {
                "tile": _tile(*block, transpose_b),
                "reduce_rows": 64 if world_size <= 4 else 32,
                "world_size": world_size,
                "ranks_pow2": world_size,
                "even": even,
                "use_descriptors": world_size <= 8,
            },
        },
        num_stages=stages,
        targets=targets,
        signals=True,
    )


def _all_reduce(name, kernel, vector, world_size):
    """``vector`` 0: at most two ranks."""
    constexprs = {"VECTOR": vector, "BLOCK": 4096, "WORLD_SIZE": world_size}
    sizes, slots = ("num_elements", "chunk_elements"), {"slots_ptr": "*bf16"}
    if kernel == "reduce_all_kernel":
        constexprs = {"CHUNKS": 64, **constexprs}
    elif kernel == "push_and_reduce_kernel":
        constexprs = {"AREA": 1 << 21, "MOST_PROGRAMS": 128, **constexprs, "BLOCK": 2048}
        sizes, slots = ("num_elements",), {"slots_addresses": "*i64"}
    is_own = kernel == "reduce_local_shard_kernel"
    tables = dict.fromkeys(("ends", "order_of_run", "orders", "first_runs"), "*i32")
    return KernelSpec(
        name=name,
        kernel=f"ditron_train.tp.all_reduce:{kernel}",
        signature={
            "partial_ptr": "*bf16",
            **slots,
            "channel": _CHANNEL,
            "out_ptr": "*bf16",
            **({"row_starts_ptr": "*i32"} if is_own else {}),
            "tables": tables,
            **dict.fromkeys(("N", "slot_rows") if is_own else sizes, "i32"),
        },
        constexprs=constexprs,
        num_warps=8,
        signals=True if kernel == "push_and_reduce_kernel" and world_size > 1 else None,
    )


_WIDE = ((128, 256, 64), 4, ("sm_90", "sm_100"))
_WIDE_FP8 = ((128, 256, 128), 3, ("sm_90",))
_SQUARE_FP8 = ((128, 128, 128), 4, ("sm_90",))
_SQUARE = ((128, 128, 64), {"default": 4, "hip": 2, "sm_80": 3}, ("sm_80", "sm_90", "sm_100", "hip"))

SPECS = [
    KernelSpec(
        name="tp_push_shard",
        kernel="ditron_train.tp.gather:push_shard_kernel",
        signature={
            "x_ptr": "*bf16",
            "gathered_addresses": "*i64",
            "channel": _CHANNEL,
            "row_starts_ptr": "*i32",
            "K": "i32",
            "flag_block_rows": "i32",
        },
        constexprs={"FLAGS_PER_RANK": 1024, "WORLD_SIZE": 8, "BLOCK": 16384},
        num_warps={"default": 32, "hip": 16},
        signals=True,
    ),
    KernelSpec(
        name="tp_gather_start",
        kernel="ditron_train.lang.start:gather_start_kernel",
        signature={"epochs_ptr": "*i32", "num_flags": "i32", "channel": _CHANNEL},
        constexprs={"WORLD_SIZE": 8, "BLOCK": 128},
        num_warps=1,
        signals=True,
    ),
    KernelSpec(
        name="tp_copy_rows",
        kernel="ditron_train.tp.gather:copy_rows_kernel",
        signature={"source_ptr": "*bf16", "destination_ptr": "*bf16", "num_elements": "i32"},
        aligned=("source_ptr", "destination_ptr"),
        constexprs={"BLOCK": 4096},
        num_warps=4,
    ),
    KernelSpec(
        name="tp_gather_wait",
        kernel="ditron_train.tp.gather:gather_wait_kernel",
        signature={"channel": _CHANNEL, "row_starts_ptr": "*i32", "flag_block_rows": "i32"},
        constexprs={"FLAGS_PER_RANK": 1024, "WORLD_SIZE": 8},
        num_warps=1,
        signals=None,
    ),
    KernelSpec(
        name="tp_gather_wait_one",
        kernel="ditron_train.tp.gather:gather_wait_one_kernel",
        signature={"channel": _CHANNEL, "row_starts_ptr": "*i32", "peer": "i32", "flag_block_rows": "i32"},
        constexprs={"FLAGS_PER_RANK": 1024},
        num_warps=1,
        signals=None,
    ),
    *(
        KernelSpec(
            name=f"tp_reduce_rows_{'at_once' if first_part == 0 else 'in_parts'}",
            kernel="ditron_train.tp.reduce_scatter:reduce_rows_kernel",
            signature={
                **dict.fromkeys(("partial_ptr", "slots_ptr", "out_ptr"), "*bf16"),
                "channel": _CHANNEL,
                "row_starts_ptr": "*i32",
                **dict.fromkeys(("N", "slot_rows"), "i32"),
            },
            constexprs={"FIRST_PART": first_part, "BLOCK": 4096, "WORLD_SIZE": 8},
            signals=None,
        )
        for first_part in (0, 6)
    ),
    *(
        KernelSpec(
            name=f"tp_reduce_onto_{'sum' if goes_on else 'nothing'}",
            kernel="ditron_train.tp.reduce_scatter:reduce_onto_kernel",
            signature={
                **dict.fromkeys(("partial_ptr", "slots_ptr", "total_ptr", "out_ptr"), "*bf16"),
                "channel": _CHANNEL,
                "row_starts_ptr": "*i32",
                **dict.fromkeys(("N", "slot_rows", "first", "count"), "i32"),
            },
            constexprs={"STEP": 1, "GOES_ON": goes_on, "BLOCK": 4096, "WORLD_SIZE": 8},
            signals=None,
        )
        for goes_on in (False, True)
    ),
    *(
        build(
            f"tp_{build.__name__[1:]}_{layout}_{size}_{'even' if even else 'uneven'}",
            layout == "nt",
            even,
            block,
            stages,
            targets if even == (layout == "nt") else ("sm_90",),  # all combinations there, elsewhere each choice
        )
        for build in (_ag_gemm, _gemm_rs)
        for layout in ("nt", "nn")
        for even in (True, False)
        for size, (block, stages, targets) in (("wide", _WIDE), ("square", _SQUARE))
    ),
    *(
        _all_reduce(f"tp_{kernel}_{order}", f"{kernel}_kernel", vector, world_size)
        for kernel in ("reduce_all", "push_and_reduce", "reduce_local_shard")
        for order, vector, world_size in (("any_order", 0, 2), ("in_order", 8, 8), ("alone", 0, 1))
        if vector or kernel != "reduce_local_shard"
    ),
    *(
        KernelSpec(
            name=f"tp_largest_of_{world_size}",
            kernel="ditron_train.tp.all_reduce:push_largest_kernel",
            signature={"value_ptr": "*fp32", "slots_addresses": "*i64", "channel": _CHANNEL},
            constexprs={"MOST_PROGRAMS": 128, "WORLD_SIZE": world_size},
            num_warps=1,
            signals=True if world_size > 1 else None,
        )
        for world_size in (1, 2, 8)
    ),
    *(
        build(f"tp_{build.__name__[1:]}_fp8_{size}", True, True, *arguments, dtype="fp8e4nv")
        for build in (_ag_gemm, _gemm_rs)
        for size, arguments in (("wide", _WIDE_FP8), ("square", _SQUARE_FP8))
    ),
    _ag_gemm("tp_ag_gemm_bias_wide", True, True, *_WIDE[:2], ("sm_90",), has_bias=True),
    _ag_gemm("tp_ag_gemm_bias_square", True, True, *_SQUARE[:2], ("sm_80", "sm_90"), has_bias=True),
    _ag_gemm("tp_ag_gemm_fp8_wide_bias", True, True, *_WIDE_FP8, dtype="fp8e4nv", has_bias=True),
    _gemm_rs("tp_gemm_rs_nt_wide_even_four_ranks", True, True, *_WIDE, world_size=4),
    _gemm_rs("tp_gemm_rs_pointers", True, True, *_SQUARE, world_size=16),
]
