"""Generates the admission policy for opaque parameters from their fields in dra_driver/api; `make manifests` runs it.

The expressions use only CEL features that API servers have supported since 1.34. Each variable is a list of places or a
list of faults. A place is a map of a path (`at`) and its value (`is`). A fault has the text that the driver uses.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import yaml

from dra_driver.api.config import (
    DEVICE_KEY,
    FIELDS,
    GROUP_VERSION,
    KINDS,
    MEMORY,
    MIN_MEMORY,
    TIMEOUT,
    DeviceType,
)
from dra_driver.api.resolve import STRATEGY_PARTS, needs_admin_access
from dra_driver.cli.validation.rules.manifests import CLASS_TYPES, PROFILE_CLASS
from dra_driver.model.ids import PLAIN_NAME
from dra_driver.model.maintenance import MAX_S, MIN_S
from dra_driver.model.schema import Choice, ListField, MapField, Object, Scalar, Shape, either

_FIXED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

Variables = list[tuple[str, str]]


class Policy:
    """Collects variables; `faults` are the names of the variables that list faults."""

    def __init__(self) -> None:
        self.variables: Variables = []
        self.faults: list[str] = []
        self._places: dict[int, tuple[Shape, str, list[str]]] = {}

    def add(self, name: str, expression: str) -> str:
        """Add a variable, and return its name in expressions."""
        self.variables.append((name, expression))
        return f"variables.{name}"

    def fault(self, name: str, expression: str) -> None:
        """Add a variable that lists faults."""
        self.faults.append(self.add(name, expression))

    def fields(self, name: str, section: Object, places: str, others: tuple[str, ...] = ()) -> None:
        """Add the faults of objects, like `faults` of dra_driver.model.schema. `places` are objects with the fields of
        `section`; `others` are fields that are checked elsewhere.
        """
        for field, kind in section.fields.items():
            if field in section.required:
                missing = f"{places}.filter(p, p.is.?{field}.orValue(null) == null)"
                self.fault(f"{name}_{field}_missing", f"{missing}.map(p, p.at + '.{field}: is required')")
            child = f"{places}.filter(p, p.is.?{field}.orValue(null) != null)"
            child += f".map(p, {{'at': dyn(p.at + '.{field}'), 'is': p.is.{field}}})"
            self._found(f"{name}_{field}", kind, child)
        known = ", ".join(f"'{field}'" for field in (*others, *section.fields))
        unknown = f"p.is.filter(k, !(k in [{known}]) && p.is[k] != null)"
        # Like `quoted` in dra_driver.model.ids.
        shown = f"(k.matches('^{PLAIN_NAME}$') ? k : strings.quote(k))"
        self.fault(
            f"{name}_unknown",
            f"{places}.map(p, {unknown}.map(k, p.at + '.' + {shown} + ': unknown field').join('; '))"
            ".filter(f, f != '')",
        )

    def _found(self, name: str, field: Shape, places: str) -> None:
        """Record the places of a field. A field that several sections share is checked once, at all its places."""
        found = self._places.setdefault(id(field), (field, name, []))
        found[2].append(places)

    def check_found(self) -> None:
        """Add the rules of all recorded fields, and of the fields that these rules record."""
        while self._places:
            field, name, places = self._places.pop(next(iter(self._places)))
            name = name if len(places) == 1 else name.partition("_")[2]  # without the kind
            self._check(name, field, self.add(name, " +\n".join(places)))

    def _check(self, name: str, field: Shape, places: str) -> None:
        match field:
            case Object():
                self._faulty(name, places, "type(p.is) != map", "'must be an object'")
                objects = self.add(f"{name}_objects", f"{places}.filter(p, type(p.is) == map)")
                self.fields(name, field, objects)
            case Choice(words):
                known = ", ".join(f"'{word}'" for word in words)
                self._faulty(name, places, f"!(p.is in [{known}])", f"'must be {either(words)}'")
            case ListField(Choice(words)):
                self._words_of(name, places, words)
            case Scalar() if field.type is int:
                wrong = f"type(p.is) != int || p.is < {field.least} || p.is > {field.most}"
                self._faulty(name, places, wrong, f"'must be {field.says}'")
            case Scalar() if field.type is bool:
                self._faulty(name, places, "type(p.is) != bool", "'must be true or false'")
            case Scalar() if field is MEMORY:
                self.fault(name + "_wrong", _joined(f"{places}.map(p, {_memory('p.at', 'p.is')})"))
            case Scalar() if field is TIMEOUT:
                wrong = f"duration(p.is) < duration('{MIN_S}s') || duration(p.is) > duration('{MAX_S}s')"
                wrong = f"type(p.is) != string || !p.is.matches('^[0-9]{{1,5}}[smh]$') || {wrong}"
                self._faulty(name, places, wrong, f"'must be {field.says}'")
            case MapField():
                self._by_device(name, places)
            case _:
                raise NotImplementedError(f"{name}: no rule for a {type(field).__name__}")

    def _faulty(self, name: str, places: str, wrong: str, text: str) -> None:
        self.fault(f"{name}_wrong", f"{places}.filter(p, {wrong}).map(p, p.at + ': ' + {text})")

    def _words_of(self, name: str, places: str, words: tuple[str, ...]) -> None:
        self._faulty(name, places, "type(p.is) != list", "'must be a list'")
        lists = self.add(f"{name}_lists", f"{places}.filter(p, type(p.is) == list)")
        known = ", ".join(f"'{word}'" for word in words)
        text = f"p.at + '[' + string(i) + ']: must be {either(words)}'"
        wrong = f"p.is.transformList(i, w, !(w in [{known}]), {text})"
        self.fault(f"{name}_words", _joined(f"{lists}.map(p, {wrong}.join('; '))"))

    def _by_device(self, name: str, places: str) -> None:
        self._faulty(name, places, "type(p.is) != map", "'must be an object'")
        objects = self.add(f"{name}_objects", f"{places}.filter(p, type(p.is) == map)")
        key = f"k.matches('^(?:{DEVICE_KEY})$')"
        wrong = f"p.is.filter(k, !{key})"
        self.fault(
            f"{name}_keys",
            f"{objects}.filter(p, {wrong}.size() > 0).map(p, p.at + ': ' + "
            f"{wrong}.map(k, \"'\" + k + \"'\").join(', ') + ' is not a device UUID or an index')",
        )
        inner = _joined(f"p.is.filter(k, {key}).map(k, {_memory('p.at + `.` + k', 'p.is[k]')})")
        self.fault(f"{name}_values", _joined(f"{objects}.map(p, {inner}.join('; '))"))


def _joined(texts: str) -> str:
    return f"{texts}.filter(f, f != '')"


def _memory(at: str, value: str) -> str:
    """CEL: the fault of a memory quantity, or an empty text; like `_memory_fault` of dra_driver.api.config."""
    at = at.replace("`", "'")
    text = f"{at} + ': "
    below = f"{text}' + string({value}) + ' is below the minimum, 1Mi'"
    return textwrap.dedent(f"""\
        type({value}) == string ?
          (!isQuantity({value}) || !{value}.matches('[0-9]') || {value}.size() > 64 ?
            {text}\\'' + {value} + '\\' is not a quantity; expected a number with a suffix such as Mi or G' :
          !quantity({value}).isGreaterThan(quantity('{MIN_MEMORY - 1}')) ? {below} : '') :
        type({value}) == int ? ({value} < {MIN_MEMORY} ? {below} : '') :
        type({value}) == double ? ({value} <= {MIN_MEMORY - 1}.0 ? {below} : '') :
          {text}must be a quantity such as 10Gi'""")


