"""Kernels of the optim subpackage, as Muon launches them."""

from tests.support.compile_check import KernelSpec


def _symmetric(name, has_add, block_m, block_n, block_k, stages, targets, dtype="bf16", quarters=False, num_warps=8):
    a, b, c = ((f"{block_m // 2},{2 * block_k}",) * 2 + (f"{block_m // 2},{block_m // 2}",)) if quarters else (
        f"{block_m},{block_k}", f"{block_n},{block_k}", f"{block_m},{block_m}"
    )  # fmt: skip
    blocks = {"a": a, "b": b, "add": c, "c": c}
    quarter_descs = {f"quarter_{name}_desc": f"tensordesc<{dtype}[{block}]>" for name, block in blocks.items()}
    return KernelSpec(
        name=name,
        kernel="ditron_train.optim.kernels:symmetric_kernel",
        signature={
            "a_desc": f"tensordesc<{dtype}[{block_m},{block_k}]>",
            "b_desc": f"tensordesc<{dtype}[{block_n},{block_k}]>",
            "add_desc": f"tensordesc<{dtype}[{block_m},{block_m}]>",
            "c_desc": f"tensordesc<{dtype}[{block_m},{block_m}]>",
            **quarter_descs,
            "order_ptr": "*i32",
            **dict.fromkeys(("num_tiles", "num_quarters", "K"), "i32"),
            "alpha": "fp32",
            "beta": "fp32",
        },
        constexprs={
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "HAS_ADD": has_add,
            "SPLIT_STORE": block_n > block_m,
            "HAS_QUARTERS": quarters,
        },
        num_warps=num_warps,
        num_stages=stages,
        targets=targets,
        aligned=("order_ptr",),
    )


def _addmm(name, block_m, block_n, block_k, stages, targets, split_last_wave=False, num_warps=8):
    split = block_n >= 256
    half = block_n // 2 if split_last_wave else block_n
    store = f"{block_m},{block_n // 2 if split else block_n}"
    return KernelSpec(
        name=name,
        kernel="ditron_train.optim.kernels:addmm_kernel",
        signature={
            "a_desc": f"tensordesc<bf16[{block_m},{block_k}]>",
            "b_desc": f"tensordesc<bf16[{block_k},{block_n}]>",
            "half_b_desc": f"tensordesc<bf16[{block_k},{half}]>",
            "add_desc": f"tensordesc<bf16[{store}]>",
            "c_desc": f"tensordesc<bf16[{store}]>",
            **dict.fromkeys(("M", "N", "K", "num_whole_tiles"), "i32"),
            **dict.fromkeys(("alpha", "beta"), "fp32"),
        },
        constexprs={
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "GROUP_M": 8,
            "SPLIT_STORE": split,
            "SPLIT_LAST_WAVE": split_last_wave,
        },
        num_warps=num_warps,
        num_stages=stages,
        targets=targets,
    )


_FP32 = ("param_ptr", "momentum_ptr", "grad_ptr", "direction_ptr")

_ONCE_ELSEWHERE = {
    True: ("sm_90", "sm_100"),
    False: ("sm_90",),
}  # with and without a summand on sm_90, one of them on sm_100

SPECS = [
    *(
        spec
        for add in (False, True)
        for spec in (
            _symmetric(f"symmetric_wide_add{add:d}", add, 128, 256, 64, 3, ("sm_90", "sm_100")),
            _symmetric(f"symmetric_square_add{add:d}", add, 128, 128, 64, 4, _ONCE_ELSEWHERE[not add], num_warps=4),
            _symmetric(
                f"symmetric_quarters_add{add:d}",
                add,
                128,
                128,
                64,
                4,
                _ONCE_ELSEWHERE[add],
                quarters=True,
                num_warps=4,
            ),
            _symmetric(f"symmetric_small_add{add:d}", add, 64, 64, 128, 3, _ONCE_ELSEWHERE[add], num_warps=4),
            _symmetric(f"symmetric_ampere_add{add:d}", add, 128, 128, 32, 3, ("sm_80",)),
            _symmetric(f"symmetric_cdna_add{add:d}", add, 128, 128, 64, 2, ("hip",)),
        )
    ),
    _symmetric("symmetric_wide_fp16", True, 128, 256, 64, 3, ("sm_90",), "fp16"),
    _addmm("addmm_wide", 128, 256, 64, 3, ("sm_90",)),
    _addmm("addmm_wide_halved_tail", 128, 256, 64, 3, ("sm_90", "sm_100"), split_last_wave=True),
    _addmm("addmm_square", 128, 128, 64, 4, ("sm_90", "sm_100")),
    _addmm("addmm_square_4_warps", 128, 128, 64, 4, ("sm_90", "sm_100"), num_warps=4),
    _addmm("addmm_small", 64, 128, 64, 4, ("sm_90", "sm_100"), num_warps=4),
    _addmm("addmm_ampere", 128, 128, 32, 3, ("sm_80",)),
    _addmm("addmm_cdna", 128, 128, 64, 2, ("hip",)),
    *(
        KernelSpec(
            name=f"momentum_{decay}_{'nesterov' if nesterov else 'plain'}",
            kernel="ditron_train.optim.kernels:momentum_kernel",
            signature={
                **dict.fromkeys(_FP32, "*fp32"),
                "num_elements": "i64",
                **dict.fromkeys(("decay_alpha", "momentum_weight", "nesterov_weight"), "fp32"),
            },
            constexprs={
                "DECAY": decay,
                "MOMENTUM_SMALL": True,
                "NESTEROV": nesterov,
                "NESTEROV_SMALL": False,
                "BLOCK": 1024,
            },
            num_warps=4,
        )
        for decay, nesterov in (("decoupled", True), ("l2", True), ("none", False))
    ),
    *(
        KernelSpec(
            name=f"normalize_{'transposed' if transpose else 'plain'}",
            kernel="ditron_train.optim.kernels:normalize_kernel",
            signature={
                "direction_ptr": "*fp32",
                "norm_ptr": "*fp32",
                "x_ptr": "*bf16",
                **dict.fromkeys(("rows", "cols", "direction_row_stride", "x_row_stride"), "i32"),
                "eps": "fp32",
            },
            constexprs={"TRANSPOSE": transpose, "BLOCK_M": 64, "BLOCK_N": 64},
            num_warps=4,
        )
        for transpose in (False, True)
    ),
    *(
        KernelSpec(
            name=f"update_{'transposed' if transpose else 'plain'}",
            kernel="ditron_train.optim.kernels:update_kernel",
            signature={
                "param_ptr": "*fp32",
                "x_ptr": "*bf16",
                **dict.fromkeys(
                    ("rows", "cols", "rows_per_group", "param_group_stride", "param_row_stride", "x_row_stride"), "i32"
                ),
                **dict.fromkeys(("scale", "extra_scale", "negative_lr"), "fp32"),
            },
            constexprs={"TRANSPOSE": transpose, "BLOCK_M": 64, "BLOCK_N": 64},
            num_warps=4,
        )
        for transpose in (False, True)
    ),
]
