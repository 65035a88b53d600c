import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.cdi.rules.spec import checked_claim_uid, claim_spec, encode
from dra_driver.errors import ClaimRefusedError, RetryableError
from dra_driver.model.driver_files import BASE_HOOK_VERBS, CdiDevice, DriverFile, DriverFiles, DriverLink
from tests.cdi.cdi_samples import DRIVER, UID, driver, gpu, mig
from tests.cdi.cdi_schema import faults

DEBIAN = "/usr/lib/x86_64-linux-gnu"
HOOK = "/usr/bin/nvidia-cdi-hook"
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("device", [gpu(3), mig()], ids=["gpu", "mig"])
def test_a_claim_gets_exactly_this(device: CdiDevice, is_golden: Callable[[Path, str], None]) -> None:
    """A MIG device needs only an old version of CDI, and keeps its environment and mounts."""
    spec = claim_spec(UID, DRIVER, driver(), [device])
    is_golden(GOLDEN / f"{device.name}.json", json.dumps(spec, indent=1) + "\n")


def test_an_older_hook_gets_only_the_verbs_that_it_knows() -> None:
    spec = claim_spec(UID, DRIVER, driver(verbs=BASE_HOOK_VERBS), [gpu(0)])
    assert [entry["args"][1] for entry in spec["containerEdits"]["hooks"]] == list(BASE_HOOK_VERBS)
    verbs = (*BASE_HOOK_VERBS, "enable-cuda-compat")
    spec = claim_spec(UID, DRIVER, driver(verbs=verbs), [gpu(0)])
    assert {entry["args"][1] for entry in spec["containerEdits"]["hooks"]} == set(verbs)


def mounted(files: DriverFiles) -> dict[str, str]:
    spec = claim_spec(UID, DRIVER, files, [gpu(0)])
    assert faults(spec) == []
    assert "hooks" not in spec["containerEdits"]
    assert "hooks" not in spec["devices"][0]["containerEdits"]
    mounts = spec["containerEdits"]["mounts"]
    found = {entry["containerPath"]: entry["hostPath"] for entry in mounts}
    assert len(found) == len(mounts)
    return found


def test_libraries_are_mounted_under_every_name_in_every_usual_directory_when_there_is_no_hook() -> None:
    found = mounted(driver(hook=None))
    libraries = {path: source for path, source in found.items() if "libcuda" in path}
    assert libraries == dict.fromkeys(
        (
            f"{directory}/{name}"
            for directory in ("/usr/lib64", "/usr/lib/x86_64-linux-gnu")
            for name in ("libcuda.so.570.1", "libcuda.so.1")
        ),
        "/run/nvidia/driver/usr/lib64/libcuda.so.570.1",
    )


def test_without_a_hook_each_place_has_its_own_file_and_folders_of_plugins_stay() -> None:
    own = f"{DEBIAN}/nvidia/current"
    names = (
        f"{own}/libcuda.so.570.1",
        "/usr/lib64/libcuda.so.570.1",
        f"{own}/vdpau/libvdpau_nvidia.so.570.1",
    )
    links = (
        DriverLink(f"{DEBIAN}/libcuda.so.1", "nvidia/current/libcuda.so.570.1", f"/host{names[0]}"),
        DriverLink(f"{own}/gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1", "/host/allocator"),
    )
    libraries = tuple(DriverFile(name, f"/host{name}", name) for name in names)
    found = mounted(replace(driver(hook=None), libraries=libraries, links=links))
    assert found["/usr/lib64/libcuda.so.570.1"] == "/host/usr/lib64/libcuda.so.570.1"
    assert found[f"{DEBIAN}/libcuda.so.570.1"] == found[names[0]] == f"/host{names[0]}"
    assert found["/usr/lib64/libcuda.so.1"] == found[f"{DEBIAN}/libcuda.so.1"] == f"/host{names[0]}"
    for directory in (DEBIAN, "/usr/lib64", own):
        assert found[f"{directory}/gbm/nvidia-drm_gbm.so"] == "/host/allocator"
        assert found[f"{directory}/vdpau/libvdpau_nvidia.so.570.1"] == f"/host{names[2]}"
    assert f"{DEBIAN}/nvidia-drm_gbm.so" not in found