def _gives(devices: set[DeviceType]) -> str:
    """CEL: whether the class of `b` is known to select devices of one of these types."""
    named = ", ".join(f"'{name}'" for name, kind in CLASS_TYPES.items() if kind in devices)
    begin, end = PROFILE_CLASS
    profile = f"b.deviceClassName.startsWith('{begin}') && b.deviceClassName.endsWith('{end}')"
    return f"b.deviceClassName in [{named}]" + (f" || ({profile})" if "mig" in devices else "")


def _asked(name: str) -> str:
    """CEL: a list with one item, the list of the bodies of a request or of one of its alternatives."""
    return (
        f"[variables.bodies[?{name}.split('/')[0]].orValue([])"
        f".filter(b, !{name}.contains('/') || b.?name.orValue('') == {name}.split('/')[1])]"
    )


def _misfits(kind: str) -> str:
    """CEL: the first fault of `_use_faults` of `validate`, for the places of one kind. A name such as `gpu` means all
    alternatives of the request, `gpu/small` only one of them.
    """
    unfit = (
        f"{_asked('r')}\n.filter(l, l.size() > 0 && l.all(b, "
        f"{_gives({*get_args(DeviceType)} - {*KINDS[kind]})}))\n.map(l, p.config + '.requests[' + string(j) + \"]: "
        f"{kind} does not apply to request '\" + r + \"' of class \" +\nl.map(b, b.deviceClassName).join(', "
        "')).join('')"
    )
    return _joined(
        f"variables.{kind}.map(p, p.requests.transformList(j, r,\n{unfit})\n.filter(f, f != '').join('; '))"
    )


