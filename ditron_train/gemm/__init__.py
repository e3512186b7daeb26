"""Layer 2: tile GEMMs whose bits equal cuBLAS's if cuBLAS does not split K, and the building blocks that overlapped
kernels inline."""

from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.gemm.operands import aligned_operand, make_descriptor
from ditron_train.gemm.ops import matmul_nn, matmul_nt

__all__ = ["GemmConfig", "aligned_operand", "choose_config", "make_descriptor", "matmul_nn", "matmul_nt"]
