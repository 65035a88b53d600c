"""Health of GPUs and MIG devices: observations, and the state derived from them. Times are whole seconds
since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import FabricRegistration
from dra_driver.model.mig import MigDevice


class Severity(IntEnum):
    """How bad a health state is. From DEGRADED on, the device should get no new work; from UNHEALTHY on, running
    work is also affected.
    """

    OK = 0
    INFORMATION = 1
    DEGRADED = 2
    UNHEALTHY = 3
    LOST = 4


Condition = Literal["ok", "information", "degraded", "unhealthy", "lost", "unknown"]
Source = Literal["event", "poll"]
FabricState = Literal["absent", "pending", "ready", "limited", "broken"]

LOST = "gpu-lost"
UNMONITORED = "unmonitored"
UNRESPONSIVE = "unresponsive"
HEALTH_FILE = "health file"
"""The file with the saved health, in errors and problems."""
TAINTED_KEYS = (
    "bank-remap",
    "confidential-compute",
    "ecc",
    "fabric",
    "flapping",
    LOST,
    "memory",
    "nvlink",
    "page-retirement",
    "recovery-action",
    "repair",
    "row-remap",
    "sram",
    UNMONITORED,
    UNRESPONSIVE,
    "xid",
)
"""All keys of health taints, without the prefix."""


@dataclass(frozen=True, slots=True)
class HealthTarget:
    """A physical GPU, or a part of one: a GPU instance with all its compute instances, or one compute
    instance.
    """

    gpu_uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None

    @property
    def is_instance(self) -> bool:
        """Whether the target is only a part of a GPU."""
        return self.gpu_instance_id is not None

    @property
    def order(self) -> tuple[str, int, int]:
        """A sort key that puts a GPU before its instances."""
        gi, ci = self.gpu_instance_id, self.compute_instance_id
        return (self.gpu_uuid, -1 if gi is None else gi, -1 if ci is None else ci)

    def __str__(self) -> str:
        parts = [f"GPU {self.gpu_uuid}"]
        if self.gpu_instance_id is not None:
            parts.append(f"GPU instance {self.gpu_instance_id}")
        if self.compute_instance_id is not None:
            parts.append(f"compute instance {self.compute_instance_id}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a device is not healthy. `key` and `value` identify the reason (`xid` `79`, `row-remap` `pending`).

    `since` is the time of the first evidence, `last_at` of the last. `reset_seen` is set if the device was
    reset after the last evidence: the next poll that finds the device healthy then ends the reason.
    """

    key: str
    value: str
    severity: Severity
    since: int
    last_at: int
    text: str
    source: Source = "event"
    reset_seen: bool = False

    @property
    def name(self) -> tuple[str, str]:
        """Identifies the reason among the reasons of its device."""
        return (self.key, self.value)


@dataclass(frozen=True, slots=True)
class NvLinks:
    """The NVLinks of a GPU: the numbers of the active links, in ascending order.

    GPUs with the same `product_name` have the same number of links. `to_switches` is whether the links lead
    to NVSwitches; None if no link is up or the NVIDIA driver does not report it.
    """

    up: tuple[int, ...]
    product_name: str | None = None
    to_switches: bool | None = None


@dataclass(frozen=True, slots=True)
class HealthState:
    """Everything known about one target; `reasons` are sorted by name.

    `ecc_uncorrected` is the NVIDIA driver's volatile count at the last poll. `identity` is the UUID (or
    several joined by commas) of the MIG devices of an instance, because instance IDs are reused. `setbacks`
    are the times at which the device recently became bad; if there are too many, the device stays tainted until
    `held_until`. `pci_bus_id` is where the GPU was last seen: a lost GPU is monitored while it is on the bus.
    `silent_polls` counts consecutive polls in which no live query succeeded, up to a limit. `nvlinks` has all links
    that have been up since the boot, `nvlink_errors` the error counts of the last reading.
    """

    target: HealthTarget
    reasons: tuple[Reason, ...] = ()
    ecc_uncorrected: int | None = None
    identity: str | None = None
    setbacks: tuple[int, ...] = ()
    held_until: int | None = None
    pci_bus_id: str | None = None
    silent_polls: int = 0
    nvlinks: NvLinks | None = None
    nvlink_errors: Mapping[str, int] | None = None

    @property
    def severity(self) -> Severity:
        """The worst severity of all active reasons."""
        return max((reason.severity for reason in self.reasons), default=Severity.OK)

    def has(self, key: str) -> bool:
        """Whether a reason with this key is active."""
        return any(reason.key == key for reason in self.reasons)

    @property
    def shown(self) -> tuple[tuple[str, str, int, int, str], ...]:
        """The published view of the reasons; it changes when taints or messages change."""
        return tuple(
            (reason.key, reason.value, int(reason.severity), reason.since, reason.text)
            for reason in self.reasons
        )


