"""The objects of a watch, with own writes laid over it: the newest version of each wins."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


class SliceStore:
    """Objects by name, ordered by resource version; not thread-safe, its owner locks.

    Resource versions are compared as numbers, which Kubernetes promises since 1.35 and etcd always gave.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Object] = {}
        self._newest = 0
        self._listed_at = 0  # the version of the last list
        self._gone: set[str] = set()  # UIDs that we deleted and whose events may still be on the way
        self._ended: set[str] = set()  # UIDs whose deletion was seen and whose creation we may yet be told

    @property
    def newest(self) -> int:
        """The highest resource version that was seen."""
        return self._newest

    @property
    def gone(self) -> frozenset[str]:
        """UIDs that we deleted and whose events may still be on the way."""
        return frozenset(self._gone)

    def has(self, obj: Object) -> bool:
        """Whether this object, of any version, is there."""
        known = self._objects.get(_name(obj))
        return known is not None and _uid(known) == _uid(obj)

    def objects(self) -> list[Object]:
        """Sorted by name; not copies."""
        return [self._objects[name] for name in sorted(self._objects)]

    def put(self, obj: Object) -> bool:
        """Store an object unless a newer one, or its deletion, is known; whether anything changed."""
        self._newest = max(self._newest, _number(obj))
        name, uid = _name(obj), _uid(obj)
        if uid in self._gone or uid in self._ended:
            return False
        known = self._objects.get(name)
        if known is None and 0 < _number(obj) <= self._listed_at:
            return False  # the list would have it if it were still there
        if known is not None and not _newer(obj, known):
            return False
        self._objects[name] = obj
        return True

    def remove(self, obj: Object) -> bool:
        """Apply a deletion event; False if it is the echo of ours or about an earlier object.

        True also for an object that is not known: the deletion by others of one that we are just making can
        arrive before the answer that tells us its UID, and that answer must not bring it back.
        """
        self._newest = max(self._newest, _number(obj))
        name, uid = _name(obj), _uid(obj)
        if uid in self._gone:
            self._gone.discard(uid)
            return False
        self._ended.add(uid)
        known = self._objects.get(name)
        if known is None:
            return True
        if _uid(known) != uid:
            return False
        del self._objects[name]
        return True

    def all_answered(self) -> None:
        """No write is under way: what a late answer would bring back need not be remembered any more."""
        self._ended.clear()

    def deleted_by_us(self, name: str, uid: str) -> None:
        """Forget an object now and expect its events later."""
        known = self._objects.get(name)
        if known is not None and _uid(known) == uid:
            del self._objects[name]
            self._gone.add(uid)

    def replace(
        self,
        items: list[Object],
        version: str,
        newest_before: int = 0,
        gone_before: frozenset[str] = frozenset(),
    ) -> bool:
        """Take over a list made at `version`, keeping own writes from after it; whether anything changed.

        `newest_before` and `gone_before` are `newest` and `gone` from before the list was asked for. A list that is
        older than that comes from a store that was set back, as when etcd is restored from a snapshot: our own
        writes are void, and what we deleted is there again. What a list shows that was asked for after we deleted it
        is there again too, or still.
        """
        number = _as_number(version)
        self._gone -= gone_before
        before = {name: _identity(obj) for name, obj in self._objects.items()}
        if number < newest_before:
            self._gone.clear()
            self._objects = {_name(obj): obj for obj in items}
            self._newest = number
        else:
            self._objects = self._merged(items, number)
            self._gone &= {_uid(obj) for obj in items}
            self._newest = max(self._newest, number)
        self._listed_at = number
        return before != {name: _identity(obj) for name, obj in self._objects.items()}

    def _merged(self, items: list[Object], version: int) -> dict[str, Object]:
        listed = {_name(obj): obj for obj in items if _uid(obj) not in self._gone}
        for name, known in self._objects.items():
            # What is older than the list but newer than what it shows is of a history that was set back since.
            if _number(known) > version:
                listed[name] = known
        return listed


def _newer(left: Object, right: Object) -> bool:
    return _number(left) > _number(right)


def _number(obj: Object) -> int:
    return _as_number(str(obj["metadata"].get("resourceVersion") or ""))


def _as_number(version: str) -> int:
    """0 for a version that is not a number, which then never counts as newer."""
    return int(version) if version.isdigit() else 0


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def _uid(obj: Object) -> str:
    return str(obj["metadata"].get("uid"))


def _identity(obj: Object) -> tuple[str, str]:
    return _uid(obj), str(obj["metadata"].get("resourceVersion"))
