"""Made traces of a GPU, natively and fused, with names as GPUs gave them."""


def ran(name, start, length, stream=7, launched=None, category="kernel"):
    """A GPU's event and the host's call, of 5 us, that launched it; ``launched``: when the call returned."""
    correlation = int(start * 1000)
    details = {"stream": stream, "correlation": correlation}
    event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": details}
    if launched is None:
        return [event]
    call = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": launched - 5,
        "dur": 5,
        "args": details,
    }
    return [event, call]


NATIVE = [
    *ran("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1000, 100, 20, 900),
    *ran("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 1100, 300, 7, 910),
    *ran("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1350, 100, 20, 920),
    # From 1450 nothing runs; the host hands the next over at 1490.
    *ran(
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>(int, X)",
        1500,
        40,
        7,
        1490,
    ),
    *ran("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 1540, 60, 7, 1500),
]
FUSED = [
    *ran("Memcpy PtoP (Device -> Device)", 1000, 80, 21, category="gpu_memcpy"),
    *ran("ag_gemm_kernel", 1000, 320, 7, 910),
    *ran("gemm_rs_kernel", 1330, 100, 7, 920),  # its launch was there: the device waited for something else
    *ran("gather_wait_kernel", 1430, 20, 7, 930),
    *ran("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", 1460, 40, 7, 935),
]
