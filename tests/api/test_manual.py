"""docs/api.md has every parameter of claims. Its tables are generated, but keep hand-written text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dra_driver.api.config import FIELDS, GROUP_VERSION, KINDS, MEMORY, MIN_MEMORY, TIMEOUT
from dra_driver.api.resolve import decode
from dra_driver.model.schema import Choice, ListField, MapField, Object, Scalar, Shape
from tests.fakes.tables import IsGenerated, generated

MANUAL = Path(__file__).parents[2] / "docs/api.md"
HEAD = "| Field | Type | Values | Default | What it does |\n|---|---|---|---|---|\n"
TYPES: Final = {bool: "bool", int: "int"}


def fields(shape: Shape, path: str = "") -> Iterator[tuple[str, Shape, bool]]:
    """Every field below an object, with its path, and whether its object requires it."""
    if isinstance(shape, Object):
        for name, below in shape.fields.items():
            yield f"{path}{name}", below, name in shape.required
            yield from fields(below, f"{path}{name}.")


def type_and_values(shape: Shape) -> tuple[str, str]:
    """Two cells of the table."""
    match shape:
        case Choice(words):
            return "string", ", ".join(f"`{word}`" for word in words)
        case ListField(Choice(words)):
            return "list of strings", ", ".join(f"`{word}`" for word in words)
        case MapField(values):
            kind, bounds = type_and_values(values)
            return f"map of {kind}", f"keys: UUIDs or indexes of devices; values: {bounds}"
        case Object():
            return "object", ""
    assert isinstance(shape, Scalar)
    if shape is MEMORY:
        assert MIN_MEMORY == 1 << 20
        return "quantity", "1Mi or more"
    if shape is TIMEOUT:
        return "string", str(shape.says)
    if shape.least is not None:
        return TYPES[shape.type], f"{shape.least} to {shape.most}"
    return TYPES[shape.type], "`true`, `false`"


# MigDeviceConfig has no table and no example of its own.
TABLES = [kind for kind in KINDS if kind != "MigDeviceConfig"]


@pytest.mark.parametrize("kind", TABLES)
def test_manual_has_each_field_with_its_type_and_values(kind: str, is_generated: IsGenerated) -> None:
    _, table, _ = generated(MANUAL, kind)
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    written = {row[0].strip("`"): (row[3], row[4]) for row in rows}
    made = HEAD
    for path, shape, is_required in fields(FIELDS[kind]):
        default, meaning = written.get(path, ("?", "?"))
        shown = "required" if is_required else default
        made += f"| `{path}` | {' | '.join(type_and_values(shape))} | {shown} | {meaning} |\n"
    is_generated(MANUAL, kind, made)
    assert "?" not in made, "fill in what is '?' in docs/api.md"


def examples(kind: str) -> list[dict[str, Any]]:
    """Return the page's examples of a kind of parameters, as in the claims there."""
    blocks = re.findall(r"```yaml\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    claims = [claim for block in blocks for claim in yaml.safe_load_all(block)]
    configs = [one for claim in claims for one in claim["spec"]["devices"].get("config", ())]
    given = [one["opaque"]["parameters"] for one in configs]
    return [one for one in given if one["kind"] == kind]


def test_mig_devices_have_the_fields_of_whole_gpus_without_time_slices() -> None:
    gpu, mig = ([path for path, _, _ in fields(FIELDS[kind])] for kind in ("GpuConfig", "MigDeviceConfig"))
    assert mig == [path for path in gpu if not re.search(r"timeSlicingConfig|^power|^clocks", path)]


def test_manual_lists_every_class_of_the_chart() -> None:
    templates = (MANUAL.parents[1] / "daemonset/chart/templates").glob("*.yaml")
    pattern = r"^kind: DeviceClass\nmetadata:\n  name: (\S+)"
    names = {name for path in templates for name in re.findall(pattern, path.read_text(), re.MULTILINE)}
    table = MANUAL.read_text().partition("## DeviceClasses")[2].partition("\n## ")[0]
    assert {"gpu.nvidia.com", "shares.gpu.nvidia.com", "vfio.gpu.nvidia.com"} <= names
    assert names <= set(re.findall(r"`([\w.-]+)`", table))


@pytest.mark.parametrize("kind", TABLES)
def test_examples_are_right_and_use_every_field(kind: str) -> None:
    used = set()
    for example in examples(kind):
        assert example["apiVersion"] == GROUP_VERSION
        decode(example)
        used |= {path for path, _, _ in fields(FIELDS[kind]) if holds(example, path)}
    assert used == {path for path, _, _ in fields(FIELDS[kind])}


def holds(document: Any, path: str) -> bool:
    """Whether a document has the field."""
    for name in path.split("."):
        if not isinstance(document, dict) or name not in document:
            return False
        document = document[name]
    return True


@pytest.mark.parametrize("kind", TABLES)
def test_a_default_means_the_same_as_no_field(kind: str) -> None:
    """Where the page names a value that can be written, and nothing else has to be written with it."""
    _, table, _ = generated(MANUAL, kind)
    compared = 0
    for line in table.splitlines()[2:]:
        path, _, _, default, _ = (cell.strip() for cell in line.strip("|").split("|"))
        names = path.strip("`").split(".")
        if not default.startswith("`") or "sharing" in names:
            continue
        document: Any = yaml.safe_load(default.strip("`"))
        for name in reversed(names):
            document = {name: document}
        header = {"apiVersion": GROUP_VERSION, "kind": kind}
        assert decode(header | document) == decode(header)
        compared += 1
    assert compared
