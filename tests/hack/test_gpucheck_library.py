"""The way that real hardware takes: a shared object, files and device nodes that are no simulator's."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from gpucheck.__main__ import DIFFERENT, OK, main

from dra_driver.simulator.hostroot.entries import can_make_nodes
from tests.hack.support import script

VERSION = "570.10.01"
UUID = "GPU-11111111-2222-3333-4444-555555555555"

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "aarch64"), reason="no GPU driver for this processor"
    ),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A driver root with a library that works."""
    if not can_make_nodes(tmp_path):
        pytest.skip("needs the right to make device nodes")
    root = tmp_path / "root"
    libraries = root / f"usr/lib/{platform.machine()}-linux-gnu"
    for directory in (libraries, root / "dev", root / "usr/bin"):
        directory.mkdir(parents=True)
    nvml = libraries / f"libnvidia-ml.so.{VERSION}"
    source = Path(__file__).with_name("stub_nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(nvml), str(source)], check=True)
    for name in ("libcuda", "libnvidia-ptxjitcompiler"):
        shutil.copy(nvml, libraries / f"{name}.so.{VERSION}")
    for name in ("libnvidia-ml", "libcuda", "libnvidia-ptxjitcompiler"):
        (libraries / f"{name}.so.1").symlink_to(f"{name}.so.{VERSION}")
    for name, major, minor in (("nvidiactl", 195, 255), ("nvidia0", 195, 0), ("nvidia-uvm", 508, 0)):
        os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
    script(root / "usr/bin/nvidia-smi", {"-L": f"GPU 0: Stub GPU (UUID: {UUID})\n"})
    return root


def test_nothing_differs_when_the_library_is_a_shared_object(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--nvidia-driver-root", str(root), "--container-driver-root", str(tmp_path / "none")]
    assert main(arguments) == OK
    assert "gpu-11111111" in capsys.readouterr().out
    (root / "usr/bin/nvidia-smi").write_text("#!/bin/sh\necho 'GPU 1: Stub GPU (UUID: GPU-0)'\n")
    assert main(arguments) == DIFFERENT
