"""How a slice that exists differs from what is wanted, by the meaning of its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from dra_driver.model.units import same_quantity

Path = tuple[str | int, ...]
"""Names of fields and indexes of lists."""


def same_content(existing: Any, wanted: Any) -> bool:
    """Whether both mean the same to a consumer."""
    return next(differences(existing, wanted), None) is None


def differences(
    existing: Any, wanted: Any, path: Path = (), *, are_quantities: bool = False
) -> Iterator[Path]:
    """Where `existing` lacks or has otherwise what is wanted, or has more.

    Quantities are compared by value; the order of lists is significant; nothing and empty are the same. The server sets
    `timeAdded` of a taint where the plugin leaves it out, which is no difference; nor is one second, as it rounds.
    `are_quantities` says that every text is an amount.
    """
    if _is_empty(existing) and _is_empty(wanted):
        return
    if isinstance(existing, Mapping) and isinstance(wanted, Mapping):
        keys = existing.keys() | wanted.keys()
        for key in sorted(keys):
            pair = existing.get(key), wanted.get(key)
            # The keys beside it tell a taint, a capacity and a counter apart.
            if "effect" in keys:
                if not (key == "timeAdded" and _is_same_second(*pair)):
                    yield from differences(*pair, (*path, key))
                continue
            is_amount = key == "value" or (key == "requestPolicy" and "value" in keys)
            yield from differences(*pair, (*path, key), are_quantities=are_quantities or is_amount)
    elif (
        isinstance(existing, list | tuple)
        and isinstance(wanted, list | tuple)
        and len(existing) == len(wanted)
    ):
        for index, pair in enumerate(zip(existing, wanted, strict=True)):
            yield from differences(*pair, (*path, index), are_quantities=are_quantities)
    elif not (_is_same(existing, wanted) or (are_quantities and same_quantity(existing, wanted))):
        yield path


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, ())


def _is_same(existing: Any, wanted: Any) -> bool:
    return type(existing) is type(wanted) and bool(existing == wanted)


def _is_same_second(existing: Any, wanted: Any) -> bool:
    if wanted is None:
        return True
    try:
        apart = datetime.fromisoformat(existing) - datetime.fromisoformat(wanted)
    except (TypeError, ValueError):
        return False
    return abs(apart) <= timedelta(seconds=1)
