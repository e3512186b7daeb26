"""Lets calls of torch that cannot mean a CUDA device pass the CPU shim at once: nearly all of them, and the shim sees
every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def install() -> None:
    """In this process, and in its forks. To be called once."""
    import torch

    from ditron_train.cpu import megatron_shim

    mode = megatron_shim._CudaMeansCpu
    native, named = mode.__torch_function__, frozenset([torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to])

    def __torch_function__(self: Any, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in named:
            return func(*args)
        return native(self, func, types, args, kwargs)

    mode.__torch_function__ = __torch_function__  # type: ignore[method-assign]
