"""Exact CPU arithmetic for a test: the fused path and stock Megatron have to be bitwise identical.

Not for tests of the order of sums, which it hides: those use integers or order-probe inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ditron_train.cpu import exact_arithmetic


@contextlib.contextmanager
def exact_sums() -> Iterator[None]:
    """``exact_arithmetic.install`` on entry, ``uninstall`` on exit; also a decorator."""
    exact_arithmetic.install()
    try:
        yield
    finally:
        exact_arithmetic.uninstall()
