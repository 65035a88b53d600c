import shutil
from pathlib import Path

import pytest

from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.rules.assembly import is_other_hardware
from dra_driver.model.host import HostFingerprint, PciFunction
from tests.fakes.tables import tabled
from tests.host.trees import pci_function, put

GPU = "0000:1b:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(str(tmp_path / "sys"), str(tmp_path / "proc"))


def test_pcie_root_is_the_first_element_below_devices(tmp_path: Path, sysfs: Sysfs) -> None:
    pci_function(tmp_path / "sys", GPU)
    assert sysfs.pcie_root(GPU) == "pci0000:16"


def test_pcie_root_is_unknown_when_the_device_is_not_below_a_pci_root(tmp_path: Path, sysfs: Sysfs) -> None:
    pci_function(tmp_path / "sys", GPU, parent="LNXSYSTM:00/VMBUS:00/pci0001:00")
    assert sysfs.pcie_root(GPU) is None
    assert sysfs.pcie_root("0000:99:00.0") is None


@pytest.mark.parametrize(("text", "node"), [("0", 0), ("1", 1), ("-1", None), ("", None)])
def test_numa_node_is_omitted_when_negative(
    tmp_path: Path, sysfs: Sysfs, text: str, node: int | None
) -> None:
    pci_function(tmp_path / "sys", GPU, numa_node=text)
    assert sysfs.numa_node(GPU) == node


def test_functions_of_nvidia_are_listed_with_class_and_driver(tmp_path: Path, sysfs: Sysfs) -> None:
    sys = tmp_path / "sys"
    place = pci_function(sys, GPU)
    (sys / "bus/pci/drivers/nvidia").mkdir(parents=True)
    (place / "driver").symlink_to("../../../../bus/pci/drivers/nvidia")
    pci_function(sys, "0000:07:00.0", device="0x22a3", **{"class": "0x068000"})
    pci_function(sys, "0000:00:02.0", vendor="0x8086")
    switch = PciFunction("0000:07:00.0", 0x10DE, 0x22A3, 0x068000)
    gpu = PciFunction(GPU, 0x10DE, 0x2330, 0x030200, "nvidia")
    assert sysfs.nvidia_functions() == (switch, gpu)
    assert sysfs.gpu_functions() == {GPU}


