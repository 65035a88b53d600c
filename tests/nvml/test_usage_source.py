"""How a GPU and its MIG devices are used: what each kind of GPU reports, and what a failing call costs."""

from __future__ import annotations

import time

import pynvml
import pytest

from dra_driver.errors import DeviceLostError, NvmlUnavailableError
from dra_driver.model.gpu import GpuLoad, GpuMeters, GpuProcess
from dra_driver.model.mig import GpuAddress, MigAddress
from dra_driver.nvml.usage_source import UsageSource, read_load

MEMORY = 9984 << 20


class Watched:
    """The first GPU of a machine, seen at times that the test sets."""

    def __init__(self, node, cut: bool = True) -> None:
        self.node, self.machine, self.now = node, node.machine, 0.0
        node.session.reopen()
        self.source = UsageSource(node.session, lambda: self.now)
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
        """The number of buffers that NVML has allocated."""
        import pynvml

        return len(pynvml.nvmlLib.nvmlGpmSampleFree.__closure__[0].cell_contents.__self__.gpm_samples)


@pytest.fixture
def watched(machine):
    return Watched(machine("hgx-h100-4"))


@pytest.fixture
def seen(machine):
    """A GPU out of MIG mode."""
    return Watched(machine("hgx-h100-4"), cut=False)


def test_whole_gpu_has_its_load_and_its_processes(seen):
    seen.machine.hold_gpu(0, 4711, "python3", utilisation=70)
    use = seen.source.read(seen.gpu, ())
    assert use.load == GpuLoad(512 << 20, 81559 << 20, 70, 58, 462.0, 700.0)
    assert (use.mig, use.processes) == ({}, [GpuProcess(4711, "python3", 512 << 20, None, 70)])
    seen.source.sees_all = False
    assert seen.source.read(seen.gpu, ()).processes is None, "in another PID namespace than the host's"
    assert seen.source.read_processes(seen.gpu).processes is None
    seen.machine.set_mig_mode(1, on=True)
    assert read_load(seen.machine.gpu(1).uuid) == GpuLoad(0, 81559 << 20, None, 31, 70.0, 700.0)
    seen.machine.lose_gpu(0)
    with pytest.raises(DeviceLostError):
        seen.source.read(seen.gpu, ())


def test_meters_count_with_the_work_of_the_gpu(seen):
    idle = seen.source.read(seen.gpu, ()).meters
    assert (idle.nvlink_sent_bytes, idle.pcie_received_bytes, idle.throttles) == (0, 0, frozenset())
    assert (idle.sm_clock_hz, idle.memory_clock_hz) == (345_000_000, 1_593_000_000)
    seen.machine.set_gpu(0, slowdown=0x40 | 0x8 | 0x1, loads=[[time.time() - 100, 50]])
    busy = seen.source.read(seen.gpu, ()).meters
    # 50 s of work: 70 W for 100 s, and 560 W in addition; 18 links.
    assert busy.energy_j == pytest.approx(7000 + 28000, rel=0.01)
    assert busy.nvlink_sent_bytes == pytest.approx(50 * 18 * 1024 * 10**6, rel=0.01)
    assert busy.pcie_sent_bytes == pytest.approx(50 * 10**9, rel=0.01)
    assert busy.throttles == {"hw_slowdown", "hw_thermal_slowdown"}


def unknown(values):
    return {name for name in values.__slots__ if getattr(values, name) is None}


@pytest.mark.parametrize(
    ("function", "code", "missing"),
    [
        ("nvmlDeviceGetTotalEnergyConsumption", "UNKNOWN", {"energy_j"}),
        ("nvmlDeviceGetClockInfo", "UNKNOWN", {"sm_clock_hz", "memory_clock_hz"}),
        ("nvmlDeviceGetCurrentClocks*", "UNKNOWN", {"throttles"}),
        (
            "nvmlDeviceGetFieldValues",
            "UNKNOWN",
            {name for name in GpuMeters.__slots__ if name.endswith("_bytes")},
        ),
        ("nvmlDeviceGetMemoryInfo*", "UNKNOWN", {"memory_used_bytes", "memory_total_bytes"}),
        ("nvmlDeviceGetUtilizationRates", "NOT_SUPPORTED", {"utilisation_percent"}),
        ("nvmlDeviceGetTemperature*", "UNKNOWN", {"temperature_c"}),
        ("nvmlDeviceGetPowerUsage", "NO_PERMISSION", {"power_w"}),
        ("nvmlDeviceGetEnforcedPowerLimit", "NOT_SUPPORTED", {"power_limit_w"}),
    ],
)
def test_failing_call_costs_its_value_only(seen, function, code, missing):
    seen.machine.set_fault(function, code=code)
    use = seen.source.read(seen.gpu, ())
    assert unknown(use.load) | unknown(use.meters) == missing


