"""Whether hooks look at what goes into a module and comes out of it: if the fused path replaces the module,
they may see other tensors than natively."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

#: Modules whose hooks bring parameters, or note that a layer was called; what else of Megatron's has hooks logs or
#: changes activations.
_LIBRARIES = ("megatron.core.distributed.", "megatron_fsdp.", "torch.distributed.", "transformer_engine.")
#: The kinds of hooks that a module keeps.
ALL_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(layer: Any, kinds: tuple[str, ...] = ALL_KINDS, of: str = "") -> bool:
    """Whether somebody else than a library has registered hooks of these kinds on ``layer``, from a module whose name
    begins with ``of``; None has none."""
    of_layer = () if layer is None else (getattr(layer, kind, None) for kind in kinds)
    modules = (_module_of(hook) for hooks in of_layer if hooks for hook in hooks.values())
    return any(module.startswith(of) and not module.startswith(_LIBRARIES) for module in modules)


def _module_of(hook: Callable[..., Any]) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))
