"""Where the hook is found, and what is believed of it."""

import errno
import math
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from dra_driver.errors import RetryableError
from dra_driver.host import hook as hook_module
from dra_driver.host.hook import Hook, HookFinder
from dra_driver.model.driver_files import BASE_HOOK_VERBS
from dra_driver.model.host import HostPaths
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S
from tests.host.trees import HOOK_VERBS, link, put, put_hook, put_program

TOOLKIT = "/usr/local/nvidia/toolkit/nvidia-cdi-hook"
USUAL = "/usr/bin/nvidia-cdi-hook"
PROFILE = "update-application-profile"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    return tmp_path / "driver-root"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "host-root"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The driver's own directory, which has the same path on the host."""
    made = tmp_path / "plugins/gpu.nvidia.com"
    made.mkdir(parents=True)
    return made


def finder(
    driver: Path, host: Path | None = None, configured: str | None = None, plugin: Path | None = None
) -> HookFinder:
    driver.mkdir(exist_ok=True)
    paths = HostPaths(
        str(driver),
        "/run/nvidia/driver",
        host_root=str(host) if host else None,
        plugin_directory=str(plugin) if plugin else None,
    )
    return HookFinder(paths, configured)


def found(finder: HookFinder) -> Hook:
    hook = finder.find()
    assert hook.host_path is not None
    return hook


def test_the_hosts_own_hook_comes_before_one_in_the_driver_root(driver: Path, host: Path) -> None:
    put_hook(driver, USUAL)
    assert found(finder(driver, host)).host_path == f"/run/nvidia/driver{USUAL}"
    put_hook(host, TOOLKIT)
    assert found(finder(driver, host)).host_path == TOOLKIT
    assert found(finder(driver)).host_path == f"/run/nvidia/driver{USUAL}"


@pytest.mark.parametrize(
    "path",
    [USUAL, TOOLKIT, "/usr/local/bin/nvidia-cdi-hook", "/home/kubernetes/bin/nvidia/toolkit/nvidia-cdi-hook"],
)
def test_each_usual_place_of_the_host_is_checked(driver: Path, host: Path, path: str) -> None:
    put_hook(host, path)
    assert finder(driver, host).find() == Hook(path, HOOK_VERBS)


def test_links_stay_inside_the_hosts_root(driver: Path, host: Path) -> None:
    put_hook(host, "/opt/toolkit/nvidia-cdi-hook")
    link(host, USUAL, "/opt/toolkit/nvidia-cdi-hook")
    assert found(finder(driver, host)).host_path == "/opt/toolkit/nvidia-cdi-hook"


def test_no_hook_is_used_where_the_configuration_says_none(driver: Path, host: Path) -> None:
    """Not even one that is there, and without a note: it is meant so."""
    put_hook(host)
    assert finder(driver, host).find().host_path == USUAL
    assert finder(driver, host, "none").find() == Hook(None)


def test_none_is_found_where_there_is_none(driver: Path, host: Path) -> None:
    hook = finder(driver, host).find()
    assert (hook.host_path, hook.verbs) == (None, ())
    assert "set cdiHook.enabled in the chart" in hook.notes[0]


@pytest.mark.parametrize(
    ("listed", "verbs"),
    [
        (("create-symlinks", "update-ldcache"), BASE_HOOK_VERBS),
        (("create-symlinks", "enable-cuda-compat"), (*BASE_HOOK_VERBS, "enable-cuda-compat")),
        (("chmod", *HOOK_VERBS), HOOK_VERBS),
        ((), BASE_HOOK_VERBS),
    ],
)
def test_only_verbs_that_the_hook_lists_are_added(driver: Path, listed: tuple, verbs: tuple) -> None:
    put_hook(driver, verbs=listed)
    assert found(finder(driver)) == Hook(f"/run/nvidia/driver{USUAL}", verbs)


def test_a_verb_that_is_only_spoken_of_is_not_listed(driver: Path) -> None:
    lines = ("USAGE:", "  enable-cuda-compat", "COMMANDS:", "  chmod  not enable-cuda-compat", "END:")
    text = "\\n".join((*lines, lines[1]))
    put_program(driver, USUAL, f"printf '{text}'")
    assert found(finder(driver)).verbs == BASE_HOOK_VERBS


