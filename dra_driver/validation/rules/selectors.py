"""Device selectors: compiled once, asked of devices, and explained where a device does not match."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.validation.rules.cel import program
from dra_driver.validation.rules.selection import DeviceView, NotJudgedError, SelectorError, Version
from dra_driver.validation.rules.standard_classes import standard_selector

MAX_EXPRESSION_BYTES = 10 * 1024
NOT_INSTALLED = "the Python package cel-expr-python is not installed"

_TEXT = r"""(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
_TOKEN = re.compile(rf"{_TEXT}|\.\?|&&|\|\||[()\[\]{{}}?]|[^\"'.&|()\[\]{{}}?]+|.", re.DOTALL)
_REFERENCE = re.compile(
    r"""device\.(?P<part>attributes|capacity)\[\??["'](?P<domain>[^"']*)["']\]"""
    r"""(?:\.\??(?P<name>\w+)\b(?!\s*\()|\[\??["'](?P<quoted>[^"']*)["']\])"""
)
_COMPARED = re.compile(rf"({_REFERENCE.pattern})\s*[!=]=\s*(?P<value>{_TEXT}|\d+\b|true|false)")
_DRIVER = re.compile(r"""device\.driver\s*==\s*["']([^"']+)["']""")
_MOVES = {
    "index": "`index` is NVML's and moves when a GPU is drained or replaced; select by `uuid` or by "
    'device.attributes["resource.kubernetes.io"].pciBusID',
    "minor": "`minor` is the number of /dev/nvidiaN and may differ after a reboot; select by `uuid`",
}
_NOT_EVERYWHERE = frozenset(
    {"profile", "parentUUID", "parentIndex", "parentMinor", "uuid", "index", "minor", "migCapable", "nvlinkLinks",
     "nvlinkDomain", "fabricClusterUUID", "fabricCliqueID", "addressingMode", "confidentialCompute",
     "numaNode", "pcieRoot", "multiprocessors"}
)  # fmt: skip
"""Attributes and capacities that only some machines have; to name one that a machine lacks is not a mistake."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A compiled expression. `matches` says whether a device does; it raises SelectorError."""

    text: str
    matches: Callable[[DeviceView], bool]

    def score(self, device: DeviceView) -> int:
        """How many of the terms that `&&` joins hold for the device."""
        return sum(_holds(term, device) for term in _terms(self.text))

    def why_not(self, device: DeviceView) -> str:
        """The first term that does not hold, with the device's values: `memory is 81559Mi, wanted memory.…`."""
        for term in _terms(self.text):
            try:
                if not compiled(term).matches(device):
                    return _explained(term, device)
            except SelectorError as error:
                return str(error)
            except (InvalidConfigError, NotJudgedError):
                break
        return f"{_one_line(self.text)} is false"


@lru_cache(maxsize=2048)
def compiled(text: str) -> Selector:
    """Raises: InvalidConfigError for what does not compile, NotJudgedError where nobody here can say.

    Without cel-expr-python the selectors of the driver's own classes are judged, and no others.
    """
    if len(text.encode()) > MAX_EXPRESSION_BYTES:
        raise InvalidConfigError(f"is longer than {MAX_EXPRESSION_BYTES} bytes")
    try:
        return Selector(text, program(text))
    except ImportError:
        known = standard_selector(text)
    if known is None:
        raise NotJudgedError(NOT_INSTALLED)
    return Selector(text, known)


def driver_asked_for(text: str) -> str | None:
    """The driver that a selector names by `device.driver == "…"`; None if it names none."""
    found = (_DRIVER.fullmatch(term) for term in _terms(text))
    return next((match[1] for match in found if match is not None), None)


def hints(text: str, driver: str, devices: Sequence[DeviceView]) -> list[str]:
    """What is legal and yet hardly meant. `devices` are those of the machine, if there is one."""
    found = [hint for match in _REFERENCE.finditer(text) for hint in _reference_hints(match, driver, devices)]
    found += [hint for match in _COMPARED.finditer(text) for hint in _kind_hints(match, devices)]
    return list(dict.fromkeys(found))


def _reference_hints(match: re.Match[str], driver: str, devices: Sequence[DeviceView]) -> Iterator[str]:
    part, domain, name = match["part"], match["domain"], match["name"] or match["quoted"]
    if domain == driver and part == "attributes" and name in _MOVES:
        yield _MOVES[name]
    if "/" in domain:
        yield f'write the domain and the name apart: device.{part}["{domain.partition("/")[0]}"].{name}'
        return
    known = {one for device in devices for one in getattr(device, part).get(domain, {})}
    if not devices or name in _NOT_EVERYWHERE or name in known:
        return
    other, kind = ("capacity", "a capacity") if part == "attributes" else ("attributes", "an attribute")
    if any(name in getattr(device, other).get(domain, {}) for device in devices):
        yield f'{name} is {kind}: write device.{other}["{domain}"].{name}'
    elif not known:
        domains = sorted({one for device in devices for one in getattr(device, part)})
        yield f'no device has {part} of the domain "{domain}"; there are: {", ".join(domains)}'
    else:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(known))}"
        yield f'no device has {part}["{domain}"].{name}; {meant}'


def _kind_hints(match: re.Match[str], devices: Sequence[DeviceView]) -> Iterator[str]:
    """For a value that is compared with a literal of another kind."""
    part, domain, name = match["part"], match["domain"], match["name"] or match["quoted"]
    text = match["value"].strip("\"'")
    kind = "string" if text != match["value"] else "bool" if text in ("true", "false") else "int"
    real = next((value[name] for d in devices if name in (value := getattr(d, part).get(domain, {}))), None)
    if real is None:
        return
    if part == "capacity":
        yield f'{name} is a quantity; write {name}.compareTo(quantity("{text}")) == 0'
    elif isinstance(real, Version):
        semver = ".".join([*text.split("."), "0", "0"][:3])
        yield f'{name} is a version and equals no {kind}; write {name} == semver("{semver}")'
    elif _kind(real) != kind:
        yield f"{name} is of the kind {_kind(real)} and equals no {kind}"


def _terms(text: str) -> list[str]:
    """The parts that `&&` joins, if nothing else stands between them."""
    found, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))
        if depth == 0 and token in ("||", "?"):
            return [text.strip()]
        if depth == 0 and token == "&&":  # noqa: S105
            found.append("")
        else:
            found[-1] += token
    return [term.strip() for term in found]


def _holds(term: str, device: DeviceView) -> bool:
    try:
        return compiled(term).matches(device)
    except (SelectorError, InvalidConfigError, NotJudgedError):
        return False


def _explained(term: str, device: DeviceView) -> str:
    values = {}
    for match in _REFERENCE.finditer(term):
        name = match["name"] or match["quoted"]
        found = getattr(device, match["part"]).get(match["domain"], {})
        if name in found:
            values[name] = found[name] if match["part"] == "capacity" else _shown(found[name])
    wanted = _one_line(_REFERENCE.sub(lambda match: match["name"] or match["quoted"], term))
    told = ", ".join(f"{name} is {value}" for name, value in values.items())
    return f"{told}, wanted {wanted}" if told else f"{_one_line(term)} is false"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if _kind(value) == "string" else str(value)


def _kind(value: Any) -> str:
    return (
        "version"
        if isinstance(value, Version)
        else {bool: "bool", int: "int", str: "string"}.get(type(value), "list")
    )