def test_gpu_without_nvlink_or_pcie_counters_has_no_traffic(machine):
    seen = Watched(machine("t4-4"), cut=False)
    meters = seen.source.read(seen.gpu, ()).meters
    assert unknown(meters) == {
        "nvlink_sent_bytes", "nvlink_received_bytes", "pcie_sent_bytes", "pcie_received_bytes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("holders", "code", "expected"),
    [
        ({"python3": 70, "idle": 0}, None, {"python3": 70, "idle": 0}),
        ({"idle": 0}, None, {"idle": 0}),
        ({"python3": 70}, pynvml.NVML_ERROR_NOT_FOUND, {"python3": None}),
        ({"python3": 70}, pynvml.NVML_ERROR_NOT_SUPPORTED, {"python3": None}),
        ({"python3": 70}, pynvml.NVML_ERROR_NO_PERMISSION, {"python3": None}),
        ({"python3": 70, "rubbish": 2147483632}, None, {"python3": 70, "rubbish": None}),
        ({"idle": 0, "rubbish": 2147483632}, None, {"idle": None, "rubbish": None}),
        ({"nvidia-cuda-mps-server": 70, "idle": 0}, None, {"nvidia-cuda-mps-server": 70, "idle": None}),
    ],
)
def test_process_is_idle_only_if_the_samples_of_its_gpu_show_it(seen, holders, code, expected):
    for pid, (name, percent) in enumerate(holders.items(), start=1):
        seen.machine.hold_gpu(0, pid, name, utilisation=percent)
    if code is not None:
        seen.machine.set_fault("nvmlDeviceGetProcessUtilization", code=code)
    processes = seen.source.read(seen.gpu, ()).processes
    assert {process.name: process.utilisation_percent for process in processes} == expected


def test_client_of_mps_without_a_sample_is_not_idle(seen):
    seen.machine.hold_gpu(0, 1, "nvidia-cuda-mps-server", utilisation=0)
    seen.machine.hold_gpu(0, 2, "python3", mps=True, utilisation=80)
    assert {process.utilisation_percent for process in seen.source.read(seen.gpu, ()).processes} == {None}


def test_mig_device_is_as_busy_as_between_two_checks(watched):
    busy, idle = watched.cut(0), watched.cut(1)
    watched.machine.hold_gpu(0, 4711, "python3", gpu_instance=busy.gpu_instance_id, utilisation=90)
    unknown = GpuLoad(512 << 20, MEMORY, None)
    assert watched.look(busy, idle) == {busy.uuid: unknown, idle.uuid: GpuLoad(0, MEMORY, None)}
    assert watched.look(busy, idle) == {
        busy.uuid: GpuLoad(512 << 20, MEMORY, 90), idle.uuid: GpuLoad(0, MEMORY, 0),
    }  # fmt: skip
    watched.machine.release_gpu(0)
    assert watched.percent(busy) == 45


def test_two_checks_at_once_have_the_same_value(watched):
    device = watched.cut()
    watched.machine.hold_gpu(0, 1, "python3", gpu_instance=device.gpu_instance_id, utilisation=60)
    assert [watched.percent(device), watched.percent(device)] == [None, 60]
    watched.machine.release_gpu(0)
    watched.now -= 29.5
    assert watched.percent(device) == 60


def test_instance_with_the_ids_of_an_earlier_one_starts_over(watched):
    first = watched.cut()
    assert [watched.percent(first), watched.percent(first)] == [None, 0]
    watched.machine.destroy_mig(0, first.gpu_instance_id)
    second = watched.cut()
    assert second[1:] == first[1:]
    assert watched.look(first) == {}  # another one is in its place
    assert [watched.percent(second), watched.percent(second)] == [None, 0]


def test_two_samples_that_do_not_belong_together_are_not_utilisation(watched):
    device = watched.cut()
    assert watched.percent(device) is None
    # Created between the read of the UUID and the sample.
    watched.machine.destroy_mig(0, device.gpu_instance_id)
    other = watched.cut()
    samples = watched.source._samples[watched.gpu.uuid]
    samples[other.uuid] = samples.pop(device.uuid)
    assert watched.percent(other) is None


