"""What calls of ops do is what it was when somebody last looked at it (``tests/golden/cases.py``)."""

from __future__ import annotations

import pytest

from tests.golden.cases import all_cases, records
from tests.support import golden

_CASES = {case.name: case for case in all_cases()}


@pytest.mark.skipif(bool(golden.other_versions()), reason=f"recorded with others than {golden.other_versions()}")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_calls_are_as_their_golden_records(world: int) -> None:
    recorded = golden.read_calls()
    found = records([case for case in _CASES.values() if case.world == world])
    # Records of cases that are no more are nobody else's.
    of_others = {name for name, case in _CASES.items() if case.world != world}
    changes = golden.differences(recorded, found, (key for key in recorded if golden.name_of(key) not in of_others))
    assert not changes, "\n".join(["golden records of calls (CONTRIBUTING.md):", *changes])
