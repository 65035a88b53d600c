"""What `validate` says of taint rules and of tolerations, and that every claim that we publish survives eviction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dra_driver.cli.validation.rules.taints import only_for_the_scheduler, selection_hints, toleration_hints
from tests.fakes.tables import tabled

ROOT = Path(__file__).parents[3]
MACHINES = {"m": ["gpu-6b45fc99", "gpu-e92b11af"]}
EVICTING = ("gpu.nvidia.com/xid",)
_BLOCK = re.compile(r"^( *)```ya?ml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
Json = dict[str, Any]


@tabled("selector", "effect", "expected")
def test_hints_of_a_taint_rule(selector: Json | None, effect: str, expected: list[str]) -> None:
    rule = {"spec": {"deviceSelector": selector, "taint": {"key": "a/b", "effect": effect}}}
    assert list(selection_hints(rule, MACHINES)) == expected


@tabled("tolerations", "hints")
def test_hints_of_tolerations(tolerations: list[Json], hints: list[str]) -> None:
    request = {"name": "r", "exactly": {"deviceClassName": "c", "tolerations": tolerations}}
    found = list(toleration_hints({"requests": [request]}, EVICTING))
    assert [hint.partition(":")[2].partition(",")[0].strip() for hint in found] == hints


def tolerations_in(content: Any) -> Iterator[list[Json]]:
    """The tolerations of every request of a claim in this content."""
    if isinstance(content, list):
        for inner in content:
            yield from tolerations_in(inner)
    elif isinstance(content, dict):
        if "deviceClassName" in content and "tolerations" in content:
            yield content["tolerations"]
        yield from tolerations_in(list(content.values()))


def published() -> Iterator[tuple[Path, list[Json]]]:
    """The tolerations of every claim in manifests and in the YAML blocks of pages."""
    for path in sorted(one for top in ("docs", "examples", "daemonset") for one in (ROOT / top).rglob("*.*")):
        texts = []
        if path.suffix in (".yaml", ".yml") and "templates" not in path.parts:
            texts = [path.read_text()]
        elif path.suffix in (".md", ".txt"):
            texts = [match[2] for match in _BLOCK.finditer(path.read_text())]
        for text in texts:
            if "tolerations" in text:
                for document in yaml.safe_load_all(text):
                    yield from ((path, found) for found in tolerations_in(document))


def test_every_published_claim_that_tolerates_taints_also_survives_eviction() -> None:
    found = list(published())
    assert len(found) >= 8
    assert [
        (str(path.relative_to(ROOT)), tolerations)
        for path, tolerations in found
        for key in {one.get("key", "any") for one in tolerations}
        if only_for_the_scheduler(tolerations, key)
    ] == []