def test_samples_of_devices_that_no_one_requests_are_freed(watched):
    devices = [watched.cut(start) for start in range(3)]
    for _ in range(4):
        watched.look(*devices)
    assert watched.samples() == 3
    watched.machine.set_fault("nvmlGpmMigSampleGet", code="UNKNOWN")
    watched.look(*devices)
    assert watched.samples() == 3
    watched.machine.clear_faults()
    watched.look(devices[0])
    assert watched.samples() == 1


def test_samples_of_an_earlier_session_are_not_used(watched):
    device = watched.cut()
    assert [watched.percent(device), watched.percent(device)] == [None, 0]
    watched.node.session.reopen()
    assert [watched.percent(device), watched.percent(device)] == [None, 0]


@pytest.mark.parametrize(
    "fault", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet"]
)
def test_older_drivers_have_no_utilisation_of_mig_devices(watched, fault):
    device = watched.cut()
    watched.machine.set_fault(fault, code="FUNCTION_NOT_FOUND")
    assert [watched.percent(device), watched.percent(device)] == [None, None]


def test_gpus_before_hopper_have_no_utilisation_of_mig_devices(machine):
    a100 = Watched(machine("dgx-a100-40gb"))
    a100.machine.reboot()
    a100.node.session.reopen()
    a100.machine.set_mig_mode(0, on=True)
    device = a100.cut(profile="1g.5gb")
    found = [a100.look(device)[device.uuid] for _ in range(2)]
    assert found == [GpuLoad(0, 4864 << 20)] * 2


def test_processes_alone_are_read_without_loads_and_keep_the_samples(watched):
    busy = watched.cut(0)
    watched.machine.hold_gpu(0, 4711, "python3", gpu_instance=busy.gpu_instance_id, utilisation=90)
    assert watched.percent(busy) is None
    for refused in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage", "nvmlGpmMigSampleGet"):
        watched.machine.set_fault(refused, code="GPU_IS_LOST")
    use = watched.source.read_processes(watched.gpu)
    assert (use.load, use.mig, [one.pid for one in use.processes]) == (GpuLoad(), {}, [4711])
    watched.machine.clear_faults()
    assert (watched.samples(), watched.percent(busy)) == (1, 90)


def test_closed_session_is_not_an_idle_gpu(watched):
    watched.node.session.close()
    with pytest.raises(NvmlUnavailableError):
        watched.source.read(watched.gpu, ())


def test_older_drivers_count_what_they_keep_for_themselves(node):
    uuid = node.machine.gpu(0).uuid
    newer = read_load(uuid)
    node.machine.set_fault("nvmlDeviceGetMemoryInfo_v2", code="FUNCTION_NOT_FOUND")
    older = read_load(uuid)
    assert newer.memory_used_bytes == 0
    assert older.memory_used_bytes is not None
    assert older.memory_used_bytes > 0
    assert older.memory_total_bytes == newer.memory_total_bytes


def test_driver_that_goes_away_is_not_a_missing_value(node):
    uuid = node.machine.gpu(0).uuid
    node.machine.set_fault("nvmlDeviceGetTemperature*", code="UNINITIALIZED")
    with pytest.raises(NvmlUnavailableError):
        read_load(uuid)


def test_measure_has_the_samples_since_a_time_and_an_idle_gpu_counts_as_idle(seen):
    now = time.time()
    idle = seen.source.measure(seen.gpu, (), now - 10)
    assert [percent for _, percent in idle.busy] == [0, 0], "NVML keeps no samples of an idle GPU"
    seen.machine.set_gpu(0, loads=[[now - 100, 0], [now - 5, 80]])
    busy = seen.source.measure(seen.gpu, (), now - 10).busy
    assert [at for at, _ in busy] == sorted(at for at, _ in busy)
    assert {percent for at, percent in busy if at < now - 5.5} == {0}
    assert {percent for at, percent in busy if at > now - 4.5} == {80}
    assert min(at for at, _ in seen.source.measure(seen.gpu, (), now - 1000).busy) > now - 30, (
        "the buffer is full"
    )
    seen.machine.set_fault("nvmlDeviceGetSamples", code="NOT_SUPPORTED")
    assert seen.source.measure(seen.gpu, (), now - 10).busy is None


def test_gpu_whose_samples_are_gone_is_not_idle_while_it_works(seen):
    seen.machine.hold_gpu(0, 4711, "python3", utilisation=70)
    seen.machine.set_fault("nvmlDeviceGetSamples", code="NOT_FOUND")
    assert seen.source.measure(seen.gpu, (), time.time() - 10).busy is None
