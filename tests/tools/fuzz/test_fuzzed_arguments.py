"""Public functions take what they are given or refuse it in one sentence, before anything is signalled."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
import bodies_arguments as bodies  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))


def test_any_arguments_are_taken_or_refused() -> None:
    (found,) = run_workers(1, bodies.call_all, min(EXAMPLES, 120), "FUZZ_EXAMPLES" not in os.environ)
    assert found == {}
