"""What tests ask about the Megatron-core that they run beside; whether it is newer without importing it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ditron_train.runtime.versions import find_versions


def is_newer_than_0_17() -> bool:
    """Whether Muon is built by a registry, whose module is imported with megatron-core."""
    version = find_versions()["megatron-core"]
    return version is not None and tuple(map(int, version.split(".")[:2])) > (0, 17)


def module_of(spec: Any) -> type:
    """The class of a spec: since 0.18 some are partials."""
    return spec.func if isinstance(spec, functools.partial) else spec.module


def submodules_of(spec: Any) -> Any:
    """The submodules of a spec."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Megatron's ``get_batch_on_this_cp_rank``: newer versions are told whether lengths decide, and the group, which
    is all ranks if none is given."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    if "is_hybrid_cp" not in inspect.signature(get_batch_on_this_cp_rank).parameters:
        return get_batch_on_this_cp_rank(batch)
    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def build_of(spec: Any, **kwargs: Any) -> Any:
    """The module of a spec."""
    from megatron.core.transformer.spec_utils import build_module

    return spec(**kwargs) if isinstance(spec, functools.partial) else build_module(spec, **kwargs)
