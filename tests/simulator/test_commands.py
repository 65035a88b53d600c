"""`gpu-dra-driver simulate`, as typed."""

from __future__ import annotations

import pytest

from dra_driver.cli.main import main
from dra_driver.errors import InvalidConfigError
from dra_driver.simulator import machine_names, open_machine
from dra_driver.simulator.catalogue import build
from dra_driver.simulator.simulate_commands import show
from tests.fakes.tables import tabled


@pytest.fixture
def simulate(tmp_path, monkeypatch, capsys):
    """Run a command on one directory; return what it prints after checking the exit code."""
    monkeypatch.setenv("SIMULATOR_DIR", str(tmp_path / "machine"))

    def command(*arguments, code=0):
        monkeypatch.setattr("sys.argv", ["gpu-dra-driver", "simulate", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed, said = capsys.readouterr()
        assert ended.value.code == code, said
        changes = arguments[0] not in ("list", "create", "show", "client") and "profiles" not in arguments
        if changes and code == 0 and "Usage:" not in printed:
            assert (
                said
                == f"changed: machine {open_machine(tmp_path / 'machine').name} in {tmp_path / 'machine'}\n"
            )
        return printed if code == 0 else said

    return command


def test_list(simulate):
    lines = simulate("list").splitlines()
    assert [line.split()[0] for line in lines] == ["MACHINE", *machine_names()]
    assert all(len(line.split()) > 3 for line in lines[1:])


def test_a_life(simulate, tmp_path):
    directory = tmp_path / "machine"
    assert "8 GPUs, driver 580.95.05" in simulate("create", "dgx-h100")
    simulate("lose", "3")
    assert "lost" in simulate("show")
    simulate("restore", "0000:61:00.0")
    simulate("xid", "1", "48", "--gi", "2")
    assert open_machine(directory).current().events[-1].gpu_instance == 2
    simulate("fault", "nvmlDeviceGetUUID", "--error", "gpu-is-lost", "--count", "3", "--gpu", "0")
    assert "fault: nvmlDeviceGetUUID (gpu is lost, 3 times)" in simulate("show")
    simulate("clear-faults")
    assert "created 1g.10gb" in (
        simulate("mig", "enable", "2") and simulate("mig", "create", "2", "1g.10gb", "4")
    )
    assert "on 1g.10gb@4" in simulate("show")
    simulate("hold", "2", "--pid", "9", "--gi", "11")
    assert "In use" in simulate("mig", "destroy", "2", "11", code=2)
    simulate("release", "2")
    simulate("mig", "destroy", "2", "11")
    simulate("mig", "disable", "2")
    assert "{0,4}:4" in simulate("mig", "profiles", "2")
    simulate("recovery-action", "5", "1")
    assert "recovery action 1" in simulate("show")
    assert "is on, its GPUs are ready" in simulate("confidential", "on", "--ready")
    assert "iommufd: present; modules: vfio_pci, vfio_iommu_type1; loaded: none" in simulate(
        "vfio", "--iommufd"
    )
    assert "IOMMU: off" in simulate("vfio", "--no-iommu", "--installed", "vfio_pci", "--loaded", "vfio_pci")
    assert "is bound to vfio-pci" in simulate("give", "4", "vfio-pci")
    simulate("fault", "unbind", "--error", "hang", "--gpu", "4")
    assert "fault: unbind (hang)" in simulate("show")
    simulate("clear-faults")
    assert open_machine(directory).current().system["confidential_ready"] is True
    simulate("reboot")
    assert open_machine(directory).current().system["confidential_ready"] is False
    assert "not 'maybe'" in simulate("confidential", "maybe", code=2)
    simulate("unload-driver")
    assert "not loaded" in simulate("show")
    assert "590.44.01 loaded" in simulate("load-driver", "590.44.01")
    simulate("reboot")
    uuid = simulate("add-gpu", "l40s").split()[-1]
    simulate("remove-gpu", uuid)
    assert "8 GPUs" in simulate("create", "dgx-h100")


def test_signals_are_set_together_and_end_when_they_are_not_named(simulate, tmp_path):
    simulate("create", "dgx-h100")
    names = ["memory", "nvlink-recoveries=7", "nvlinks-down=3,17", "pcie-lanes=8", "repair=tpc", "sram"]
    assert simulate("signals", "2", *names) == f"GPU 2 (gpu-fe441430) reports {', '.join(names)}\n"
    gpu = open_machine(tmp_path / "machine").gpu(2)
    assert (gpu.memory_unrepairable, gpu.sram_exceeded, gpu.repairs_pending) == (True, True, [0, 1])
    assert (gpu.links_down, gpu.nvlink_errors, gpu.pcie_link) == ([3, 17], {"recovery": 7}, [8, 16, 5, 5])
    assert "memory, nvlink-recoveries, nvlinks-down, pcie-lanes, repair, sram" in simulate("show")
    simulate("signals", "2", "repair=channel,tpc")
    [state] = [row["state"] for row in show(open_machine(tmp_path / "machine"))[1] if row["index"] == "2"]
    assert state == "repair"
    assert simulate("signals", "2").endswith("reports no signal\n")
    assert show(open_machine(tmp_path / "machine"))[1][2]["state"] == "ok"


@tabled("signal", "fault")
def test_signal_that_a_gpu_cannot_have_is_refused(simulate, signal, fault):
    simulate("create", "dgx-h100")
    assert fault in simulate("signals", "0", signal, code=2)


def test_errors_are_one_line(simulate):
    assert simulate("show", code=1).startswith("gpu-dra-driver: there is no simulated machine in")
    assert simulate("create", "dgx-9", code=2).count("\n") == 1
    simulate("create", "t4-4")
    assert "holds the machine t4-4" in simulate("create", "a10-8", code=1)
    assert "has no GPU 'x'" in simulate("lose", "x", code=2)
    assert "Not Supported" in simulate("mig", "enable", "0", code=2)


@pytest.mark.parametrize("command", [[], ["create"], ["fault"], ["mig"], ["mig", "create"]])
def test_help(command, simulate):
    assert "Usage" in simulate(*command, "--help")


def test_an_answer_has_index_and_name_of_the_gpu_however_it_was_named(simulate):
    simulate("create", "dgx-h100")
    assert simulate("lose", "1") == "GPU 1 (gpu-cbe0e302) is lost\n"
    assert simulate("restore", "gpu-cbe0e302") == "GPU 1 (gpu-cbe0e302) is back\n"
    assert simulate("xid", "0000:43:00.0", "48") == "Xid 48 raised on GPU 1 (gpu-cbe0e302)\n"
    assert simulate("remove-gpu", "0") == "removed GPU 0 (gpu-6b45fc99); the GPUs after it have new indices\n"
    assert simulate("lose", "gpu-cbe0e302") == "GPU 0 (gpu-cbe0e302) is lost\n"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 5000, b"a: 2026-13-45\n"])
def test_a_machine_file_that_cannot_be_read_is_one_sentence(tmp_path, content):
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(InvalidConfigError, match=rf"the machine file {file} cannot be read: "):
        build(str(file))


def test_a_directory_of_other_files_is_refused(simulate, tmp_path):
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine/thesis.txt").write_text("x")
    for arguments in (["create", "t4-4"], ["lose", "0"]):
        assert str(tmp_path / "machine") in simulate(*arguments, code=1)
    assert [file.name for file in (tmp_path / "machine").iterdir()] == ["thesis.txt"]