def _without_admin(kind: str) -> tuple[str, str]:
    """CEL: the second fault of `_use_faults` of `validate`, for the places of one kind: first for the places that name
    requests, then for the others.
    """
    is_all = kind == "MaintenanceConfig"
    what, at = (kind, "kind") if is_all else ("management", "management")
    asks = "" if is_all else "p.is.?management.orValue(false) == true && "
    managing = f"variables.{kind}.filter(p, {asks}p.requests.size()"
    has_admin = "b.?adminAccess.orValue(false) == true"
    name = "r.split('/')[0]"
    return (
        _joined(
            f"{managing} > 0)\n.map(p, p.requests.transformList(j, r,\n{_asked('r')}\n"
            f".filter(l, l.size() > 0 && !l.all(b, {has_admin}))\n"
            f".map(l, p.config + '.requests[' + string(j) + ']: ' + {_lacks_admin(what, name)}).join(''))"
            ".filter(f, f != '').join('; '))"
        ),
        _joined(
            f"{managing} == 0)\n.map(p, variables.bodies.transformList(r, l,\n"
            f"l.all(b, {_gives({*KINDS[kind]})}) && !l.all(b, {has_admin}),\n"
            f"p.at + '.{at}: ' + {_lacks_admin(what, 'r')}).join('; '))"
        ),
    )


def _lacks_admin(what: str, name: str) -> str:
    """CEL: the text of `needs_admin_access` for the request with this name."""
    before, after = needs_admin_access(what, "a").split("'a'")
    return f"'{before}\\'' + {name} + '\\'{after}'"


def policy() -> str:
    """Return the manifest of the policy."""
    found = Policy()
    for name, expression in _FIXED["variables"].items():
        found.add(name, expression)
    understood = _words(found, "apiVersion", "variables.given", (GROUP_VERSION,), f"use {GROUP_VERSION}")
    understood = _words(found, "kind", understood, tuple(KINDS), f"use one of {', '.join(KINDS)}")
    _strategy_parts(found, understood)
    for kind, section in FIELDS.items():
        places = found.add(kind, f"{understood}.filter(p, p.is.kind == '{kind}')")
        found.fields(kind, section, places, ("apiVersion", "kind"))
    found.check_found()
    for kind in KINDS:
        found.fault(f"{kind}_misfits", _misfits(kind))
        if "management" in FIELDS[kind].fields or kind == "MaintenanceConfig":
            for name, expression in zip(("named", "unnamed"), _without_admin(kind), strict=True):
                found.fault(f"{kind}_{name}_without_admin", expression)
    found.add("faults", " +\n".join(found.faults))
    # Remove control characters, so that no escape sequence reaches a terminal.
    found.add("text", r"variables.faults.join('; ').findAll(r'[^\pC\p{Zl}\p{Zp}]+').join(' ')")
    return "".join([_FIXED["head"], *_written(found.variables), _FIXED["validation"]])


def _words(found: Policy, name: str, places: str, known: tuple[str, ...], remedy: str) -> str:
    """Add the same check as `_check_word` in dra_driver.api.resolve, and return the places that pass."""
    value, texts = f"p.is.?{name}.orValue(null)", ", ".join(f"'{word}'" for word in known)
    found.fault(
        f"{name}_wrong",
        f"{places}.filter(p, !({value} in [{texts}])).map(p, p.at + '.{name}: ' +\n"
        f"({value} == null ? 'is required' : type({value}) != string ? 'must be a string' :\n"
        f"'\\'' + p.is.{name} + '\\' is not supported') + '; {remedy}')",
    )
    return found.add(f"{name}_known", f"{places}.filter(p, {value} in [{texts}])")


def _strategy_parts(found: Policy, places: str) -> None:
    """Add the same check as `_unfitting_parts` in dra_driver.api.resolve."""
    shared = found.add(
        "shared",
        f"{places}.filter(p, type(p.is.?sharing.orValue(null)) == map)"
        ".map(p, {'at': dyn(p.at + '.sharing'), 'is': p.is.sharing})",
    )
    for strategy in STRATEGY_PARTS:
        for other, part in STRATEGY_PARTS.items():
            if other != strategy:
                found.fault(
                    f"{part}_unfitting",
                    f"{shared}.filter(p, p.is.?strategy.orValue('') == '{strategy}' && '{part}' in p.is)\n"
                    f".map(p, p.at + '.{part}: is not allowed with strategy {strategy}; "
                    f"remove it or use strategy {other}')",
                )


def _written(variables: Variables) -> Iterator[str]:
    yield "  variables:\n"
    for name, expression in variables:
        yield f"    - name: {name}\n      expression: >-\n"
        for line in expression.splitlines():
            yield f"        {line.strip()}\n"
