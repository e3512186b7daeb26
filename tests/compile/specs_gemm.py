"""Kernels of the gemm room, as its configurations launch them."""

from tests.support.compile_check import KernelSpec


def _gemm(
    name,
    transpose_a,
    transpose_b,
    block_m,
    block_n,
    block_k,
    stages,
    dtype="bf16",
    halve_tail=False,
    targets=("sm_90", "sm_100"),
):
    a_block = f"{block_k},{block_m}" if transpose_a else f"{block_m},{block_k}"
    b_block = f"{block_n},{block_k}" if transpose_b else f"{block_k},{block_n}"
    half = block_n // 2 if halve_tail else block_n
    half_b_block = f"{half},{block_k}" if transpose_b else f"{block_k},{half}"
    split = block_n >= 256
    return KernelSpec(
        name=name,
        kernel="ditron_train.gemm.kernels:gemm_kernel",
        signature={
            "a_desc": f"tensordesc<{dtype}[{a_block}]>",
            "b_desc": f"tensordesc<{dtype}[{b_block}]>",
            "half_b_desc": f"tensordesc<{dtype}[{half_b_block}]>",
            "c_desc": f"tensordesc<{dtype}[{block_m},{block_n // 2 if split else block_n}]>",
            "M": "i32",
            "N": "i32",
            "K": "i32",
            "num_whole_tiles": "i32",
        },
        constexprs={
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "GROUP_M": 8,
            "TRANSPOSE_A": transpose_a,
            "TRANSPOSE_B": transpose_b,
            "SPLIT_STORE": split,
            "HALVE_TAIL": halve_tail,
        },
        num_warps=8,
        num_stages=stages,
        targets=targets,
    )


_ONCE_ELSEWHERE = {True: ("sm_90", "sm_100"), False: ("sm_90",)}  # every layout on sm_90, one of them on sm_100

SPECS = [
    spec
    for layout, transpose_a, transpose_b in (("nt", False, True), ("nn", False, False), ("tn", True, False))
    for spec in (
        _gemm(f"gemm_{layout}_wide", transpose_a, transpose_b, 128, 256, 64, 4),
        _gemm(
            f"gemm_{layout}_wide_halved_tail",
            transpose_a,
            transpose_b,
            128,
            256,
            64,
            4,
            halve_tail=True,
            targets=_ONCE_ELSEWHERE[layout == "nn"],
        ),
        _gemm(f"gemm_{layout}_square", transpose_a, transpose_b, 128, 128, 64, 4),
        _gemm(
            f"gemm_{layout}_square_fp16",
            transpose_a,
            transpose_b,
            128,
            128,
            64,
            4,
            dtype="fp16",
            targets=_ONCE_ELSEWHERE[layout == "tn"],
        ),
        _gemm(f"gemm_{layout}_ampere", transpose_a, transpose_b, 128, 128, 32, 3, targets=("sm_80",)),
        _gemm(f"gemm_{layout}_cdna", transpose_a, transpose_b, 128, 128, 64, 2, targets=("hip",)),
    )
]
