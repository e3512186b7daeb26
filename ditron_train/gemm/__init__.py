"""Floor 2: tile GEMMs whose bits equal cuBLAS's, the building blocks that overlapped kernels inline, and what is known
of bits."""

from ditron_train.gemm.bits import known_bits, probe_bits
from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.gemm.operands import aligned_operand, make_descriptor
from ditron_train.gemm.ops import matmul_nn, matmul_nt, matmul_tn

__all__ = [
    "GemmConfig",
    "aligned_operand",
    "choose_config",
    "known_bits",
    "make_descriptor",
    "matmul_nn",
    "matmul_nt",
    "matmul_tn",
    "probe_bits",
]