def test_the_older_tool_is_queried_with_its_own_subcommand(driver: Path, host: Path) -> None:
    put_hook(host, "/usr/bin/nvidia-ctk")
    assert finder(driver, host, "/usr/bin/nvidia-ctk").find() == Hook("/usr/bin/nvidia-ctk", HOOK_VERBS)


@tabled("script", "reason")
def test_a_hook_that_does_not_answer_gets_the_base_verbs_and_a_note(
    driver: Path, script: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_module, "_BOUND_S", 0.5 if "sleep" in script else PATIENCE_S)
    put_program(driver, USUAL, script)
    started = time.monotonic()
    hook = found(finder(driver))
    assert time.monotonic() - started < 30
    assert hook.verbs == BASE_HOOK_VERBS
    assert [reason in note and "create-symlinks and update-ldcache" in note for note in hook.notes] == [True]


def test_a_hook_that_cannot_be_run_gets_the_base_verbs_and_a_note(driver: Path) -> None:
    put(driver, USUAL, "no program")
    hook = found(finder(driver))
    assert hook.verbs == BASE_HOOK_VERBS
    assert "Permission denied" in hook.notes[0]


@tabled("version", "has_it")
def test_a_verb_whose_first_release_was_bad_needs_a_later_one(
    driver: Path, version: str, has_it: bool
) -> None:
    """1.20.0 fails the container where its root file system cannot be written."""
    put_hook(driver, version=version)
    known = HOOK_VERBS if has_it else tuple(verb for verb in HOOK_VERBS if verb != PROFILE)
    assert found(finder(driver)).verbs == known


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_a_script_that_calls_a_program_by_its_host_path_is_run_in_its_root(driver: Path, host: Path) -> None:
    put_program(host, TOOLKIT, f'exec {TOOLKIT}.real "$@"')
    put_hook(host, f"{TOOLKIT}.real")
    put_shell(host)
    assert finder(driver, host).find() == Hook(TOOLKIT, HOOK_VERBS)


def test_the_installed_hook_comes_after_the_hosts_own_and_before_one_of_a_driver_container(
    driver: Path, host: Path, plugin: Path
) -> None:
    put_hook(driver, USUAL)
    put_hook(plugin, "/nvidia-cdi-hook")
    installed = f"{plugin}/nvidia-cdi-hook"
    assert finder(driver, None, plugin=plugin).find() == Hook(installed, HOOK_VERBS)
    assert found(finder(driver, host, plugin=plugin)).host_path == installed
    put_hook(host, TOOLKIT)
    assert found(finder(driver, host, plugin=plugin)).host_path == TOOLKIT


def test_other_hook_is_used_while_the_installed_one_is_missing(driver: Path, plugin: Path) -> None:
    finds = finder(driver, plugin=plugin)
    assert finds.find().host_path is None
    hook = put_hook(plugin, "/nvidia-cdi-hook")
    assert found(finds).host_path == str(hook)
    hook.unlink()
    assert finds.find().host_path is None
    put_hook(plugin, "/nvidia-cdi-hook")
    assert found(finds).host_path == str(hook)


def test_an_installed_hook_that_cannot_be_run_is_not_used(driver: Path, plugin: Path) -> None:
    """As in a directory that is mounted noexec: the runtime could not run it either, and no container would start."""
    put_hook(plugin, "/nvidia-cdi-hook").chmod(0o644)
    hook = finder(driver, plugin=plugin).find()
    assert hook.host_path is None
    assert f"{plugin}/nvidia-cdi-hook does not run on the host (Permission denied)" in hook.notes[0]
    put_hook(driver, USUAL)
    assert found(finder(driver, plugin=plugin)).host_path == f"/run/nvidia/driver{USUAL}"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_an_installed_hook_must_run_with_what_the_host_has(driver: Path, host: Path, plugin: Path) -> None:
    """It runs in the driver's container, which has a loader and libraries, but not on this host."""
    hook = put_hook(plugin, "/nvidia-cdi-hook")
    on_host = put_hook(host, str(hook))
    assert on_host != hook
    refused = finder(driver, host, plugin=plugin).find()
    assert refused.host_path is None
    assert "failed with exit code 127" in refused.notes[0]
    put_shell(host)
    assert finder(driver, host, plugin=plugin).find() == Hook(str(hook), HOOK_VERBS)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(TimeoutError(), "it did not finish"), (OSError(errno.ETXTBSY, "it is busy"), "it is busy")],
)
def test_a_hook_that_gave_no_answer_is_queried_again_later(
    driver: Path, plugin: Path, error: Exception, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_module, "_RECHECK_AFTER_S", 3600)
    finds = finder(driver, plugin=plugin)
    path = put_hook(plugin, "/nvidia-cdi-hook")
    with monkeypatch.context() as broken:
        broken.setattr(hook_module, "run_program", Mock(side_effect=error))
        assert cause in finds.find().notes[0]
    assert (cause in finds.find().notes[0], finds.expirations()) == (True, 0)
    monkeypatch.setattr(hook_module._Answer, "is_due", property(lambda answer: answer.due_at < math.inf))
    assert (finds.expirations(), finds.find(), finds.expirations()) == (1, Hook(str(path), HOOK_VERBS), 1)


