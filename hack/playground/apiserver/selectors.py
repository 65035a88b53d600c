"""Field and label selectors over stored (v1) objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from playground.apiserver.failure import bad_request
from playground.apiserver.resources import Resource

Predicate = Callable[[dict[str, Any]], bool]

_COMMON = ("metadata.name",)
_NAMESPACED = ("metadata.namespace",)
_BY_PLURAL: Mapping[str, tuple[str, ...]] = {
    "resourceslices": ("spec.driver", "spec.nodeName", "spec.pool.name"),
    "pods": ("spec.nodeName", "status.phase", "spec.schedulerName"),
    "events": (
        *(
            f"involvedObject.{field}"
            for field in ("name", "namespace", "uid", "kind", "apiVersion", "fieldPath")
        ),
        *("reason", "type", "reportingComponent", "source"),
    ),
}


def selector(resource: Resource, query: Mapping[str, str], namespace: str | None) -> Predicate:
    """One predicate for the namespace, `fieldSelector` and `labelSelector` of a request.

    Raises: ApiFailure 400 for a field that this resource cannot be selected by.
    """
    tests = [*_field_tests(resource, query.get("fieldSelector", ""))]
    tests += _label_tests(query.get("labelSelector", ""))
    if namespace is not None:
        tests.append(lambda obj: obj["metadata"].get("namespace") == namespace)
    return lambda obj: all(test(obj) for test in tests)


def _field_tests(resource: Resource, text: str) -> list[Predicate]:
    known = _COMMON + (_NAMESPACED if resource.namespaced else ()) + _BY_PLURAL.get(resource.plural, ())
    tests: list[Predicate] = []
    for term in filter(None, text.split(",")):
        field, wanted, negated = _split(term)
        if field not in known:
            raise bad_request(f'field label not supported: "{field}"')
        tests.append(lambda obj, f=field, w=wanted, n=negated: (_field(obj, f) == w) != n)  # type: ignore[misc]
    return tests


def _label_tests(text: str) -> list[Predicate]:
    tests: list[Predicate] = []
    for term in filter(None, text.split(",")):
        if "=" not in term:
            negated = term.startswith("!")
            key = term.lstrip("!")
            tests.append(lambda obj, k=key, n=negated: (k in _labels(obj)) != n)  # type: ignore[misc]
            continue
        key, wanted, negated = _split(term)
        tests.append(lambda obj, k=key, w=wanted, n=negated: (_labels(obj).get(k) == w) != n)  # type: ignore[misc]
    return tests


def _split(term: str) -> tuple[str, str, bool]:
    """(key, value, negated) of `k=v`, `k==v` or `k!=v`."""
    key, separator, value = term.partition("=")
    if not separator:
        raise bad_request(f'invalid selector: "{term}"; can\'t understand it')
    return key.removesuffix("!").strip(), value.removeprefix("=").strip(), key.endswith("!")


def _field(obj: dict[str, Any], path: str) -> str:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def _labels(obj: dict[str, Any]) -> Mapping[str, str]:
    labels = obj["metadata"].get("labels")
    return labels if isinstance(labels, dict) else {}
