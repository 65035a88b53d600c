"""`make audit`: the dependencies of the driver, as they are locked and as they are installed.

Every locked requirement is installed in the locked version, and of a licence that the project may ship. That each is
pinned and hashed, and that nothing else is needed, pip checks at each installation (`--require-hashes`). Prints a
table, exits with 1 if anything is wrong. `make release` takes its SBOMs from here.

Known vulnerabilities: `pip-audit --require-hashes --disable-pip -r requirements.txt`.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.txt"
PROJECT = "gpu-dra-driver"

ALLOWED = frozenset(
    {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MPL-2.0", "PSF-2.0", "Unlicense", "0BSD"}
)
"""Licences under which the image may be handed on. MPL-2.0 asks for the source of changed files; none is changed."""

# What packages write that have no SPDX expression in their metadata.
_SPOKEN = {
    "apache 2.0": "Apache-2.0", "apache license 2.0": "Apache-2.0", "apache software license": "Apache-2.0",
    "3-clause bsd license": "BSD-3-Clause", "bsd": "BSD-3-Clause", "bsd license": "BSD-3-Clause",
    "isc license": "ISC", "isc license (iscl)": "ISC", "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0", "python software foundation license": "PSF-2.0",
}  # fmt: skip
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Installed:
    """What the metadata of an installed distribution says; `licence` is an SPDX expression, empty if unknown."""

    name: str
    version: str
    licence: str
    summary: str = ""
    requires: tuple[str, ...] = ()


def read_lock(text: str) -> dict[str, str]:
    """The locked version of each package, in the order of the file."""
    lines = [line.partition(" \\")[0] for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]
    found = map(Requirement, lines)
    return {canonicalize_name(entry.name): str(entry.specifier).removeprefix("==") for entry in found}


def read_installed() -> dict[str, Installed]:
    """The distributions of this environment by name."""
    found = {}
    for distribution in importlib.metadata.distributions():
        fields: Any = distribution.metadata
        name = canonicalize_name(fields["Name"])
        needed = map(Requirement, distribution.requires or ())
        requires = tuple(canonicalize_name(one.name) for one in needed if "extra ==" not in str(one.marker))
        found[str(name)] = Installed(
            name, distribution.version, licence_of(fields), fields.get("Summary") or "", requires
        )
    return found


def licence_of(fields: Any) -> str:
    """The SPDX expression in a distribution's metadata, from whichever field has it; empty if none is understood."""
    if expression := fields.get("License-Expression"):
        return str(expression)
    said = [fields.get("License") or ""]
    said += [
        entry.rpartition(" :: ")[2]
        for entry in fields.get_all("Classifier") or ()
        if entry.startswith("License")
    ]
    for text in said:
        word = text.strip()
        if word in ALLOWED:
            return word
        if word.lower() in _SPOKEN:
            return _SPOKEN[word.lower()]
    return ""


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression can be satisfied with allowed licences: all of an AND, one of an OR."""
    parts = re.split(r"\s+OR\s+", expression.replace("(", " ").replace(")", " ").strip())
    return any(all(licence in ALLOWED for licence in re.split(r"\s+AND\s+", part.strip())) for part in parts)


def faults(locked: Mapping[str, str], installed: Mapping[str, Installed]) -> Iterator[str]:
    """A sentence for everything that is wrong."""
    for name, version in locked.items():
        here = installed.get(name)
        if here is None:
            yield f"{name}: locked and not installed; run `make setup`"
            continue
        if here.version != version:
            yield f"{name}: {here.version} is installed, {version} is locked; run `make setup`"
        if not here.licence:
            yield f"{name}: its licence is not understood; look it up and add it to hack/audit.py"
        elif not is_allowed(here.licence):
            yield f"{name}: licence {here.licence} is not one that the image may contain"


def sbom(
    locked: Mapping[str, str],
    installed: Mapping[str, Installed],
    *,
    version: str,
    image: Json | None = None,
    beside: Sequence[Json] = (),
) -> Json:
    """A CycloneDX 1.6 document; the same lock file gives the same document.

    It describes the package of `version`; or an `image` given as component, which holds the package, what is locked,
    and the components `beside` those.
    """
    refs = {name: _purl(name, pinned) for name, pinned in locked.items()}
    package: Json = {
        "type": "application", "bom-ref": _purl(PROJECT, version), "name": PROJECT, "version": version,
        "purl": _purl(PROJECT, version), "licenses": [{"expression": "Apache-2.0"}],
    }  # fmt: skip
    subject = image or package
    inside = [package] if image else []
    listed = [
        *inside,
        *(_component(name, pinned, installed.get(name)) for name, pinned in locked.items()),
        *beside,
    ]
    names = "".join([subject["bom-ref"], *sorted(entry["bom-ref"] for entry in listed)])
    refs_of = {
        package["bom-ref"]: installed.get(PROJECT),
        **{ref: installed.get(name) for name, ref in refs.items()},
    }
    dependencies = [
        {"ref": ref, "dependsOn": sorted({refs[one] for one in here.requires if one in refs} if here else ())}
        for ref, here in refs_of.items()
    ]
    if image:
        holds = sorted(entry["bom-ref"] for entry in [*inside, *beside])
        dependencies.insert(0, {"ref": image["bom-ref"], "dependsOn": holds})
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, names)}",
        "version": 1,
        "metadata": {"component": subject},
        "components": listed,
        "dependencies": dependencies,
    }


def _component(name: str, version: str, here: Installed | None) -> Json:
    """Without hashes: those of the lock file are of all archives of a release, and only one is installed."""
    purl = _purl(name, version)
    component: Json = {
        "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "scope": "required",
    }  # fmt: skip
    if here is not None and here.licence:
        component["licenses"] = [{"expression": here.licence}]
    if here is not None and here.summary:
        component["description"] = here.summary
    return component


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def main() -> int:
    """Print the table and the faults; 1 if there is a fault."""
    locked, installed = read_lock(LOCK.read_text()), read_installed()
    for name, version in locked.items():
        here = installed.get(name)
        print(f"{name:24} {version:14} {here.licence if here else '?'}")
    found = list(faults(locked, installed))
    print("\n".join(["", *found, f"{len(locked)} dependencies, {len(found)} faults"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
