"""Remedies stand in one module, and nothing else of the project contradicts them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dra_driver.model.remedies import reset
from tests.fakes.tables import read_yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dra_driver"
TEXTS = sorted(
    path
    for directory in ("docs", "examples", "daemonset")
    for path in (ROOT / directory).rglob("*")
    if path.suffix in (".md", ".yaml", ".txt", ".tpl")
)
RUNBOOKS = [
    rule["annotations"]["runbook"]
    for group in read_yaml(PACKAGE.parent / "daemonset/chart/files/rules.yaml")["groups"]
    for rule in group["rules"]
    if "alert" in rule
]


def steps_with(command: str, text: str) -> Iterator[str]:
    """The paragraphs, blocks of commands and rows of tables of a text that name a command."""
    for block in re.split(r"\n\s*\n|\n---\n|\n(?=\| )", text):
        if command in block:
            yield block


def test_reset_commands_are_written_in_one_module() -> None:
    found = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if "--gpu-reset" in path.read_text() and path.name != "remedies.py"
    }
    assert found <= {"simulator"}


def test_persistence_mode_is_off_before_a_reset() -> None:
    """Otherwise nvidia-smi refuses the reset."""
    steps = [(path.name, found) for path in TEXTS for found in steps_with("--gpu-reset", path.read_text())]
    assert len(steps) > 2
    steps.append(("doctor", reset()))
    assert [
        (name, text)
        for name, text in steps
        if not re.search(r"-pm 0.*--gpu-reset|persistence mode off", text, re.DOTALL)
    ] == []


def test_pod_of_the_plugin_is_not_deleted_for_a_hang() -> None:
    """The kubelet cannot stop a container that hangs in the kernel, and starts no new pod of the plugin before that."""
    deletes = re.compile(r"delete pods?\b[^\n]*component=node")
    assert [path for path in (*PACKAGE.rglob("*.py"), *TEXTS) if deletes.search(path.read_text())] == []


def test_runbooks_have_no_steps_of_their_own_for_a_gpu() -> None:
    own = re.compile(r"--gpu-reset|detach|serviced|reset the GPU|reset GPU")
    assert [runbook for runbook in RUNBOOKS if own.search(runbook)] == []
