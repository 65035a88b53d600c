"""One look at how a GPU and its MIG devices are used."""

from __future__ import annotations

import pytest

from dra_driver.errors import DeviceLostError, NvmlUnavailableError
from dra_driver.model.gpu import GpuLoad, GpuProcess
from dra_driver.model.mig import GpuAddress, MigAddress
from dra_driver.nvml.usage import UsageSource

MEMORY = 9984 << 20


class Watched:
    """The first GPU of a machine, seen at times that the test sets."""

    def __init__(self, node, cut: bool = True) -> None:
        self.node, self.machine, self.now = node, node.machine, 0.0
        node.session.reopen()
        self.sees_all = True
        self.source = UsageSource(node.session, lambda: self.now, sees_all=lambda: self.sees_all)
        found = self.machine.gpu(0)
        self.gpu = GpuAddress(found.uuid, found.bus_id)
        if cut:
            self.machine.set_mig_mode(0, on=True)

    def cut(self, start: int = 0, profile: str = "1g.10gb") -> MigAddress:
        gi, ci, uuid = self.machine.create_mig(0, profile, start)
        return MigAddress(uuid, gi, ci)

    def look(self, *devices: MigAddress) -> dict[str, GpuLoad]:
        self.now += 30
        return dict(self.source.read(self.gpu, devices).mig)

    def percent(self, device: MigAddress) -> int | None:
        return self.look(device)[device.uuid].utilisation_percent

    def samples(self) -> int:
        """How many buffers NVML has given out."""
        import pynvml

        return len(pynvml.nvmlLib.nvmlGpmSampleFree.__closure__[0].cell_contents.__self__.gpm_samples)


@pytest.fixture
def h100(machine):
    return Watched(machine("hgx-h100-4"))


def test_whole_gpu_has_its_load_and_its_processes(machine):
    seen = Watched(machine("hgx-h100-4"), cut=False)
    seen.machine.hold_gpu(0, 4711, "python3", utilisation=70)
    use = seen.source.read(seen.gpu, ())
    assert use.load == GpuLoad(512 << 20, 81559 << 20, 70, 30, 70.0, 700.0)
    assert (use.mig, use.processes) == ({}, [GpuProcess(4711, "python3", 512 << 20)])
    seen.sees_all = False
    assert seen.source.read(seen.gpu, ()).processes is None, "in another PID namespace than the host's"
    assert seen.source.read_processes(seen.gpu).processes is None
    seen.machine.lose_gpu(0)
    with pytest.raises(DeviceLostError):
        seen.source.read(seen.gpu, ())


def test_mig_device_is_as_busy_as_between_two_looks(h100):
    busy, idle = h100.cut(0), h100.cut(1)
    h100.machine.hold_gpu(0, 4711, "python3", gpu_instance=busy.gpu_instance_id, utilisation=90)
    unknown = GpuLoad(512 << 20, MEMORY, None)
    assert h100.look(busy, idle) == {busy.uuid: unknown, idle.uuid: GpuLoad(0, MEMORY, None)}
    assert h100.look(busy, idle) == {
        busy.uuid: GpuLoad(512 << 20, MEMORY, 90), idle.uuid: GpuLoad(0, MEMORY, 0),
    }  # fmt: skip
    h100.machine.release_gpu(0)
    assert h100.percent(busy) == 45


def test_two_looks_at_once_have_the_same_value(h100):
    device = h100.cut()
    h100.machine.hold_gpu(0, 1, "python3", gpu_instance=device.gpu_instance_id, utilisation=60)
    assert [h100.percent(device), h100.percent(device)] == [None, 60]
    h100.machine.release_gpu(0)
    h100.now -= 29.5
    assert h100.percent(device) == 60


def test_instance_with_the_ids_of_an_earlier_one_begins_anew(h100):
    first = h100.cut()
    assert [h100.percent(first), h100.percent(first)] == [None, 0]
    h100.machine.destroy_mig(0, first.gpu_instance_id)
    second = h100.cut()
    assert second[1:] == first[1:]
    assert h100.look(first) == {}  # another one is in its place
    assert [h100.percent(second), h100.percent(second)] == [None, 0]


def test_two_samples_that_do_not_belong_together_are_no_utilisation(h100):
    device = h100.cut()
    assert h100.percent(device) is None
    # Made between the look at the UUID and the sample.
    h100.machine.destroy_mig(0, device.gpu_instance_id)
    other = h100.cut()
    samples = h100.source._samples[h100.gpu.uuid]
    samples[other.uuid] = samples.pop(device.uuid)
    assert h100.percent(other) is None


def test_samples_of_devices_that_nobody_asks_for_are_freed(h100):
    devices = [h100.cut(start) for start in range(3)]
    for _ in range(4):
        h100.look(*devices)
    assert h100.samples() == 3
    h100.machine.set_fault("nvmlGpmMigSampleGet", code="UNKNOWN")
    h100.look(*devices)
    assert h100.samples() == 3
    h100.machine.clear_faults()
    h100.look(devices[0])
    assert h100.samples() == 1


def test_samples_of_an_earlier_session_are_not_used(h100):
    device = h100.cut()
    assert [h100.percent(device), h100.percent(device)] == [None, 0]
    h100.node.session.reopen()
    assert [h100.percent(device), h100.percent(device)] == [None, 0]


@pytest.mark.parametrize(
    "fault", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet"]
)
def test_older_drivers_have_no_utilisation_of_mig_devices(h100, fault):
    device = h100.cut()
    h100.machine.set_fault(fault, code="FUNCTION_NOT_FOUND")
    assert [h100.percent(device), h100.percent(device)] == [None, None]


def test_gpus_before_hopper_have_no_utilisation_of_mig_devices(machine):
    a100 = Watched(machine("dgx-a100-40gb"))
    a100.machine.reboot()
    a100.node.session.reopen()
    a100.machine.set_mig_mode(0, on=True)
    device = a100.cut(profile="1g.5gb")
    found = [a100.look(device)[device.uuid] for _ in range(2)]
    assert found == [GpuLoad(0, 4864 << 20)] * 2


def test_processes_alone_are_read_without_loads_and_keep_the_samples(h100):
    busy = h100.cut(0)
    h100.machine.hold_gpu(0, 4711, "python3", gpu_instance=busy.gpu_instance_id, utilisation=90)
    assert h100.percent(busy) is None
    for refused in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage", "nvmlGpmMigSampleGet"):
        h100.machine.set_fault(refused, code="GPU_IS_LOST")
    use = h100.source.read_processes(h100.gpu)
    assert (use.load, use.mig, [one.pid for one in use.processes]) == (GpuLoad(), {}, [4711])
    h100.machine.clear_faults()
    assert (h100.samples(), h100.percent(busy)) == (1, 90)


def test_closed_session_is_no_idle_gpu(h100):
    h100.node.session.close()
    with pytest.raises(NvmlUnavailableError):
        h100.source.read(h100.gpu, ())
