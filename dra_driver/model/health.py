"""Health of GPUs and MIG devices: what the plugin observed, and what follows from it. Times are whole seconds since
1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from dra_driver.model.gpu import FabricRegistration
from dra_driver.model.mig import MigDevice


class Severity(IntEnum):
    """How bad the state is. From DEGRADED on, the device should get no new work; from UNHEALTHY on, running work
    suffers too."""

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
"""The possible keys of taints, without the prefix."""


@dataclass(frozen=True, slots=True)
class HealthTarget:
    """A physical GPU, or a part of one: a GPU instance with everything in it, or one compute instance."""

    gpu_uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None

    @property
    def is_instance(self) -> bool:
        """Whether it is a part of a GPU."""
        return self.gpu_instance_id is not None

    @property
    def order(self) -> tuple[str, int, int]:
        """Sorts a GPU before its instances."""
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
    """Why a device is not well. `key` and `value` name it (`xid` `79`, `row-remap` `pending`).

    `since` is the time of the first evidence, `last_at` of the last. `reset_seen` says that the device was reset after
    that: the reason then ends with the next poll that finds the device well.
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
        """The identity of the reason among the reasons of its device."""
        return (self.key, self.value)


@dataclass(frozen=True, slots=True)
class NvLinks:
    """The NVLinks of a GPU: the numbers of those that are up, in ascending order.

    GPUs with an equal `product_name` have equally many. `to_switches` says whether the links lead to NVSwitches; None
    while no link is up, or where the NVIDIA driver does not report it.
    """

    up: tuple[int, ...]
    product_name: str | None = None
    to_switches: bool | None = None


@dataclass(frozen=True, slots=True)
class HealthState:
    """All that is known of one target; `reasons` in the order of their names.

    `ecc_uncorrected` is the NVIDIA driver's volatile count at the last poll. `identity` is the UUID (several
    joined by commas) of the MIG devices of an instance, because instance IDs are used again. `setbacks` are the times
    at which the device became bad lately; because of them it is not offered until `held_until`. `pci_bus_id` is where a
    GPU was last seen: a lost one is watched as long as it is on the bus. `silent_polls` counts the polls in a row that
    no live query of the GPU answered. `nvlinks` has all links that were up since the boot, `nvlink_errors` the counts
    of errors when they were read last.
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
        """The worst of all active reasons."""
        return max((reason.severity for reason in self.reasons), default=Severity.OK)

    def has(self, key: str) -> bool:
        """Whether a reason with this key is active."""
        return any(reason.key == key for reason in self.reasons)

    @property
    def shown(self) -> tuple[tuple[str, str, int, int, str], ...]:
        """What others see of the reasons; it changes when taints or messages change."""
        return tuple(
            (reason.key, reason.value, int(reason.severity), reason.since, reason.text)
            for reason in self.reasons
        )


@dataclass(frozen=True, slots=True)
class PolledHealth:
    """The result of one poll of a GPU. A value is None if the GPU or the NVIDIA driver does not support its query, if
    this poll did not make it, or if the query failed: then its name is in `failed`.

    `failed` names queries by the value that they read, for example `recovery_action`; that of `remap_pending` reads
    `remap_failed` too.
    `answered` is False if no query that only the GPU itself can answer succeeded, and at least one failed: the GPU is
    silent, and the values that the kernel driver knows by itself prove nothing.
    `recovery_action` is NVML's number. `fabric_text` says what is wrong with the fabric; `fabric_registration` says
    nothing unless `fabric` is told. `slowdowns` are the causes for which the hardware holds its clocks down: `thermal`,
    `power`, `hardware`.
    `sram_exceeded` says that the SRAM has had more errors than NVIDIA allows. `repairs_pending` are the parts that the
    next reset repairs: `channel`, `tpc`. `pcie_narrow` and `pcie_slow` say that the PCIe link has fewer lanes, or a
    lower generation, than the GPU and the machine can; the generation is None while the GPU may be at rest, when it is
    lower on purpose.
    `nvlinks` is None in MIG mode too, in which no link is up. `nvlink_errors` are counts by kind: `recovery`, `replay`,
    `crc`. `equal_nvlinks` is how many links an equal GPU of the machine has had up since the boot, None without one.
    `accepts_work` is False on a node with confidential computing until somebody sets the ready state of its GPUs.
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
    pcie_narrow: bool | None = None
    pcie_slow: bool | None = None
    nvlinks: NvLinks | None = None
    nvlink_errors: Mapping[str, int] | None = None
    equal_nvlinks: int | None = None
    failed: frozenset[str] = frozenset()
    answered: bool = True


