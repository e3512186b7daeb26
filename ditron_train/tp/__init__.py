"""Tensor parallelism: AG-GEMM, GEMM-RS and GEMM-AR, and the linear layers made of them.

Where a step's time goes, and what was tried: ``docs/measurements/tp.md``.
"""

from ditron_train.tp.context import RowPartition, TPContext, get_tp_context
from ditron_train.tp.functions import column_linear, row_linear
from ditron_train.tp.movement import all_gather, start_all_gather, start_reduce_scatter
from ditron_train.tp.ops import ag_gemm, gemm_ar, gemm_rs
from ditron_train.tp.problem import GatherPlan

__all__ = [
    "GatherPlan",
    "RowPartition",
    "TPContext",
    "ag_gemm",
    "all_gather",
    "column_linear",
    "gemm_ar",
    "gemm_rs",
    "get_tp_context",
    "row_linear",
    "start_all_gather",
    "start_reduce_scatter",
]
