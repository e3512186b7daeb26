"""What becomes of a library that is built otherwise than its interface says here: native, with one log line.

Versions other than those that were tried may lack a name or take other arguments. Ranks have the same library, so
each of them finds the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ditron_train.policy import log_native
from ditron_train.policy.gate import INTERFACE_ERRORS
from ditron_train.runtime.settings import get_settings


def unsupported_reason_otherwise(library: str, error: Exception) -> str:
    """Why what met ``error`` runs natively.

    Raises:
        Exception: ``error`` itself under ``force``.
    """
    if get_settings().policy == "force":
        raise error
    return f"this version of {library} is built otherwise ({type(error).__name__}: {error})"


def computes_in_fp8(states: Any) -> bool:
    """Whether Transformer Engine's layers are called in FP8 here, by its ``FP8GlobalStateManager``. Also if this
    version does not say: what the paths of FP8 ask next is not there either, so those layers run natively."""
    try:
        return bool(states.is_fp8_enabled())
    except INTERFACE_ERRORS:
        return True


def classes_of_te(feature: str, class_map: Callable[[], dict[type, type]]) -> dict[type, type]:
    """Transformer Engine's classes that ``feature`` replaces and the fused ones, which ``class_map`` imports; none
    if the version has other names than these are written with."""
    try:
        return class_map()
    except INTERFACE_ERRORS as error:
        log_native(f"{feature} (TE)", unsupported_reason_otherwise("Transformer Engine", error))
        return {}
