"""Kernels of the gemm subpackage, as its configurations launch them."""

from tests.support.compile_check import KernelSpec


def _gemm(
    name,
    transpose_b,
    block_m,
    block_n,
    block_k,
    stages,
    dtype="bf16",
    split_last_wave=False,
    targets=("sm_90", "sm_100"),
    fp8_chain=None,
):
    b_block = f"{block_n},{block_k}" if transpose_b else f"{block_k},{block_n}"
    half = block_n // 2 if split_last_wave else block_n
    half_b_block = f"{half},{block_k}" if transpose_b else f"{block_k},{half}"
    split = block_n >= 256
    is_fp8 = dtype.startswith("fp8")
    out = "bf16" if is_fp8 else dtype
    return KernelSpec(
        name=name,
        kernel="ditron_train.gemm.kernels:gemm_kernel",
        signature={
            "a_desc": f"tensordesc<{dtype}[{block_m},{block_k}]>",
            "b_desc": f"tensordesc<{'fp8e4nv' if is_fp8 else dtype}[{b_block}]>",
            "half_b_desc": f"tensordesc<{'fp8e4nv' if is_fp8 else dtype}[{half_b_block}]>",
            "c_desc": f"tensordesc<{out}[{block_m},{block_n // 2 if split else block_n}]>",
            **({"scales": {"a": "*fp32", "b": "*fp32"}} if is_fp8 else {}),
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
            "TRANSPOSE_B": transpose_b,
            "SPLIT_STORE": split,
            "SPLIT_LAST_WAVE": split_last_wave,
            "FP8_CHAIN": fp8_chain,
            **({} if is_fp8 else {"scales": None}),
        },
        num_warps=8,
        num_stages=stages,
        targets=targets,
    )


_ONCE_ELSEWHERE = {True: ("sm_90", "sm_100"), False: ("sm_90",)}  # every layout on sm_90, one of them on sm_100

SPECS = [
    spec
    for layout, transpose_b in (("nt", True), ("nn", False))
    for spec in (
        _gemm(f"gemm_{layout}_wide", transpose_b, 128, 256, 64, 4),
        _gemm(
            f"gemm_{layout}_wide_halved_tail",
            transpose_b,
            128,
            256,
            64,
            4,
            split_last_wave=True,
            targets=_ONCE_ELSEWHERE[layout == "nn"],
        ),
        _gemm(f"gemm_{layout}_square", transpose_b, 128, 128, 64, 4),
        _gemm(
            f"gemm_{layout}_square_fp16",
            transpose_b,
            128,
            128,
            64,
            4,
            dtype="fp16",
            targets=_ONCE_ELSEWHERE[layout == "nt"],
        ),
        _gemm(f"gemm_{layout}_ampere", transpose_b, 128, 128, 32, 3, targets=("sm_80",)),
        _gemm(f"gemm_{layout}_cdna", transpose_b, 128, 128, 64, 2, targets=("hip",)),
    )
]

_FP8 = dict(transpose_b=True, block_m=128, block_k=128, targets=("sm_90",))
SPECS += [
    _gemm("gemm_fp8_wide", block_n=256, stages=3, dtype="fp8e4nv", split_last_wave=True, **_FP8),
    _gemm("gemm_fp8_square_e5m2", block_n=128, stages=4, dtype="fp8e5", **_FP8),
    _gemm("gemm_fp8_square_split", block_n=128, stages=4, dtype="fp8e5", fp8_chain=128, **_FP8),
]