def test_gpus_of_the_nvidia_driver_have_the_uuid_that_it_reports(tmp_path: Path, sysfs: Sysfs) -> None:
    uuids = {GPU: "GPU-6b45fc99-bded-5a86-bbac-ad2360fd45d5", "0000:2b:00.0": "GPU-????????-????"}
    for bus_id in (*uuids, "0000:3b:00.0", "0000:4b:00.0", "0000:5b:00.0"):
        driver = "vfio-pci" if bus_id == "0000:4b:00.0" else "nvidia"
        place = pci_function(tmp_path / "sys", bus_id)
        (tmp_path / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (place / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        excluded = "Yes" if bus_id == "0000:3b:00.0" else "No"
        if bus_id != "0000:5b:00.0":
            text = f"Model: \t\t H100\nGPU UUID: \t {uuids.get(bus_id, uuids[GPU])}\nGPU Excluded:\t {excluded}\n"
            put(tmp_path / "proc", f"driver/nvidia/gpus/{bus_id}/information", text)
    assert sysfs.gpus_of_the_nvidia_driver() == {GPU: uuids[GPU], "0000:2b:00.0": None, "0000:5b:00.0": None}


def test_drm_nodes_are_cards_and_render_nodes(tmp_path: Path, sysfs: Sysfs) -> None:
    place = pci_function(tmp_path / "sys", GPU)
    for name in ("renderD128", "card1", "card1-DP-1", "controlD64"):
        (place / "drm" / name).mkdir(parents=True)
    assert sysfs.drm_nodes(GPU) == ("card1", "renderD128")
    assert sysfs.drm_nodes("0000:99:00.0") == ()


def test_a_function_that_fell_off_the_bus_reads_all_ones(tmp_path: Path, sysfs: Sysfs) -> None:
    place = pci_function(tmp_path / "sys", GPU)
    assert sysfs.answers(GPU) is None
    (place / "config").write_bytes(b"\xde\x10\x30\x23")
    assert sysfs.answers(GPU) is True
    (place / "config").write_bytes(b"\xff" * 64)
    assert sysfs.answers(GPU) is False


def test_the_boot_is_read_from_proc(tmp_path: Path, sysfs: Sysfs) -> None:
    assert sysfs.boot_id() is None
    put(tmp_path, "proc/sys/kernel/random/boot_id", "0b0c5ff4-5b0a-44b8-9bd3-2b2b3d3e7f10\n")
    assert sysfs.boot_id() == "0b0c5ff4-5b0a-44b8-9bd3-2b2b3d3e7f10"


def test_everything_is_empty_when_there_is_no_sysfs(sysfs: Sysfs) -> None:
    assert sysfs.nvidia_functions() == ()
    assert sysfs.gpu_functions() == frozenset()


def fingerprint(sys: str, proc: str) -> HostFingerprint:
    return Sysfs(sys, proc).fingerprint()


@tabled("path")
def test_the_fingerprint_changes_when_something_comes(tmp_path: Path, path: str) -> None:
    sys, proc = str(tmp_path / "sys"), str(tmp_path / "proc")
    pci_function(tmp_path / "sys", "0000:1b:00.0")
    put(tmp_path, "proc/driver/nvidia/capabilities/gpu0/mig/gi2/access")
    before = fingerprint(sys, proc)
    assert fingerprint(sys, proc) == before
    put(tmp_path, path, "x")
    assert fingerprint(sys, proc) != before


def test_the_fingerprint_changes_with_a_binding_that_the_driver_does_not_show(
    tmp_path: Path, sysfs: Sysfs
) -> None:
    """The NVIDIA driver lists a GPU until the last program has closed it; the kernel has removed the link before."""
    put(tmp_path, f"proc/driver/nvidia/gpus/{GPU}/information", "")
    place = pci_function(tmp_path / "sys", GPU)
    unbound = sysfs.fingerprint()
    (place / "driver").symlink_to("../../../bus/pci/drivers/nvidia")
    assert is_other_hardware(sysfs.fingerprint(), unbound)


def test_only_functions_of_nvidia_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual functions of network cards come and go; a slot may get another card."""
    host = Sysfs(str(tmp_path / "sys"), str(tmp_path / "proc"))
    functions = tmp_path / "sys/bus/pci/devices"
    pci_function(tmp_path / "sys", "0000:1b:00.0")
    before = host.fingerprint()
    put(functions, "0000:02:10.1/vendor", "0x15b3\n")
    (functions / "0000:02:10.2").mkdir()
    assert host.fingerprint() == before
    reads: list[Path] = []
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **kw: reads.append(path) or read_text(path, *a, **kw)
    )
    assert host.fingerprint() == before
    vendors = [path.parent.name for path in reads if path.name == "vendor"]
    assert vendors == ["0000:02:10.2"], "the vendors of the others are known"
    put(functions, "0000:02:10.2/vendor", "0x10de\n")
    after = host.fingerprint()
    assert after != before
    shutil.rmtree(functions / "0000:02:10.1")
    assert host.fingerprint() == after
    put(functions, "0000:02:10.1/vendor", "0x10de\n")
    assert host.fingerprint() != after


def test_instances_are_reported_by_the_minor_number_of_their_gpu(tmp_path: Path) -> None:
    proc = str(tmp_path / "proc")
    for path in ("gpu0/mig/gi1/ci0/access", "gpu12/mig/gi1/access", "mig/config", "gpux/mig/gi0/access"):
        put(tmp_path, f"proc/driver/nvidia/capabilities/{path}")
    found = fingerprint("", proc).instances
    assert set(found) == {0, 12}
    put(tmp_path, "proc/driver/nvidia/capabilities/gpu12/mig/gi1/ci0/access")
    after = fingerprint("", proc).instances
    assert (after[0], after[12] != found[12]) == (found[0], True)
    assert fingerprint("", proc).driver == ""
