"""What a claim's CDI spec tells of the claim: all that is known where its record was lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dra_driver.cdi.rules.mps_edits import uses_mps
from dra_driver.cdi.rules.spec import ADMIN_ACCESS
from dra_driver.model.plan import device_of_cdi_name, share_of_cdi_name


@dataclass(frozen=True, slots=True)
class SpecDevice:
    """One device of a spec. `share_id` is None for a device that the claim has to itself."""

    device: str
    share_id: str | None = None
    admin_access: bool = False
    uses_mps: bool = False


def devices_of(claim_uid: str, spec: Mapping[str, Any] | None) -> tuple[SpecDevice, ...]:
    """The devices of a claim's spec, as far as it can be read."""
    devices = (spec or {}).get("devices")
    return tuple(
        _device(str(entry["name"]).removeprefix(f"{claim_uid}-"), entry)
        for entry in (devices if isinstance(devices, list) else ())
        if isinstance(entry, dict) and "name" in entry
    )


def _device(name: str, entry: Mapping[str, Any]) -> SpecDevice:
    edits = entry.get("containerEdits")
    env = edits.get("env") if isinstance(edits, dict) else None
    return SpecDevice(
        device_of_cdi_name(name),
        share_of_cdi_name(name),
        ADMIN_ACCESS in (env or ()),
        isinstance(edits, dict) and uses_mps({"devices": [entry]}),
    )
