"""How the cluster does: one row for each component."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localcluster import api, binaries, lifecycle
from localcluster.components import NAMES, all_components
from localcluster.layout import Layout


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """One component; ``pid`` None when it does not run."""

    name: str
    pid: int | None
    healthy: bool
    log: Path


def read(layout: Layout) -> list[ComponentStatus]:
    """The state of every component, running or not."""
    return [_read_one(layout, name) for name in NAMES]


def table(rows: list[ComponentStatus]) -> str:
    """The rows as text for a terminal."""
    lines = [f"{'COMPONENT':<24} {'PID':>8} {'HEALTHY':<8} LOG"]
    for row in rows:
        healthy = "yes" if row.healthy else "no"
        lines.append(f"{row.name:<24} {row.pid or '-':>8} {healthy:<8} {row.log}")
    return "\n".join(lines)


def _read_one(layout: Layout, name: str) -> ComponentStatus:
    process = lifecycle.find(layout, name)
    component = all_components(layout, binaries.directory(layout), lifecycle.options_of(layout))[name]
    return ComponentStatus(
        name=name,
        pid=process.pid if process else None,
        healthy=process is not None and api.answers(layout, component.probe),
        log=layout.log(name),
    )
