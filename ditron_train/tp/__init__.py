"""Tensor parallelism: AG-GEMM, GEMM-RS and GEMM-AR, and the linear layers made of them.

Where a step's time goes, and what was tried: ``docs/measurements/tp.md``.
"""

from ditron_train.tp.ag_gemm import ag_gemm
from ditron_train.tp.choices import GatherPlan
from ditron_train.tp.context import RowPartition, TPContext, get_tp_context
from ditron_train.tp.gather import all_gather, start_all_gather
from ditron_train.tp.gemm_ar import gemm_ar
from ditron_train.tp.gemm_rs import gemm_rs
from ditron_train.tp.linear import column_linear, row_linear
from ditron_train.tp.reduce_scatter import start_reduce_scatter

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
