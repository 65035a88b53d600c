import shutil
from pathlib import Path

import pytest

from dra_driver.host.fingerprint import HostFingerprintReader
from dra_driver.model.fingerprint import HostFingerprint
from tests.fakes.tables import tabled
from tests.host.trees import pci_function, put


def fingerprint(sys: str, proc: str) -> HostFingerprint:
    return HostFingerprintReader(sys, proc).read()


@tabled("path")
def test_the_fingerprint_changes_when_something_comes(tmp_path: Path, path: str) -> None:
    sys, proc = str(tmp_path / "sys"), str(tmp_path / "proc")
    pci_function(tmp_path / "sys", "0000:1b:00.0")
    put(tmp_path, "proc/driver/nvidia/capabilities/gpu0/mig/gi2/access")
    before = fingerprint(sys, proc)
    assert fingerprint(sys, proc) == before
    put(tmp_path, path, "x")
    assert fingerprint(sys, proc) != before


def test_only_functions_of_nvidia_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual functions of network cards come and go; a slot may get another card."""
    fingerprint = HostFingerprintReader(str(tmp_path / "sys"), str(tmp_path / "proc"))
    functions = tmp_path / "sys/bus/pci/devices"
    pci_function(tmp_path / "sys", "0000:1b:00.0")
    before = fingerprint.read()
    put(functions, "0000:02:10.1/vendor", "0x15b3\n")
    (functions / "0000:02:10.2").mkdir()
    assert fingerprint.read() == before
    reads: list[Path] = []
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **kw: reads.append(path) or read_text(path, *a, **kw)
    )
    assert fingerprint.read() == before
    vendors = [path.parent.name for path in reads if path.name == "vendor"]
    assert vendors == ["0000:02:10.2"], "the vendors of the others are known"
    put(functions, "0000:02:10.2/vendor", "0x10de\n")
    after = fingerprint.read()
    assert after != before
    shutil.rmtree(functions / "0000:02:10.1")
    assert fingerprint.read() == after
    put(functions, "0000:02:10.1/vendor", "0x10de\n")
    assert fingerprint.read() != after


def test_instances_are_told_by_the_minor_number_of_their_gpu(tmp_path: Path) -> None:
    proc = str(tmp_path / "proc")
    for path in ("gpu0/mig/gi1/ci0/access", "gpu12/mig/gi1/access", "mig/config", "gpux/mig/gi0/access"):
        put(tmp_path, f"proc/driver/nvidia/capabilities/{path}")
    found = fingerprint("", proc).instances
    assert set(found) == {0, 12}
    put(tmp_path, "proc/driver/nvidia/capabilities/gpu12/mig/gi1/ci0/access")
    after = fingerprint("", proc).instances
    assert (after[0], after[12] != found[12]) == (found[0], True)
    assert fingerprint("", proc).driver == ""
