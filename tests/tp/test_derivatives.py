"""A loss of gradients is refused on every rank alike; the next step goes on."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bodies_derivatives as bodies  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402


def test_a_penalty_on_gradients_is_refused_alike() -> None:
    words = run_workers(2, bodies.gradients_of_gradients)
    assert words[0] == words[1] and len(words[0]) == 2
    assert all("second derivatives (create_graph=True) are not computed" in text for text in words[0])