def test_without_a_hook_modules_of_an_x_server_are_mounted_only_where_it_looks() -> None:
    directory = "/usr/lib/xorg/modules/extensions"
    module = DriverFile(
        "", f"/host{directory}/libglxserver_nvidia.so.570.1", f"{directory}/libglxserver_nvidia.so.570.1"
    )
    link = DriverLink(f"{directory}/libglxserver_nvidia.so", "libglxserver_nvidia.so.570.1", module.host_path)
    files = driver(hook=None)
    found = mounted(replace(files, configs=(module,), links=(*files.links, link)))
    assert [path for path in found if "glxserver" in path] == [module.container_path, link.path]
    assert found[link.path] == module.host_path


def test_the_older_tool_is_called_with_its_own_subcommand() -> None:
    spec = claim_spec(UID, DRIVER, driver(hook="/opt/nvidia-ctk"), [gpu(0)])
    first = spec["containerEdits"]["hooks"][0]
    assert first["args"][:3] == ["nvidia-ctk", "hook", "create-symlinks"]


@pytest.mark.parametrize("with_hook", [HOOK, None])
def test_every_spec_keeps_the_rules_and_the_schema(with_hook: str | None) -> None:
    devices = [*(gpu(minor) for minor in range(8)), mig()]
    spec = claim_spec(UID, DRIVER, driver(with_hook, libraries=50), devices)
    assert faults(spec) == []


def test_the_same_devices_give_the_same_bytes_in_any_order() -> None:
    one = claim_spec(UID, DRIVER, driver(), [gpu(1), gpu(0)])
    other = claim_spec(UID, DRIVER, driver(), [gpu(0), gpu(1)])
    assert encode(one) == encode(other)
    assert json.loads(encode(one)) == one


def test_specs_share_no_parts_that_a_change_could_reach() -> None:
    files = driver()
    first = claim_spec(UID, DRIVER, files, [gpu(0)])
    untouched = copy.deepcopy(first)
    second = claim_spec(UID, DRIVER, files, [gpu(0)])
    second["containerEdits"]["env"].append("A=b")
    second["containerEdits"]["mounts"][0]["options"].append("x")
    assert first == untouched


def test_a_device_of_two_requests_is_listed_once() -> None:
    spec = claim_spec(UID, DRIVER, driver(), [gpu(0), gpu(0)])
    assert [device["name"] for device in spec["devices"]] == [f"{UID}-gpu-00000000"]


def test_a_device_with_two_settings_is_refused() -> None:
    with pytest.raises(ClaimRefusedError, match="gpu-00000000 twice with different settings"):
        claim_spec(UID, DRIVER, driver(), [gpu(0), replace(gpu(0), env=("A=b",))])


def test_a_device_without_nodes_is_refused() -> None:
    with pytest.raises(RetryableError, match="gpu-00000000 has no device node on the host"):
        claim_spec(UID, DRIVER, driver(), [replace(gpu(0), nodes=())])


def test_a_driver_without_its_control_nodes_is_refused() -> None:
    with pytest.raises(RetryableError, match="/dev/nvidiactl is missing on the host"):
        claim_spec(UID, DRIVER, replace(driver(), nodes=()), [gpu(0)])


def test_a_claim_without_devices_is_refused() -> None:
    with pytest.raises(ClaimRefusedError, match="has no device"):
        claim_spec(UID, DRIVER, driver(), [])


@pytest.mark.parametrize("uid", ["", "../x", "a/b", "a..b", ".a", "a\n", "a b", "ä", "a" * 200, "-"])
def test_a_uid_that_could_leave_the_directory_is_refused(uid: str) -> None:
    with pytest.raises(ClaimRefusedError, match="cannot be part of a file name"):
        checked_claim_uid(uid)
