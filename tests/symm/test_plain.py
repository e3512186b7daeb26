"""What ranks exchange is plain data: it comes back as it was, and what somebody else wrote runs nothing."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import bodies_exchange as bodies  # noqa: E402

from ditron_train.runtime.errors import DitronError  # noqa: E402
from ditron_train.symm.plain import from_plain, to_plain  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_VALUES = st.recursive(
    _LEAVES,
    lambda parts: (
        st.lists(parts) | st.lists(parts).map(tuple) | st.dictionaries(st.text() | st.sampled_from(["tuple"]), parts)
    ),
    max_leaves=30,
)


def _types(value: object) -> object:
    if isinstance(value, dict):
        return {name: _types(part) for name, part in value.items()}
    return (type(value), [_types(part) for part in value]) if isinstance(value, (list, tuple)) else type(value)


@given(_VALUES)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    back = from_plain(to_plain(value))
    assert back == value and _types(back) == _types(value)


@given(st.binary() | st.text().map(str.encode))
def test_what_somebody_else_wrote_is_an_error_or_plain(content: bytes) -> None:
    try:
        to_plain(from_plain(content))
    except DitronError as error:
        assert "something else writes to this job" in str(error)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"tuple": 5}', b'{"dict": []}', b'{"bytes": "?"}', b"{}", b"9" * 9999]
)
def test_broken_words_are_an_error(content: bytes) -> None:
    with pytest.raises(DitronError, match="something else writes to this job"):
        from_plain(content)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}, [Path("x")]])
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="not plain"):
        to_plain(value)


def test_a_pickle_in_the_store_runs_nothing(tmp_path: Path) -> None:
    """Whoever reaches the store's port puts one where a rank's value belongs, then where the outcome does."""
    touched = tmp_path / "touched"
    words = run_workers(2, bodies.somebody_writes_to_the_store, pickle.dumps(_Touches(str(touched))))
    assert all(word.startswith("DitronError") for rank in words for word in rank)
    assert not touched.exists()


class _Touches:
    """Unpickled, it writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")