@dataclass(frozen=True, slots=True)
class Xid:
    """The NVIDIA driver reported an Xid. `reports_action` says whether it reports a recovery action for this GPU."""

    number: int
    reports_action: bool = True


@dataclass(frozen=True, slots=True)
class DoubleBitError:
    """The NVIDIA driver reported an uncorrectable memory error."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """The GPU answered."""

    polled: PolledHealth


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The GPU does not answer."""


@dataclass(frozen=True, slots=True)
class MonitoringState:
    """Whether the plugin gets events of the GPU; `problem` says why not."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Hanging:
    """An operation of this plugin on the GPU has not ended for `for_s` seconds; `what` it is, None if none hangs."""

    what: str | None = None
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A poll of the GPU has not returned for `for_s` seconds."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Reset:
    """The device was reset: by a reboot, a reload of the NVIDIA driver, or a reset of the GPU."""


@dataclass(frozen=True, slots=True)
class Serviced:
    """An administrator said that the device was reset or replaced before `at`."""

    at: int


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """The MIG devices that the IDs of an instance mean now; None if there are none any more."""

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
    """An event from NVML's event set. `gpu_uuid` is None if NVML could not tell the GPU any more; both instance IDs are
    None for the whole GPU. `observation` is None for an event after which the plugin only needs to poll."""

    gpu_uuid: str | None
    observation: Xid | DoubleBitError | None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


@dataclass(frozen=True, slots=True)
class HealthChange:
    """An entry of a device's history; `times` counts how often the same happened, `at` is the last time. `is_gone` says
    that the GPU was taken out, and what was known of it is forgotten. `is_hang` says that the GPU became unresponsive,
    or is so for long: users hear of that even if the GPU was as bad before."""

    target: HealthTarget
    at: int
    before: Severity
    after: Severity
    text: str
    times: int = 1
    is_gone: bool = False
    is_hang: bool = False


def condition(state: HealthState | None, *, is_fresh: bool) -> Condition:
    """One word for a device's health. Without a recent poll it is `unknown`, whatever was known before."""
    if not is_fresh:
        return "unknown"
    words: tuple[Condition, ...] = ("ok", "information", "degraded", "unhealthy", "lost")
    return "ok" if state is None else words[state.severity]


def targets_of_mig(mig: MigDevice) -> tuple[HealthTarget, ...]:
    """All targets whose reasons affect a MIG device: its GPU, its GPU instance, the device itself."""
    return targets_of_instance(mig.parent_uuid, mig.gpu_instance_id, mig.compute_instance_id)


def targets_of_instance(gpu_uuid: str, gi: int, ci: int) -> tuple[HealthTarget, ...]:
    """As `targets_of_mig`, by IDs."""
    return (HealthTarget(gpu_uuid), HealthTarget(gpu_uuid, gi), HealthTarget(gpu_uuid, gi, ci))


def identity_of(instance: HealthTarget, mig_uuids: Mapping[tuple[int, int], str]) -> str | None:
    """The UUIDs of the MIG devices of an instance, joined by commas; None if there are none.

    `mig_uuids` has all MIG devices of its GPU by GPU instance ID and compute instance ID.
    """
    found = sorted(
        uuid
        for (gi, ci), uuid in mig_uuids.items()
        if gi == instance.gpu_instance_id and instance.compute_instance_id in (None, ci)
    )
    return ",".join(found) or None


HealthStates = Mapping[HealthTarget, HealthState]
