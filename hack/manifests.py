"""`make manifests`: generates files from the chart in daemonset/chart and from its sources.

It writes

- daemonset/install.yaml, the chart's objects with its default values. Helm renders it if the chart changed, except for
  the policy, which is copied. Remove the file to render it again;
- the admission policy for parameters, from their fields in dra_driver/api;
- the parts of values.schema.json that the driver's configuration file determines, with null allowed for every
  value;
- files/defaults.json, from which the templates fill in missing values;
- the table of values in daemonset/README.md.

python hack/manifests.py --check    writes nothing and needs no Helm; fails if something would change
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dra_driver.app.config_file import GPUS, IMEX_CHANNEL
from dra_driver.app.settings import DOCUMENT
from dra_driver.model.schema import Choice, ListField, MapField, Object, Scalar, Shape
from dra_driver.simulator.catalogue import machine_names

ROOT = Path(__file__).resolve().parent.parent
DAEMONSET = ROOT / "daemonset"
CHART = DAEMONSET / "chart"

Json = Any

INSTALL = DAEMONSET / "install.yaml"
DEFAULTS, POLICY = CHART / "files/defaults.json", CHART / "files/parameters-policy.yaml"
OF_OTHER_VALUES = frozenset(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()))
NOTHING = "Null: none."
"""Ends the comment of each value in values.yaml for which null means "none" instead of the default."""
_HEAD = """\
# The chart with its default values, for `kubectl apply --filename`. `make manifests` writes this file.
# SHA-256 of the chart: {}
"""


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def json_schema(shape: Shape) -> Json:
    """Return the schema by which helm checks a section of the configuration file; the driver checks more."""
    match shape:
        case Object():
            fields = {name: json_schema(one) for name, one in shape.fields.items()}
            required = {"required": list(shape.required)} if shape.required else {}
            return {"type": "object", "additionalProperties": False, "properties": fields, **required}
        case ListField():
            fewest = {"minItems": shape.least} if shape.least else {}
            return {"type": "array", "items": json_schema(shape.items), **fewest}
        case MapField():
            return {"type": "object", "additionalProperties": json_schema(shape.values)}
        case Choice(words):
            # An unquoted `off` is the boolean false in YAML.
            return {"enum": [*words, False]} if "off" in words else {"type": "string", "enum": [*words]}
        case Scalar() if shape is IMEX_CHANNEL:
            return {"anyOf": [{"type": "integer"}, {"enum": ["all", "off", False]}]}
        case Scalar() if shape.type is object:
            return {}
        case Scalar():
            least, most = ("minLength", "maxLength") if shape.type is str else ("minimum", "maximum")
            bounds = {least: shape.least, most: shape.most}
            given = {name: bound for name, bound in bounds.items() if bound is not None}
            return {"type": _TYPES[shape.type], **given}
        case _:
            return {}


def schema() -> str:
    """Return values.schema.json, with the sections of the configuration file as the driver reads them."""
    document = json.loads((CHART / "values.schema.json").read_text())
    sections = DOCUMENT.fields
    shared = ("sharing", "health", "migLayouts", "power", "imex", "hostDevices")
    document["$defs"] = {
        "GpuSection": json_schema(GPUS),
        **{name: json_schema(sections[name]) for name in shared},
        "config": json_schema(
            Object({key: one for key, one in sections.items() if key not in OF_OTHER_VALUES})
        ),
    }
    # A machine is given by its name or by the path of its file.
    document["properties"]["simulator"]["properties"]["machine"] = {
        "anyOf": [{"enum": machine_names()}, {"type": "string", "pattern": "^/"}]
    }
    _take_null(document)
    for definition in document["$defs"].values():
        _take_null({"properties": {"": definition}})
    return json.dumps(document, indent=2) + "\n"


def _take_null(schema: Json) -> None:
    """Allow null for every nested key, and make every key optional: for null, helm passes null or drops the key.

    Entries of lists are left as they are.
    """
    schema.pop("required", None)
    below = [*schema.get("properties", {}).values(), schema.get("additionalProperties")]
    for one in filter(lambda found: isinstance(found, dict), below):
        if "enum" in one and None not in one["enum"]:
            one["enum"].append(None)
        if "anyOf" in one and {"type": "null"} not in one["anyOf"]:
            one["anyOf"].append({"type": "null"})
        if "type" in one:
            types = one["type"] if isinstance(one["type"], list) else [one["type"]]
            one["type"] = [*(name for name in types if name != "null"), "null"]
        _take_null(one)


def defaults() -> str:
    """Return files/defaults.json: the default of each value, and the paths for which null means "none"."""
    text = (CHART / "values.yaml").read_text()
    nothing = [path for path, _, why in _rows(text) if why.endswith(NOTHING)]
    return json.dumps({"defaults": yaml.safe_load(text), "nothing": nothing}, indent=2) + "\n"


def values_table() -> str:
    """Return the table of values, made from values.yaml and the comments above its keys."""
    text = (CHART / "values.yaml").read_text()
    rows = [f"| `{path}{default}` | {why} |" for path, default, why in _rows(text)]
    return "\n".join(["| Value and default | What it is |", "|---|---|", *rows]) + "\n"


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    return _values(yaml.compose(text), text.splitlines(), "")


def _values(node: Json, lines: list[str], above: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, default as `: value`, and comment of each key with a comment. The default includes keys below it."""
    for key, value in node.value:
        path = f"{above}{key.value}"
        comment: list[str] = []
        number = key.start_mark.line - 1
        while lines[number].lstrip().startswith("#"):
            comment.insert(0, lines[number].lstrip("# "))
            number -= 1
        if comment:
            default = yaml.safe_load(yaml.serialize(value))
            yield (
                path,
                f": {json.dumps(default)}" if default or default in (0, False) else "",
                " ".join(comment),
            )
        elif isinstance(value, yaml.MappingNode):
            yield from _values(value, lines, f"{path}.")
        else:
            raise SystemExit(f"daemonset/chart/values.yaml: {path} has no comment")


