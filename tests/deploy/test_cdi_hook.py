"""`cdiHook.enabled`: the step that installs nvidia-cdi-hook on the host, run as the pod runs it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.host.hook import HookFinder
from dra_driver.model.host import HostPaths
from tests.deploy.test_daemonset import DAEMONSET
from tests.host.trees import put_hook, put_program

CHART = DAEMONSET / "chart"
NAME = "nvidia-cdi-hook"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The driver's directory on the host."""
    made = tmp_path / "host"
    made.mkdir()
    return made


@pytest.fixture
def install(host: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the step with an image of which `tmp_path / "image"` is the root, and first in PATH `programs`."""
    step = (CHART / "templates/daemonset.yaml").read_text().partition("name: HOOK_SOURCES")[2]
    named = re.findall(rf"^ +(/\S+/{NAME})$", step, re.MULTILINE)
    assert "/usr/bin/nvidia-cdi-hook" in named
    sources = " ".join(f"{tmp_path}/image{source}" for source in named)
    script = (CHART / "files/install-cdi-hook.sh").read_text()

    def run(programs: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = {"HOOK_DIRECTORY": str(host), "HOOK_SOURCES": sources, "POD_UID": "a-pod"}
        env["PATH"] = f"{programs}:/usr/bin:/bin" if programs else "/usr/bin:/bin"
        return subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("place", ["/artifacts/rpm/usr/bin", "/artifacts/deb/usr/bin", "/usr/bin"])
def test_the_driver_finds_what_was_installed(install, place: str, host: Path, tmp_path: Path) -> None:
    put_hook(tmp_path / "image", f"{place}/{NAME}")
    done = install()
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "driver-root").mkdir()
    paths = HostPaths(str(tmp_path / "driver-root"), "/run/nvidia/driver", plugin_directory=str(host))
    assert HookFinder(paths, None).find().host_path == str(host / NAME)
    assert [path.name for path in host.iterdir()] == [NAME]
    assert (host / NAME).stat().st_mode & 0o777 == 0o755


def test_the_same_hook_is_left_alone_and_another_takes_its_place_at_once(
    install, host: Path, tmp_path: Path
) -> None:
    put_hook(tmp_path / "image", f"/usr/bin/{NAME}")
    install()
    first = (host / NAME).stat().st_ino
    (host / f".{NAME}.killed").write_text("a part")
    assert install().returncode == 0
    assert (host / NAME).stat().st_ino == first
    with (host / NAME).open("rb") as running:
        put_hook(tmp_path / "image", f"/usr/bin/{NAME}", version="1.21.0")
        assert install().returncode == 0
        assert b"1.20.1" in running.read(), "who runs the old one keeps it"
    assert "1.21.0" in (host / NAME).read_text()
    assert [path.name for path in host.iterdir()] == [NAME]


@pytest.mark.parametrize("broken", ["cp", "chmod", "mv"])
def test_the_old_hook_stays_when_the_new_one_cannot_be_copied(
    install, broken: str, host: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    put_program(programs, f"/{broken}", "echo 'No space left on device' >&2; exit 1")
    put_hook(tmp_path / "image", f"/usr/bin/{NAME}")
    without = install(programs)
    assert (without.returncode, list(host.iterdir())) == (1, [])
    assert "could not copy" in without.stdout
    install()
    before = (host / NAME).read_bytes()
    put_hook(tmp_path / "image", f"/usr/bin/{NAME}", version="1.21.0")
    done = install(programs)
    assert done.returncode == 0
    assert "stays in use" in done.stdout
    assert (host / NAME).read_bytes() == before
    assert [path.name for path in host.iterdir()] == [NAME]


def test_an_image_without_the_hook_is_refused_with_what_to_do(install, host: Path) -> None:
    done = install()
    assert (done.returncode, list(host.iterdir())) == (1, [])
    assert "set another image (cdiHook.image)" in done.stdout
