"""The document says what is tested, and nothing of the list is missing."""

from __future__ import annotations

import pytest

from tests.conformance import table


def test_every_number_has_a_test_and_every_test_says_what_it_shows() -> None:
    entries = [*table.entries(), *table.entries_elsewhere()]
    assert {entry.number for entry in entries} == set(table.ITEMS)
    assert all(entry.what for entry in entries)


def test_document_shows_the_tests_as_they_are(update_golden: bool) -> None:
    text = table.DOCUMENT.read_text()
    if update_golden:
        table.DOCUMENT.write_text(table.with_table(text))
        return
    assert table.in_document(text) == table.table(), "run this test with --update-golden"


def test_every_entry_is_collected(request: pytest.FixtureRequest) -> None:
    """A renamed file or a misspelt mark would otherwise leave a row without a test."""
    found = {
        f"{item.path.name}::{item.name.split('[')[0]}": item.get_closest_marker("cluster") is not None
        for item in request.session.items
        if item.path.parent == table.HERE
    }
    listed = {entry.test: entry.on_cluster for entry in table.entries()}
    shown = {test: mark for test, mark in found.items() if "::test_c" in test}
    assert shown == {test: listed[test] for test in shown}
