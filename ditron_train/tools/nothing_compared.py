"""The rule of every tool that compares: if nothing was compared, it fails and names what was not."""

from __future__ import annotations

from collections.abc import Mapping

from ditron_train.runtime.errors import DitronError


class NothingComparedError(DitronError):
    """An op or a feature that a tool was asked to compare was never compared; the command line's exit status is 2."""


def require_compared(counts: Mapping[str, int], reason: str) -> None:
    """Does nothing if everything was compared.

    Args:
        counts: Comparisons, or calls of the fused path, by what was asked for.
        reason: Why there may be none, and what the user can do about it.

    Raises:
        NothingComparedError: Something was never compared; on every rank alike if ``counts`` is.
    """
    missing = [name for name, count in counts.items() if not count]
    if missing:
        raise NothingComparedError(f"nothing was compared: {', '.join(missing)}: {reason}")
