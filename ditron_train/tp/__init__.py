"""Tensor parallelism: AG-GEMM and GEMM-RS, and the linear layers made of them.

Where a step's time goes (``compare --trace``: 6 LLaMA-70B layers, 4 microbatches of 8192 tokens, 2 H200s; us of a
layer and microbatch, the mean of 24, from the end of the kernel in front to the start of the one behind):

    ==================  ======  ======  ====================================================================
    forward             native    ours  native: exchange + GEMM; ours: GEMM + sum
    ==================  ======  ======  ====================================================================
    QKV                   1345    1081  316 + 1000; 1035
    output projection     1142     921  305 + 828; 862 + 51
    FC1                   5787    5692  311 + 5461; 5688
    FC2                   3135    2908  305 + 2821; 2850 + 51
    backward             23794   23288  FC1 and projection together 14700 and 14546, FC2 and QKV 9094 and 8742
    ==================  ======  ======  ====================================================================

Uncovered natively are 1237 us forward and 662 backward (the row layers' gathers). Of these 1899 us 1313 are gained,
and 586 lost: 227 to FC1's forward GEMM, where ours is 4 % slower than cuBLAS's, 98 to the other forward GEMMs beside
their copies, 184 to sums behind a GEMM (51 alone, 41 of 158 beside wgrad), 80 to copies of own rows in front of the
column layers' dgrad. The optimizer, the gradients' accumulation and the host's lateness (25 of a step's 1138 ms
natively, 23 with ours) do not change; what both ran alike with nothing beside it took 0.9 % longer with ours. Not
tried: FC1's forward as cuBLAS's GEMMs, own rows first, each rank's behind its copy; at some shapes that are shorter
    torch's async-TP, which does so, was 1 to 8 % slower than ours on 2 GPUs.
"""

from ditron_train.tp.choices import GatherPlan
from ditron_train.tp.context import RowPartition, TPContext, get_context
from ditron_train.tp.functions import column_linear, row_linear
from ditron_train.tp.ops import ag_gemm, all_gather, gemm_rs, start_all_gather, start_reduce_scatter

__all__ = [
    "GatherPlan",
    "RowPartition",
    "TPContext",
    "ag_gemm",
    "all_gather",
    "column_linear",
    "gemm_rs",
    "get_context",
    "row_linear",
    "start_all_gather",
    "start_reduce_scatter",
]
