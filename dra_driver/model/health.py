"""Health of GPUs and MIG devices: what was observed, and what is known from it. Times are whole seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from dra_driver.model.mig import MigDevice


class Severity(IntEnum):
    """How bad it is. From DEGRADED on no new work should come; from UNHEALTHY on running work is hit too."""

    OK = 0
    INFORMATION = 1
    DEGRADED = 2
    UNHEALTHY = 3
    LOST = 4


Condition = Literal["ok", "information", "degraded", "unhealthy", "lost", "unknown"]
Source = Literal["event", "poll"]
FabricState = Literal["absent", "pending", "ready", "limited", "broken"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A physical GPU, or instances of one: a GPU instance with all in it, or one compute instance."""

    gpu_uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None

    @property
    def is_instance(self) -> bool:
        """Whether it is a part of a GPU."""
        return self.gpu_instance_id is not None

    @property
    def order(self) -> tuple[str, int, int]:
        """A GPU before its instances."""
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

    `last_at` is when there was evidence last, `since` when there was first. `reset_seen` says that the
    device was reset after that, so only the next look at it is missing.
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
        """What tells two reasons of one device apart."""
        return (self.key, self.value)


@dataclass(frozen=True, slots=True)
class HealthState:
    """All that is known of one subject; `reasons` in the order of their names.

    `ecc_uncorrected` is the driver's volatile count when last looked at. `identity` is the UUID (several
    joined by commas) of the MIG devices of an instance, because instance IDs are used again. `setbacks` are
    the times at which the device went bad lately; `held_until` is how long it is kept back for that.
    """

    subject: Subject
    reasons: tuple[Reason, ...] = ()
    ecc_uncorrected: int | None = None
    identity: str | None = None
    setbacks: tuple[int, ...] = ()
    held_until: int | None = None

    @property
    def severity(self) -> Severity:
        """The worst of all active reasons."""
        return max((reason.severity for reason in self.reasons), default=Severity.OK)

    @property
    def shown(self) -> tuple[tuple[str, str, int, int, str], ...]:
        """What others see of the reasons: differs when taints or messages do."""
        return tuple(
            (reason.key, reason.value, int(reason.severity), reason.since, reason.text)
            for reason in self.reasons
        )


@dataclass(frozen=True, slots=True)
class Signals:
    """What one look at a GPU told; None is what the GPU or its driver does not tell.

    `recovery_action` is NVML's number. `fabric_text` says what is wrong with the fabric. `slowdowns` are the
    causes for which the hardware holds its clocks down: `thermal`, `power`, `hardware`.
    """

    recovery_action: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_pending: bool | None = None
    ecc_uncorrected: int | None = None
    fabric: FabricState | None = None
    fabric_text: str = ""
    slowdowns: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Xid:
    """The driver reported an Xid."""

    number: int


@dataclass(frozen=True, slots=True)
class DoubleBitError:
    """The driver reported an uncorrectable memory error."""


@dataclass(frozen=True, slots=True)
class Look:
    """The GPU answered."""

    signals: Signals


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The GPU does not answer."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Whether events of the GPU are heard; `problem` says why not."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """The device was made anew: reboot, driver reload, reset."""


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """Which MIG devices stand behind the IDs of an instance now; None where there are none any more."""

    identity: str | None


Observation = Xid | DoubleBitError | Look | Unreachable | Watched | Reset | InstanceSeen


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """What NVML's event set delivered. `gpu_uuid` is None where NVML could not tell the GPU any more; both
    instance IDs are None for the whole GPU. `observation` is None for an event that only calls for a look."""

    gpu_uuid: str | None
    observation: Xid | DoubleBitError | None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


@dataclass(frozen=True, slots=True)
class HealthChange:
    """An entry of a device's history; `times` counts repetitions of the same, `at` is the last of them."""

    subject: Subject
    at: int
    before: Severity
    after: Severity
    text: str
    times: int = 1


def condition(state: HealthState | None, *, is_fresh: bool) -> Condition:
    """One word for a device. Without a recent look at it nothing is known, whatever was known before."""
    if not is_fresh:
        return "unknown"
    words: tuple[Condition, ...] = ("ok", "information", "degraded", "unhealthy", "lost")
    return "ok" if state is None else words[state.severity]


def subjects_of_mig(mig: MigDevice) -> tuple[Subject, ...]:
    """All subjects whose reasons hit a MIG device: its GPU, its GPU instance, itself."""
    return subjects_of_instance(mig.parent_uuid, mig.gpu_instance_id, mig.compute_instance_id)


def subjects_of_instance(gpu_uuid: str, gi: int, ci: int) -> tuple[Subject, ...]:
    """As `subjects_of_mig`, by IDs."""
    return (Subject(gpu_uuid), Subject(gpu_uuid, gi), Subject(gpu_uuid, gi, ci))


def identity_of(instance: Subject, mig_uuids: Mapping[tuple[int, int], str]) -> str | None:
    """The MIG devices behind an instance, of all of its GPU by GPU and compute instance ID; None if none."""
    found = sorted(
        uuid
        for (gi, ci), uuid in mig_uuids.items()
        if gi == instance.gpu_instance_id and instance.compute_instance_id in (None, ci)
    )
    return ",".join(found) or None


HealthStates = Mapping[Subject, HealthState]
