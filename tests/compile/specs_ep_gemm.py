"""Grouped GEMMs of the ep subpackage, as their configurations launch them."""

from tests.support.compile_check import KernelSpec


def _sizes(m, n, k, transpose_b):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    return {**blocks, "GROUP_M": 8, "SPLIT_STORE": n >= 256, "TRANSPOSE_B": transpose_b}


def _gemm(name, transpose_b, m, n, k, stages, targets=("sm_90", "sm_100")):
    split = n >= 256
    half = n // 2 if split else n
    return KernelSpec(
        name=f"ep_group_gemm_{name}",
        kernel="ditron_train.ep.grouped_gemm:group_gemm_kernel",
        signature={
            "a_desc": f"tensordesc<bf16[{m},{k}]>",
            "b_desc": f"tensordesc<bf16[1,{n},{k}]>" if transpose_b else f"tensordesc<bf16[1,{k},{n}]>",
            "half_b_desc": f"tensordesc<bf16[1,{half},{k}]>" if transpose_b else f"tensordesc<bf16[1,{k},{half}]>",
            "c_desc": f"tensordesc<bf16[1,{m},{half}]>",
            "places": "*i32",
            "tiles": "*i32",
            "N": "i32",
            "K": "i32",
        },
        constexprs={"GEMM": _sizes(m, n, k, transpose_b)},
        num_warps=8,
        num_stages=stages,
        targets=targets,
    )


def _wgrad(name, m, n, k, stages, targets=("sm_90", "sm_100"), to=0):
    split = n >= 256
    return KernelSpec(
        name=f"ep_group_wgrad_{name}",
        kernel="ditron_train.ep.grouped_gemm:group_wgrad_kernel",
        signature={
            "g_desc": f"tensordesc<bf16[1,{k},{m}]>",
            "x_desc": f"tensordesc<bf16[1,{k},{n}]>",
            "w": "*i64" if to else f"tensordesc<bf16[1,{m},{n // 2 if split else n}]>",
            "g_pointer": "*bf16",
            "x_pointer": "*bf16",
            "row_ends": "*i32",
            "N": "i32",
            "K": "i32",
        },
        constexprs={"NUM_EXPERTS": 15, "EXPERTS": 16, "TO": to, "WIDE": to > 0, "GEMM": _sizes(m, n, k, False)},
        num_warps=8,
        num_stages=stages,
        targets=targets,
        aligned=("g_pointer", "x_pointer", "N", "K"),
    )


SPECS = [
    KernelSpec(
        name="ep_place_tokens",
        kernel="ditron_train.ep.gather:place_tokens",
        signature={"tokens": "*bf16", "rows": "*bf16", "rows_of_token": "*i32", "num_tokens": "i32", "hidden": "i32"},
        constexprs={"PLACES": 15, "PLACE_LANES": 16, "BLOCK_T": 8, "BLOCK_H": 1024},
        num_warps=8,
        aligned=("tokens", "rows", "hidden"),
    ),
    *(
        KernelSpec(
            name=f"ep_sum_rows_{name}",
            kernel="ditron_train.ep.gather:sum_rows",
            signature={"rows": "*bf16", "out": out, "rows_of_token": "*i32", "num_tokens": "i32", "hidden": "i32"},
            constexprs={
                "PLACES": places,
                "PLACE_LANES": places + places // 15,
                "FROM_ZERO": places > 1,
                "DESCENDING": fused,
                "ROUND_EACH": not fused,
                "BLOCK_T": 8,
                "BLOCK_H": 1024,
            },
            num_warps=8,
            aligned=("rows", "out", "hidden"),
        )
        for name, out, fused, places in (
            ("descending", "*fp32", True, 15),
            ("rounded", "*bf16", False, 15),
            ("of_slices", "*bf16", False, 1),
        )  # fmt: skip
    ),
    KernelSpec(
        name="ep_list_tiles",
        kernel="ditron_train.ep.grouped_gemm:list_tiles",
        signature={"tokens_per_expert": "*i64", "tiles": "*i32", "max_tiles": "i32", "num_rows": "i32"},
        constexprs={"NUM_EXPERTS": 15, "EXPERTS": 16, "BLOCK_M": 128, "BLOCK": 128},
        num_warps=4,
    ),
    KernelSpec(
        name="ep_largest_of_experts",
        kernel="ditron_train.ep.grouped_quantization:largest_of_experts",
        signature={"values": "*bf16", "tiles": "*i32", "largest": "*i32", "columns": "i32"},
        constexprs={"PARTS": 4, "BLOCK_M": 128, "BLOCK": 8192},
        num_warps=8,
    ),
    *(
        KernelSpec(
            name=f"ep_cast_rows_{name}",
            kernel="ditron_train.ep.grouped_quantization:cast_rows",
            signature={
                "rows": "*bf16",
                "tiles": "*i32",
                "ends": "*i32",
                "largest": "*i32",
                "numbers": "*i64",
                "data": "*u8",
                "transposes": "*u8",
                "inverses": "*fp32",
                "columns": "i32",
            },
            constexprs={
                "MAX_FP8": largest,
                "EPSILON": 0.0,
                "POWER_OF_2": power_of_2,
                "KEEPS": keeps,
                "STEP": 16,
                "ALIGNED": 64,
                "BLOCK_M": 128,
                "BLOCK_K": 128,
            },
            num_warps=8,
            targets=("sm_90", "sm_100"),
        )
        for name, largest, power_of_2, keeps in (
            ("e4m3", 448.0, False, True),
            ("e5m2", 57344.0, False, True),
            ("power_of_2", 448.0, True, False),
        )
    ),
    *(
        KernelSpec(
            name=f"ep_list_tiles_of_groups_{which}",
            kernel="ditron_train.ep.grouped_gemm:list_tiles_of_groups",
            signature={"counts": "*i64", "groups": "*i32", "tiles": "*i32", "max_tiles": "i32", "min_rows": "i32"},
            constexprs={
                "NUM_SOURCES": 4,
                "NUM_EXPERTS": 15,
                "EXPERTS": 16,
                "LAST": which == "last",
                "SLACK": 1024,
                "BLOCK_M": 128,
                "BLOCK": 128,
            },
            num_warps=4,
        )
        for which in ("last", "first")
    ),
    *(
        spec
        for layout, transpose_b in (("nt", True), ("nn", False))
        for spec in (
            _gemm(f"{layout}_wide", transpose_b, 128, 256, 64, 4),
            _gemm(f"{layout}_square", transpose_b, 128, 128, 64, 4),
            _gemm(f"{layout}_ampere", transpose_b, 128, 128, 32, 3, ("sm_80",)),
            _gemm(f"{layout}_cdna", transpose_b, 128, 128, 64, 2, ("hip",)),
        )
    ),
    _wgrad("wide", 128, 256, 64, 4),
    _wgrad("square", 128, 128, 64, 4),
    _wgrad("added", 128, 128, 64, 4, ("sm_90",), to=1),
    _wgrad("written_over", 128, 128, 64, 4, ("sm_90",), to=2),
    _wgrad("ampere", 128, 128, 32, 3, ("sm_80",)),
    _wgrad("cdna", 128, 128, 64, 2, ("hip",)),
]
