"""The pods that an object makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dra_driver.model.schema import JsonObject

_DEEPEST = 16


def pod_specs(content: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, JsonObject]]:
    """Path and spec of the pods of an object of any kind: of a Pod `spec`, of a Deployment `spec.template.spec`, of a
    JobSet one for each of its jobs."""
    if depth > _DEEPEST:
        return
    if isinstance(content, list):
        for number, inner in enumerate(content):
            yield from pod_specs(inner, f"{path}[{number}]", depth + 1)
    elif isinstance(content, dict) and depth == 0:
        yield from pod_specs(content.get("spec"), "spec", 1)
    elif isinstance(content, dict) and path.endswith("spec") and isinstance(content.get("containers"), list):
        yield path, content
    elif isinstance(content, dict):
        for name, inner in content.items():
            yield from pod_specs(inner, f"{path}.{name}", depth + 1)
