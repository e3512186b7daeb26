"""Whether cuBLAS's products of each rank's rows have the bits of its product of the rows of all ranks.

cuBLAS chooses a kernel by the sizes of a product: one of fewer rows may split its sums. Then tiles multiply, whose
bits do not depend on the number of rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.gemm.ops import library_product
from ditron_train.gemm.order_probe import order_probe_matrix
from ditron_train.policy.probe import check_memory, compares, same_bits
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.symm.exchange import exchange
from ditron_train.tp.choices import Problem


def have_bits_of_whole(problem: Problem, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Compares both products on values that show the order of sums (collective). False if memory is too short for
    that; True if nothing is compared (interpreter).

    Args:
        problem: An AG-GEMM or a GEMM-RS of 16 bits (of FP8 it is known), whose rows divide by the ranks.
        group, device: Of the context.
    """
    if not compares(device):
        return True
    n, k, dtype, rows = problem.n, problem.k, problem.dtype, problem.m // problem.world_size
    num_elements = (problem.m + rows) * (n + k) + 3 * n * k  # with what the values are made from
    try:
        check_memory(num_elements * dtype.itemsize, device, group)
    except NotSupportedError:
        return False
    is_nt = problem.layout == "nt"
    x = order_probe_matrix((rows, k), dtype, device, seed=321, signed=None)
    weight = order_probe_matrix((n, k), dtype, device, seed=322, signed="columns")
    weight = weight if is_nt else weight.t().contiguous()
    products = [x.new_empty(count, n) for count in (problem.m, rows)]
    for given, out in zip((x.repeat(problem.world_size, 1), x), products):
        library_product(given, weight, out, transpose_b=is_nt)
    whole, part = products
    return all(exchange(group, all(same_bits([one], [part]) for one in whole.split(rows))))
