"""Manifests that people wrote, from public bug reports and from our own users, with the verdict of each document."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from dra_driver.cli.commands import call
from tests.fakes.tables import tabled

MACHINES = Path(__file__).parents[2] / "data/machines"


@pytest.fixture(scope="module")
def simulated(make_memory_path: Callable[[], Path]) -> Callable[[str], list[str]]:
    """The flags of a machine. Cases share it: to create one takes longer than to check a manifest."""

    @cache
    def flags(machine: str) -> list[str]:
        own = MACHINES / machine
        node = make_memory_path()
        # This machine may be a node itself, with claims.
        plugins = ["--kubelet-plugins-directory-path", str(node / "plugins")]
        simulate = [
            "--simulate",
            str(own) if own.exists() else machine,
            "--simulator-dir",
            str(node / "machine"),
        ]
        return [*simulate, *plugins]

    return flags


@pytest.mark.usefixtures("closed_nvml")
@tabled("name", "machine", "text", "verdicts", "says")
def test_case_has_its_verdicts_and_sentences(
    name: str,
    machine: str,
    text: str,
    verdicts: list[str],
    says: list[str],
    tmp_path: Path,
    simulated: Callable[[str], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "documents.yaml"
    file.write_text(text)
    code = call(["validate", str(file), "-o", "json", *simulated(machine)])
    shown, errors = capsys.readouterr()
    assert errors == ""
    documents = json.loads(shown)["documents"]
    assert [one["verdict"] for one in documents] == verdicts, (name, documents)
    said = "\n".join(text for one in documents for kind in ("faults", "hints", "notes") for text in one[kind])
    assert [part for part in says if part not in said] == [], (name, said)
    assert code == int("FAULT" in verdicts)
