"""Health of GPUs and MIG devices: observations, and the state derived from them. Times are seconds since
1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import FabricRegistration
from dra_driver.model.mig import MigDevice


class Severity(IntEnum):
    """From DEGRADED on, a device should get no new work; from UNHEALTHY on, running work is also affected."""

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
"""Names the file in errors and problems."""
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
"""Without the prefix."""


@dataclass(frozen=True, slots=True)
class HealthTarget:
    """A GPU, a GPU instance with all its compute instances, or one compute instance."""

    gpu_uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None

    @property
    def is_instance(self) -> bool:
        return self.gpu_instance_id is not None

    @property
    def order(self) -> tuple[str, int, int]:
        """Puts a GPU before its instances."""
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
    """For example `xid` `79`.

    `since` and `last_at` are the first and last evidence. `reset_seen`: the device was reset after that, so
    the next poll that finds it healthy ends the reason.
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
        return (self.key, self.value)


@dataclass(frozen=True, slots=True)
class NvLinks:
    """The numbers of the active links, in ascending order. GPUs with the same `product_name` have equally
    many.
    """

    up: tuple[int, ...]
    product_name: str | None = None
    to_switches: bool | None = None


@dataclass(frozen=True, slots=True)
class HealthState:
    """`reasons` are sorted by name.

    `ecc_uncorrected` is the volatile count at the last poll. `identity` has the UUIDs of an instance's MIG
    devices, because instance IDs are reused. `setbacks` are the times at which the device recently became
    bad; after too many, it stays tainted until `held_until`. `pci_bus_id` is where the GPU was last seen.
    `silent_polls` counts consecutive polls without a successful live query, up to a limit. `nvlinks` has all
    links that have been up since the boot.
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
        return max((reason.severity for reason in self.reasons), default=Severity.OK)

    def has(self, key: str) -> bool:
        return any(reason.key == key for reason in self.reasons)

    @property
    def shown(self) -> tuple[tuple[str, str, int, int, str], ...]:
        """What is published: changes when taints or messages change."""
        return tuple(
            (reason.key, reason.value, int(reason.severity), reason.since, reason.text)
            for reason in self.reasons
        )


@dataclass(frozen=True, slots=True)
class PolledHealth:
    """A value is None if the query is not supported, was skipped or failed.

    `failed` names failed queries by the value that they read; the query `remap_pending` reads `remap_failed`
    too. `answered` is False if no query that needs the GPU itself succeeded, and at least one failed: values
    that the kernel driver has cached prove nothing then.

    `recovery_action` is NVML's number. `fabric_registration` is valid only with `fabric`. `slowdowns`:
    `thermal`, `power`, `hardware`. The next reset repairs `repairs_pending`: `channel`, `tpc`. `pcie_narrow`
    and `pcie_slow` compare with what GPU and machine support; an idle GPU lowers the generation on purpose,
    so `pcie_slow` is None if the GPU may be idle. `nvlinks` is None in MIG mode too. `nvlink_errors` are
    counts of `recovery`, `replay`, `crc`. `equal_nvlinks` is how many links an identical GPU of the machine
    has had up since the boot. With confidential computing, `accepts_work` is False until the GPUs are set to
    the ready state.
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
    """`reports_action`: the NVIDIA driver also reports a recovery action for this GPU."""

    number: int
    reports_action: bool = True


@dataclass(frozen=True, slots=True)
class DoubleBitError:
    """The NVIDIA driver reported an uncorrectable memory error."""


@dataclass(frozen=True, slots=True)
class PollResult:
    polled: PolledHealth


@dataclass(frozen=True, slots=True)
class Unreachable:
    """NVML reported that the GPU is lost."""


@dataclass(frozen=True, slots=True)
class MonitoringState:
    """`problem` says why the plugin gets no events of the GPU."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Hanging:
    """An operation of this plugin on the GPU has not ended for `for_s` seconds."""

    what: str | None = None
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A call to NVML about the GPU has not ended for `for_s` seconds."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Reset:
    """A reboot, a reload of the NVIDIA driver, or a reset of the GPU."""


@dataclass(frozen=True, slots=True)
class Serviced:
    """An administrator reported a reset or a replacement before `at`."""

    at: int


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """The UUIDs of the MIG devices that now have the IDs of an instance."""

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
    """`gpu_uuid` is None if NVML could not identify the GPU; both instance IDs are None for the whole GPU. An
    event without `observation` only requires a poll.
    """

    gpu_uuid: str | None
    observation: Xid | DoubleBitError | None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


@dataclass(frozen=True, slots=True)
class HealthChange:
    """`at` is the last of `times` repetitions.

    `is_gone`: the GPU's state is forgotten. `is_hang`: the GPU does not respond; users are notified even if
    the severity is the same.
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
    """Return `unknown` if no poll is recent, whatever the earlier state."""
    if not is_fresh:
        return "unknown"
    words: tuple[Condition, ...] = ("ok", "information", "degraded", "unhealthy", "lost")
    return "ok" if state is None else words[state.severity]


def targets_of_mig(mig: MigDevice) -> tuple[HealthTarget, ...]:
    """Return all targets whose reasons affect the device."""
    return targets_of_instance(mig.parent_uuid, mig.gpu_instance_id, mig.compute_instance_id)


def targets_of_instance(gpu_uuid: str, gi: int, ci: int) -> tuple[HealthTarget, ...]:
    return (HealthTarget(gpu_uuid), HealthTarget(gpu_uuid, gi), HealthTarget(gpu_uuid, gi, ci))


def identity_of(instance: HealthTarget, mig_uuids: Mapping[tuple[int, int], str]) -> str | None:
    """Return the UUIDs of an instance's MIG devices, joined by commas. `mig_uuids` has those of the GPU by
    instance IDs.
    """
    found = sorted(
        uuid
        for (gi, ci), uuid in mig_uuids.items()
        if gi == instance.gpu_instance_id and instance.compute_instance_id in (None, ci)
    )
    return ",".join(found) or None


HealthStates = Mapping[HealthTarget, HealthState]
