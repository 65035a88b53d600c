"""`gpu-dra-driver simulate`, as typed."""

from __future__ import annotations

import pytest

from dra_driver.cli.main import main
from dra_driver.simulator import machine_names, open_machine


@pytest.fixture
def simulate(tmp_path, monkeypatch, capsys):
    """Runs a command on one directory; returns what it prints after checking the exit code."""
    monkeypatch.setenv("SIMULATOR_DIR", str(tmp_path / "machine"))

    def command(*arguments, code=0):
        monkeypatch.setattr("sys.argv", ["gpu-dra-driver", "simulate", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = "".join(capsys.readouterr())
        assert ended.value.code == code, printed
        return printed

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
    simulate("unload-driver")
    assert "not loaded" in simulate("show")
    assert "590.44.01 loaded" in simulate("load-driver", "590.44.01")
    simulate("reboot")
    uuid = simulate("add-gpu", "l40s").split()[-1]
    simulate("remove-gpu", uuid)
    assert "8 GPUs" in simulate("create", "dgx-h100")


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
