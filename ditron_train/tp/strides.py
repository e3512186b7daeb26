"""How activations and their gradients lie: cuBLAS chooses its kernel by it, and so the bits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.policy import log_native
from ditron_train.runtime.errors import NotSupportedError


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [rows, K]."""
    if x.dim() == 0:
        raise NotSupportedError("a linear layer: the input has no dimensions")
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def is_whole(x: torch.Tensor) -> bool:
    """Whether ``x`` lies as a new tensor does, in dimensions of size 1, too: of others ``torch.matmul`` may multiply
    matrix by matrix, though torch calls them contiguous."""
    shape, strides = x.shape, x.stride()
    return x.is_contiguous() and all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(x.dim() - 2))


def product_and_reduce_scatter(
    grad_output: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, is_frozen: bool
) -> torch.Tensor:
    """As Megatron's path: dX of a gradient with strides. Torch multiplies sequence by sequence where rows are no view
    and the weight is frozen.

    How a gradient lies is known in backward alone, when only the kernel for whole ones was compared with native's
    product. It stands in where the weight is frozen, or where rows cannot be copied by copy engines.
    """
    if is_frozen:
        log_native("tp column", "a gradient with strides goes back through a frozen weight")
    else:
        log_native("tp column", "a gradient with strides goes back without copy engines, which need cuda-bindings")
    partial = grad_output.matmul(weight).contiguous()
    out = partial.new_empty(partial.shape[0] // dist.get_world_size(group), *partial.shape[1:])
    dist.reduce_scatter_tensor(out, partial, group=group)
    return out