def between(text: str, name: str, content: str) -> str:
    """Return the text, with the part between the markers of `name` replaced by `content`."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"the markers {begin.strip()} and {end} are missing")
    return f"{before}{begin}{content}{end}{after}"


def written() -> Iterator[tuple[Path, str]]:
    """Yield each generated file except install.yaml, with its content."""
    import parameters_policy

    yield CHART / "values.schema.json", schema()
    yield DEFAULTS, defaults()
    readme = DAEMONSET / "README.md"
    yield readme, between(readme.read_text(), "values", values_table())
    yield POLICY, parameters_policy.policy()


def install_head() -> str:
    """Return the first lines of install.yaml, with a digest of the files from which Helm renders it."""
    rendered_from = [*(CHART / "templates").iterdir(), *(CHART / "files").iterdir()]
    total = hashlib.sha256()
    for path in sorted([*rendered_from, CHART / "Chart.yaml", CHART / "values.yaml"]):
        total.update(f"{path.relative_to(CHART)}\0{path.read_text()}\0".encode())
    return _HEAD.format(total.hexdigest())


def install(found: str, policy_before: str) -> str:
    """Return install.yaml, if the chart is not the one from which `found` was rendered.

    `policy_before` is the policy in `found` if the rest of the chart is the same, else empty.
    """
    before, now = (text.partition("\nspec:\n")[2] for text in (policy_before, POLICY.read_text()))
    if before:
        lines = found.splitlines(keepends=True)[_HEAD.count("\n") :]
        return install_head() + "".join(lines).replace(before, now)
    import localcluster

    print("rendering daemonset/install.yaml; if Helm is missing, it is built first, which takes minutes")
    return install_head() + localcluster.manifests()


def main() -> int:
    """Write the files or, with `--check`, compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    check = parser.parse_args().check
    changed = []
    found = INSTALL.read_text() if INSTALL.exists() else ""
    policy_before = POLICY.read_text() if found.startswith(install_head()) else ""
    for path, text in written():
        if not path.exists() or path.read_text() != text:
            changed.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
            policy_before = "" if path == DEFAULTS else policy_before
    # Last, because it is rendered from the chart, which contains the other files.
    if not found.startswith(install_head()):
        changed.append(str(INSTALL.relative_to(ROOT)))
        if not check:
            INSTALL.write_text(install(found, policy_before))
    print("\n".join(changed) or "nothing changes")
    if check and changed:
        print("run `make golden` or `make manifests`")
    return bool(check and changed)


if __name__ == "__main__":
    sys.exit(main())
