from pathlib import Path

import pytest

from dra_driver.host.fingerprint import hardware_fingerprint, instance_fingerprint
from tests.host.trees import pci_function, put


def fingerprint(sys: str, proc: str) -> tuple[object, ...]:
    return (hardware_fingerprint(sys, proc), instance_fingerprint(proc))


@pytest.mark.parametrize(
    "path",
    [
        "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access",
        "proc/driver/nvidia/capabilities/gpu0/mig/gi2/ci0/access",
        "proc/driver/nvidia/gpus/0000:1b:00.0/information",
        "proc/driver/nvidia/version",
        "sys/bus/pci/devices/0000:1c:00.0/vendor",
    ],
)
def test_the_fingerprint_changes_when_something_comes(tmp_path: Path, path: str) -> None:
    sys, proc = str(tmp_path / "sys"), str(tmp_path / "proc")
    hash(fingerprint(sys, proc))
    pci_function(tmp_path / "sys", "0000:1b:00.0")
    put(tmp_path, "proc/driver/nvidia/capabilities/gpu0/mig/gi2/access")
    before = fingerprint(sys, proc)
    assert fingerprint(sys, proc) == before
    put(tmp_path, path, "x")
    assert fingerprint(sys, proc) != before
