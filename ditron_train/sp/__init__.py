"""Layer 3: Ulysses sequence parallelism (Megatron's context parallelism with ``a2a``), its projections fused with its
exchanges."""

from ditron_train.sp.a2a_gemm import a2a_gemm
from ditron_train.sp.context import SPContext, get_sp_context
from ditron_train.sp.exchange import gather_sequence, sum_to_sequence, to_all, to_heads, to_sequence
from ditron_train.sp.functions import (
    InputShards,
    LateWgrad,
    heads_exchange,
    late_wgrad,
    output_projection,
    qkv_projection,
    sequence_exchange,
)
from ditron_train.sp.gemm_a2a import gemm_a2a
from ditron_train.sp.layouts import HeadsLayout, output_layout, packed_rows, qkv_layout, split_by_heads

__all__ = [
    "HeadsLayout",
    "InputShards",
    "LateWgrad",
    "SPContext",
    "a2a_gemm",
    "gather_sequence",
    "gemm_a2a",
    "get_sp_context",
    "heads_exchange",
    "late_wgrad",
    "output_layout",
    "output_projection",
    "packed_rows",
    "qkv_layout",
    "qkv_projection",
    "sequence_exchange",
    "split_by_heads",
    "sum_to_sequence",
    "to_all",
    "to_heads",
    "to_sequence",
]