@dataclass(frozen=True, slots=True)
class PolledHealth:
    """The result of one poll of a GPU.

    A value is None if the GPU or NVIDIA driver does not support the query, if this poll skipped it, or if the
    query failed. `failed` names failed queries by the value that they read, for example `recovery_action`;
    the query `remap_pending` reads `remap_failed` too. `answered` is False if no query that needs the GPU itself
    succeeded, and at least one failed: the GPU is silent, and values that the kernel driver has cached prove
    nothing. `recovery_action` is NVML's number. `fabric_text` describes what is wrong with the fabric;
    `fabric_registration` is valid only if `fabric` is not None. `slowdowns` are the reasons why the
    hardware reduces clocks: `thermal`, `power`, `hardware`. `sram_exceeded`: SRAM errors exceed NVIDIA's
    limit. `repairs_pending` are the parts that the next reset repairs: `channel`, `tpc`. `pcie_narrow` and
    `pcie_slow`: the PCIe link has fewer lanes, or a lower generation, than the GPU and the machine support.
    `pcie_slow` is None if the GPU may be idle, because an idle GPU lowers the generation on purpose. `nvlinks` is
    also None in MIG mode, in which no link is up. `nvlink_errors` are counts by kind: `recovery`, `replay`, `crc`.
    `equal_nvlinks` is the number of links that an identical GPU of the machine has had up since the boot,
    None without such a GPU. `accepts_work` is False on a node with confidential computing until its GPUs are
    set to the ready state. `power_limit_mw` is the power limit that is set, in milliwatts.
    """

    recovery_action: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_pending: bool | None = None
    ecc_uncorrected: int | None = None
    fabric: FabricState | None = None
    fabric_text: str = ""
    slowdowns: frozenset[str] | None = None
    fabric_registration: FabricRegistration = None
    accepts_work: bool | None = None
    sram_exceeded: bool | None = None
    memory_unrepairable: bool | None = None
    bank_remap_pending: bool | None = None
    repairs_pending: frozenset[str] | None = None
    power_limit_mw: int | None = None
    pcie_narrow: bool | None = None
    pcie_slow: bool | None = None
    nvlinks: NvLinks | None = None
    nvlink_errors: Mapping[str, int] | None = None
    equal_nvlinks: int | None = None
    failed: frozenset[str] = frozenset()
    answered: bool = True


@dataclass(frozen=True, slots=True)
class Xid:
    """The NVIDIA driver reported an Xid. `reports_action` is whether it also reports a recovery action for
    this GPU.
    """

    number: int
    reports_action: bool = True


@dataclass(frozen=True, slots=True)
class DoubleBitError:
    """The NVIDIA driver reported an uncorrectable memory error."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """A poll returned. `polled.answered` says whether the GPU itself answered."""

    polled: PolledHealth


@dataclass(frozen=True, slots=True)
class Unreachable:
    """NVML reported that the GPU is lost."""


@dataclass(frozen=True, slots=True)
class MonitoringState:
    """Whether the plugin receives events of the GPU. `problem` says why it does not; None if it does."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Hanging:
    """An operation of this plugin on the GPU has been running for `for_s` seconds. `what` describes the
    operation; None if none is running.
    """

    what: str | None = None
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """NVML has not answered about the GPU for `for_s` seconds, because a call hangs."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Reset:
    """The device was reset: by a reboot, a reload of the NVIDIA driver, or a reset of the GPU."""


@dataclass(frozen=True, slots=True)
class Serviced:
    """An administrator reported that the device was reset or replaced before `at`."""

    at: int


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """The UUIDs of the MIG devices that currently have the IDs of an instance; None if no MIG device has them."""

    identity: str | None


Observation = (
    Xid
    | DoubleBitError
    | PollResult
    | Unreachable
    | NoAnswer
    | MonitoringState
    | Hanging
    | Reset
    | Serviced
    | InstanceSeen
)


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """An event from NVML's event set.

    `gpu_uuid` is None if NVML could no longer identify the GPU; both instance IDs are None for the whole GPU.
    `observation` is None for an event that only requires a poll.
    """

    gpu_uuid: str | None
    observation: Xid | DoubleBitError | None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


@dataclass(frozen=True, slots=True)
class HealthChange:
    """An entry of a device's history; `times` counts repetitions, `at` is the time of the last one.

    `is_gone`: the GPU was removed, and its state is forgotten. `is_hang`: the GPU became unresponsive, or has
    been unresponsive for a long time; users are notified even if the severity did not change.
    """

    target: HealthTarget
    at: int
    before: Severity
    after: Severity
    text: str
    times: int = 1
    is_gone: bool = False
    is_hang: bool = False


def condition(state: HealthState | None, *, is_fresh: bool) -> Condition:
    """Return one word for a device's health; `unknown` if no poll is recent, whatever the earlier state."""
    if not is_fresh:
        return "unknown"
    words: tuple[Condition, ...] = ("ok", "information", "degraded", "unhealthy", "lost")
    return "ok" if state is None else words[state.severity]


def targets_of_mig(mig: MigDevice) -> tuple[HealthTarget, ...]:
    """Return all targets whose reasons affect a MIG device: its GPU, its GPU instance, and the device
    itself.
    """
    return targets_of_instance(mig.parent_uuid, mig.gpu_instance_id, mig.compute_instance_id)


def targets_of_instance(gpu_uuid: str, gi: int, ci: int) -> tuple[HealthTarget, ...]:
    """Like `targets_of_mig`, by IDs."""
    return (HealthTarget(gpu_uuid), HealthTarget(gpu_uuid, gi), HealthTarget(gpu_uuid, gi, ci))


def identity_of(instance: HealthTarget, mig_uuids: Mapping[tuple[int, int], str]) -> str | None:
    """Return the UUIDs of the MIG devices of an instance, joined by commas; None if the instance has none.

    `mig_uuids` has all MIG devices of its GPU by GPU instance ID and compute instance ID.
    """
    found = sorted(
        uuid
        for (gi, ci), uuid in mig_uuids.items()
        if gi == instance.gpu_instance_id and instance.compute_instance_id in (None, ci)
    )
    return ",".join(found) or None


HealthStates = Mapping[HealthTarget, HealthState]
