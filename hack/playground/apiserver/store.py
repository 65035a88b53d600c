"""Stores objects with resource versions and a history for watches, and parses the selectors of lists and watches."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from playground.apiserver.failure import bad_request, expired
from playground.apiserver.resources import Resource

Object = dict[str, Any]
Key = tuple[str, str]  # (namespace or "", name)
Predicate = Callable[[Object], bool]
_T = TypeVar("_T")

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "resourceslices": ("spec.driver", "spec.nodeName", "spec.pool.name"),
    "pods": ("spec.nodeName", "status.phase", "spec.schedulerName"),
    "events": (
        *(f"involvedObject.{one}" for one in ("name", "namespace", "uid", "kind", "apiVersion", "fieldPath")),
        *("reason", "type", "reportingComponent", "source"),
    ),
}
"""The fields by which objects can be selected in addition to name and namespace, by the plural of the resource."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change in the history. `before` is None for a new object, `after` is None for a deleted one.

    `last` is the object that watchers get: `after` or, for a deletion, the old content with the new version.
    """

    version: int
    resource: Resource
    before: Object | None
    after: Object | None
    last: Object

    def event_for(self, selected: Predicate) -> tuple[str, Object] | None:
        """Return type and object of the event for a watch with this selector; None if there is no event.

        The type is DELETED if the object no longer matches the selector.
        """
        was = self.before is not None and selected(self.before)
        now = self.after is not None and selected(self.after)
        if now:
            return ("MODIFIED" if was else "ADDED"), self.last
        return ("DELETED", self.last) if was else None


class Store:
    """All objects under one lock. Stored objects are never modified: each write stores a new one."""

    def __init__(self, history: int) -> None:
        self.changed = threading.Condition()
        self._objects: dict[Resource, dict[Key, Object]] = {}
        self._history: deque[Change] = deque(maxlen=history)
        self._version = 1
        self._forgotten = 1  # the history no longer has the changes up to this version

    @property
    def version(self) -> int:
        """The latest resource version."""
        return self._version

    def get(self, resource: Resource, key: Key) -> Object | None:
        """Return the stored object, not a copy; do not modify it."""
        return self._objects.get(resource, {}).get(key)

    def select(self, resource: Resource, selected: Predicate) -> tuple[list[Object], int]:
        """Return the matching objects in the order of namespace and name, and the resource version of the list."""
        with self.changed:
            items = sorted(self._objects.get(resource, {}).items())
            return [obj for _, obj in items if selected(obj)], self._version

    def write(self, resource: Resource, key: Key, obj: Object | None) -> Object:
        """Store `obj` with the next version, or delete the object if it is None. Return the object that watchers get.

        The caller holds `changed`, so that its checks and this write are atomic.
        """
        before = self.get(resource, key)
        self._version += 1
        last = copy_json(obj if obj is not None else before) or {}
        last["metadata"]["resourceVersion"] = str(self._version)
        table = self._objects.setdefault(resource, {})
        if obj is None:
            table.pop(key, None)
        else:
            table[key] = last
        if len(self._history) == self._history.maxlen:
            self._forgotten = self._history[0].version
        self._history.append(Change(self._version, resource, before, last if obj is not None else None, last))
        self.changed.notify_all()
        return last

    def changes_after(self, version: int) -> list[Change]:
        """Return the changes after `version`. Raises: ApiFailure 410 if the history no longer has all of them."""
        with self.changed:
            if version < self._forgotten:
                raise expired(version, self._forgotten)
            newest_first = takewhile(lambda change: change.version > version, reversed(self._history))
            return list(newest_first)[::-1]

    def wait_after(self, version: int, timeout_s: float, unless: Callable[[], bool]) -> None:
        """Wait for a change after `version` or a `wake`, at most `timeout_s`. Do not wait if `unless` returns True.

        `unless` is called under the lock, so that no wake-up is missed.
        """
        with self.changed:
            if self._version == version and not unless():
                self.changed.wait(timeout_s)

    def wake(self) -> None:
        """Wake all watches."""
        with self.changed:
            self.changed.notify_all()

    def forget(self) -> None:
        """Clear the history: each watch from an older version gets 410."""
        with self.changed:
            self._history.clear()
            self._version += 1
            self._forgotten = self._version
            self.changed.notify_all()


def copy_json(value: _T) -> _T:
    """Return a deep copy, as if the value had been sent over the network."""
    return json.loads(json.dumps(value))  # type: ignore[no-any-return]


def selector(resource: Resource, query: Mapping[str, str], namespace: str | None) -> Predicate:
    """Return a predicate for the namespace, `fieldSelector` and `labelSelector` of a request.

    Raises: ApiFailure 400 for a field that selectors of this resource do not support.
    """
    known = ("metadata.name", *_FIELDS.get(resource.plural, ()))
    fields = list(_terms(query.get("fieldSelector", "")))
    for field, wanted, _ in fields:
        if wanted is None:
            raise bad_request(f'invalid selector: "{field}"; can\'t understand it')
        if field not in known and not (field == "metadata.namespace" and resource.namespaced):
            raise bad_request(f'field label not supported: "{field}"')
    labels = list(_terms(query.get("labelSelector", "")))

    def selected(obj: Object) -> bool:
        metadata = obj["metadata"]
        has = metadata.get("labels") or {}
        return (
            (namespace is None or metadata.get("namespace") == namespace)
            and all((str(at(obj, field) or "") == wanted) != negated for field, wanted, negated in fields)
            and all(
                (key in has if wanted is None else has.get(key) == wanted) != negated
                for key, wanted, negated in labels
            )
        )

    return selected


def _terms(text: str) -> Iterator[tuple[str, str | None, bool]]:
    """Yield key, value and negation of each term: `k=v`, `k==v`, `k!=v`, or `k` and `!k`, whose value is None."""
    for term in filter(None, text.split(",")):
        key, separator, value = term.partition("=")
        if separator:
            yield key.removesuffix("!").strip(), value.removeprefix("=").strip(), key.endswith("!")
        else:
            yield term.lstrip("!"), None, term.startswith("!")


def at(obj: Object, path: str) -> Any:
    """Return the value at a path such as `spec.nodeName`; None if it does not exist."""
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
