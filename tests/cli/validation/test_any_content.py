"""Any document gets a report: a value of another type anywhere does not crash."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from dra_driver.cli.validation.cluster_objects import references
from dra_driver.cli.validation.documents import Document
from dra_driver.cli.validation.machine_fit import MachineFit
from dra_driver.cli.validation.manifest_check import check_documents
from tests.fakes.samples import DRIVER, h100, inventory
from tests.fakes.slices import machine_fit
from tests.fakes.tables import data_of

Json = dict[str, Any]

OBJECTS, BESIDE = (data_of(__file__)[name] for name in ("objects", "beside"))
JUNK: tuple[Any, ...] = (None, True, -1, "x", [], ["x"], [None], {}, {7: {}})


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a value."""
    entries: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield (key,)
        yield from ((key, *rest) for rest in places(inner))


def replaced(document: Json, path: tuple[Any, ...], value: Any) -> Json:
    result: Any = copy.deepcopy(document)
    target = result
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    return result  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def machine() -> MachineFit:
    return machine_fit(inventory(*map(h100, range(4))))


@pytest.mark.parametrize("document", OBJECTS, ids=lambda document: str(document["kind"]))
def test_any_value_in_any_place_is_reported(document: Json, machine: MachineFit) -> None:
    contents = [replaced(document, path, junk) for path in places(document) for junk in JUNK]
    for content in [*contents, *(content | {"metadata": "x"} for content in BESIDE)]:
        documents = [Document("f", line, one) for line, one in enumerate([content, *BESIDE])]
        report = check_documents(documents, DRIVER, [machine])[0]
        references(documents, "default")
        assert report.verdict in ("OK", "FAULT", "SKIP", "not judged")
        assert all("\n" not in text for text in report.faults)
