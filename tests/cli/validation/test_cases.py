"""Manifests that people wrote, from public bug reports and from our own users, with the verdict of each document."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.tables import tabled
from tests.integration.test_process import call

MACHINES = Path(__file__).parents[2] / "data/machines"


@tabled("name", "machine", "text", "verdicts", "says")
def test_case_has_its_verdicts_and_sentences(
    name: str, machine: str, text: str, verdicts: list[str], says: list[str], tmp_path: Path
) -> None:
    file, own = tmp_path / "documents.yaml", MACHINES / machine
    file.write_text(text)
    done = call("validate", str(file), "-o", "json", "--simulate", str(own) if own.exists() else machine)
    assert done.stderr == ""
    documents = json.loads(done.stdout)["documents"]
    assert [one["verdict"] for one in documents] == verdicts, (name, documents)
    said = "\n".join(text for one in documents for kind in ("faults", "hints", "notes") for text in one[kind])
    assert [part for part in says if part not in said] == [], (name, said)
    assert done.returncode == int("FAULT" in verdicts)
