"""The audit of dependencies sees what it is for, and its SBOM lists what is locked."""

from __future__ import annotations

from dataclasses import replace
from email.message import Message

import audit
import pytest
from audit import Installed

from tests.fakes.tables import tabled

LOCKED = {"one": "1.0", "two-parts": "2.0"}
INSTALLED = {
    "gpu-dra-driver": Installed("gpu-dra-driver", "0.1.0", "Apache-2.0", requires=("one",)),
    "one": Installed("one", "1.0", "MIT", "First", requires=("two-parts", "not-installed")),
    "two-parts": Installed("two-parts", "2.0", "MIT OR GPL-3.0-only"),
    "pip": Installed("pip", "30.0", ""),
}


@tabled("locked", "licence", "words")
def test_each_fault_is_told(locked: dict[str, str], licence: str, words: str) -> None:
    assert list(audit.faults(LOCKED, INSTALLED)) == []
    installed = INSTALLED | {"one": replace(INSTALLED["one"], licence=licence)}
    assert any(words in fault for fault in audit.faults(locked, installed))


def test_licences_are_found_in_whichever_field_has_them() -> None:
    def of(**fields: str) -> str:
        message = Message()
        for name, value in fields.items():
            message[name.replace("_", "-")] = value
        return audit.licence_of(message)

    assert of(License_Expression="Apache-2.0 AND MIT") == "Apache-2.0 AND MIT"
    assert of(License="BSD License", Classifier="License :: OSI Approved :: MIT License") == "BSD-3-Clause"
    assert of(Classifier="License :: OSI Approved :: Apache Software License") == "Apache-2.0"
    assert of(License="see LICENSE") == of() == ""


def test_what_is_locked_here_passes_and_is_in_the_sbom(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main() == 0, capsys.readouterr().out
    assert "0 faults" in capsys.readouterr().out
    locked = audit.read_lock(audit.LOCK.read_text())
    document = audit.sbom(locked, audit.read_installed(), version="1.2.3")
    assert {entry["name"]: entry["version"] for entry in document["components"]} == locked
    assert {"grpcio", "protobuf", "nvidia-ml-py", "urllib3"} <= set(locked)
    refs = {entry["bom-ref"] for entry in document["components"]}
    assert len(refs) == len(locked)
    edges = {entry["ref"]: set(entry["dependsOn"]) for entry in document["dependencies"]}
    root = document["metadata"]["component"]["bom-ref"]
    assert edges.keys() == refs | {root}
    # Everything in it is there because something needs it.
    assert set().union(*edges.values()) == refs
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert audit.sbom(locked, audit.read_installed(), version="1.2.3") == document
