"""Each seeded fault can still be applied; whether the tests catch it, ``python -m tests.mutations`` proves."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.mutations.mutations import MUTATIONS, ROOT, Mutation
from tests.mutations.run import TABLE, Outcome, row_of, table_of, table_rows


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_can_be_applied(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert mutation.applied_to(source) != source
    for test in mutation.tests:
        path, _, name = test.partition("::")
        function = name.partition("[")[0]
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", text, re.MULTILINE) if function else text, test


def test_names_are_unique_and_faults_are_many() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 40


def test_the_table_has_a_row_of_each_fault_and_all_are_caught() -> None:
    rows = table_rows((ROOT / TABLE).read_text(encoding="utf-8"))
    assert set(rows) == {mutation.name for mutation in MUTATIONS}
    for mutation in MUTATIONS:
        row = rows[mutation.name]
        assert f"| `{mutation.file}` | {mutation.kind} |" in row and "not caught" not in row, row


@pytest.mark.parametrize(
    ("source", "old", "new", "index", "words"),
    [
        ("a = 1\n", "b", "c", None, "occurs 0 times"),
        ("a = 1\na = 1\n", "a = 1", "a = 2", None, "occurs 2 times"),
        ("a = 1\na = 1\n", "a = 1", "a = 2", 2, "occurs 2 times"),
        ("a = 1\n", "1", "(", None, "is not Python"),
    ],
)
def test_a_fault_that_does_not_fit_is_an_error(source: str, old: str, new: str, index: int | None, words: str) -> None:
    mutation = dataclasses.replace(MUTATIONS[0], old=old, new=new, index=index)
    with pytest.raises(ValueError, match=words):
        mutation.applied_to(source)


@pytest.mark.parametrize(("index", "found"), [(0, "x = 'b b a'"), (1, "x = 'a b b'")])
def test_one_of_several_places_is_changed(index: int, found: str) -> None:
    mutation = dataclasses.replace(MUTATIONS[0], old="a", new="b", index=index)
    assert mutation.applied_to("x = 'a b a'") == found


def test_rows_of_a_page_are_found_by_name() -> None:
    caught = row_of(MUTATIONS[0], Outcome("tests/tp/test_tp_ops.py::test_four_ranks", "", 12.3))
    survives = row_of(MUTATIONS[1], Outcome(None, "survives", 5.0))
    rows = {MUTATIONS[0].name: caught, MUTATIONS[1].name: survives}
    assert table_rows(table_of(rows)) == rows
    assert "`tests/tp/test_tp_ops.py`: test_four_ranks | 12 |" in caught and "not caught" in survives
