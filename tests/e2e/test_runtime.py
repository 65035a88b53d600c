"""What the real containerd answers of its CDI settings, by which `doctor` judges it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import localcluster
import pytest

from dra_driver.cli.checks.runtime import RuntimeChecks, answering
from dra_driver.host.rooted_tree import RootedTree
from tests.e2e.conftest import wait_for

pytestmark = pytest.mark.cluster

CRI = "[plugins.'io.containerd.cri.v1.runtime']\n"


@contextmanager
def containerd(text: str) -> Iterator[Path]:
    """The root of a host whose containerd read this configuration at its start; the file is gone."""
    with TemporaryDirectory(prefix="c-") as directory:
        root = Path(directory)
        socket, file = root / "run/containerd/containerd.sock", root / "config.toml"
        socket.parent.mkdir(parents=True)
        places = f'root = "{root}/lib"\nstate = "{root}/state"\n'
        file.write_text(f'version = 3\n{places}{text}\n[grpc]\naddress = "{socket}"\n')
        command = [localcluster.build() / "containerd", "--config", file]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                wait_for("containerd", socket.exists)
                yield root
            finally:
                process.terminate()


@pytest.mark.parametrize(
    ("text", "status", "part"),
    [
        ("", "OK", "containerd reads /etc/cdi, /var/run/cdi"),
        (f"{CRI}enable_cdi = false\n", "FAIL", "containerd: CDI is off"),
        (
            f'{CRI}cdi_spec_dirs = ["/a"]\n',
            "FAIL",
            "containerd reads /a, but gpu-dra-driver writes to /var/run/cdi",
        ),
    ],
)
def test_running_containerd_is_judged_by_what_it_answers(text: str, status: str, part: str) -> None:
    with containerd(text) as root:
        wait_for("an answer", lambda: answering(RootedTree(str(root))))
        found = RuntimeChecks("/var/run/cdi", str(root)).runtime()
    assert (found.status, part in found.seen) == (status, True), found


def test_containerd_of_docker_has_no_answer() -> None:
    with containerd('disabled_plugins = ["io.containerd.grpc.v1.cri"]\n') as root:
        assert answering(RootedTree(str(root))) == {}
