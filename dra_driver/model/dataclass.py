"""Dataclasses as in the standard library, but only `__init__` is compiled.

Compiling five methods for each of the daemon's 250 classes took a quarter of the CPU time of its start. Here
the classes share the other methods, and only mypy enforces `frozen`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, MISSING, asdict, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

__all__ = ["KW_ONLY", "MISSING", "asdict", "dataclass", "field", "fields", "is_dataclass", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from functools import partial
    from operator import attrgetter

    def dataclass(
        cls: Any = None, /, *, frozen: bool = False, eq: bool = True, order: bool = False, **more: Any
    ) -> Any:
        if cls is None:
            return partial(dataclass, frozen=frozen, eq=eq, order=order, **more)
        made = dataclasses.dataclass(cls, repr=False, eq=order, order=order, **more)
        made.__repr__ = _repr
        if eq:
            compared = [one.name for one in fields(made) if one.compare]
            key = attrgetter(*compared) if compared else lambda _: ()
            made.__eq__ = lambda self, other: (
                key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented
            )
            made.__hash__ = (lambda self: hash(key(self))) if frozen else None
        return made

    def _repr(self: Any) -> str:
        shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"