def test_a_hook_that_answered_badly_is_not_queried_again(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_module, "_RECHECK_AFTER_S", 0)
    calls = tmp_path / "calls"
    put_program(driver, USUAL, f"echo x >> {calls}; exit 3")
    finds = finder(driver)
    first = finds.find()
    requested = calls.read_text()
    assert (finds.find(), finds.expirations(), calls.read_text()) == (first, 0, requested)


@tabled("script", "reason")
def test_the_cause_is_the_last_line_that_a_hook_says_when_it_does_not_run(
    driver: Path, plugin: Path, script: str, reason: str
) -> None:
    put_program(plugin, "/nvidia-cdi-hook", script)
    hook = finder(driver, plugin=plugin).find()
    assert hook.host_path is None
    assert f"does not run on the host (it failed with exit code 1{reason}) and is not used" in hook.notes[0]


def put_shell(root: Path) -> None:
    """What scripts need below a root."""
    for program in ("/bin/sh", *_libraries_of("/bin/sh")):
        copy = root / program.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(Path(program).read_bytes())
        copy.chmod(0o755)


def _libraries_of(program: str) -> list[str]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(/\S+) \(0x", listed)


def test_the_hook_is_queried_once_until_it_is_replaced(driver: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    put_program(driver, USUAL, f"echo x >> {calls}")
    finds = finder(driver)
    threads = [threading.Thread(target=finds.find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls.read_text() == "x\n"
    (driver / USUAL.lstrip("/")).unlink()
    put_hook(driver)
    assert found(finds).verbs == HOOK_VERBS


def test_configured_hook_is_never_dropped_silently(driver: Path, host: Path) -> None:
    put_hook(host, USUAL)
    host_path = "/opt/toolkit/nvidia-cdi-hook"
    remedy = rf"--nvidia-cdi-hook-path {host_path} is not a file on the host: install"
    with pytest.raises(RetryableError, match=remedy):
        finder(driver, host, host_path).find()
    with pytest.raises(RetryableError, match=r"/run/nvidia/driver/usr/bin/hook is not a file"):
        finder(driver, None, "/run/nvidia/driver/usr/bin/hook").find()
    with pytest.raises(RetryableError, match="set the flag to the absolute path"):
        finder(driver, None, "nvidia-cdi-hook").find()
    put_hook(host, host_path)
    assert finder(driver, host, host_path).find() == Hook(host_path, HOOK_VERBS)


@pytest.mark.parametrize("mounted", [None, "not-there"])
def test_configured_hook_that_this_process_cannot_see_is_trusted_and_noted(
    driver: Path, tmp_path: Path, mounted: str | None
) -> None:
    hook = found(finder(driver, tmp_path / mounted if mounted else None, TOOLKIT))
    assert (hook.host_path, hook.verbs) == (TOOLKIT, BASE_HOOK_VERBS)
    assert f"--nvidia-cdi-hook-path {TOOLKIT} is not visible to this process" in hook.notes[0]


def test_the_places_are_those_that_decide(driver: Path, host: Path) -> None:
    assert len(set(finder(driver, host).places())) == 8
    assert (str(driver.parent), "/nvidia-cdi-hook") in finder(driver, host, plugin=driver.parent).places()
    assert list(finder(driver, host, TOOLKIT).places()) == [(str(host), TOOLKIT)]
    inside = "/run/nvidia/driver/opt/hook"
    assert list(finder(driver, host, inside).places()) == [(str(host), inside), (str(driver), "/opt/hook")]
