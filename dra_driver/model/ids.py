"""Names and identifiers of GPUs and MIG devices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from dra_driver.errors import InvalidConfigError
from dra_driver.model.mig import MigDevice, MigProfile, Placement

_NVML_BUS_ID = re.compile(r"^(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])\Z")
_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_UID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,126}[A-Za-z0-9])?")
_GPU_NAME = re.compile(r"gpu-([0-9a-z]+)(?:-mig-.*)?\Z")
PLAIN_NAME = r"[0-9A-Za-z_./@%+=-]+"
"""A name that needs no quotation marks; valid for Python and RE2."""
_SHORTEST_UUID_PART = 8
_WHOLE_UUID = 32
_UUID_PART_STEP = 4


def printable(text: str) -> str:
    """Replace characters that could control the terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def one_line(text: str, most_bytes: int) -> str:
    """Collapse white space, and truncate to `most_bytes` bytes of valid UTF-8."""
    line = " ".join(text.split()).encode(errors="replace")
    if len(line) > most_bytes:
        mark = "…".encode()
        line = line[: most_bytes - len(mark)] + mark
    return line.decode(errors="ignore")


def quoted(name: object) -> str:
    """Return an external name for a message, quoted if it has unusual characters."""
    text = str(name)
    return text if re.fullmatch(PLAIN_NAME, text) else printable(json.dumps(text, ensure_ascii=False))


def pci_bus_id(text: str) -> str:
    """Return the sysfs form: `00000000:1B:00.0` becomes `0000:1b:00.0`. Raises: ValueError.

    NVML writes eight domain digits, the kernel as many as needed, at least four.
    """
    match = _NVML_BUS_ID.match(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a PCI bus ID; expected the form 0000:1b:00.0")
    domain = int(match[1] or "0", 16)
    return f"{domain:04x}:{match[2]}:{match[3]}.{match[4]}"


def gpu_device_names(uuids: Iterable[str]) -> Mapping[str, str]:
    """Return a name for each GPU UUID: `{"GPU-4cf8db2d-06c0-…": "gpu-4cf8db2d"}`.

    The index and the minor number change when a card is drained, so names do not use them. Names that would
    collide are longer.
    """
    digits = {uuid: _hex_digits(uuid) for uuid in uuids}
    return {uuid: f"gpu-{_shortest_unique(uuid, digits)}" for uuid in digits}


def gpu_minor_names(minors: Mapping[str, int | None], kept: Mapping[str, str]) -> Mapping[str, str]:
    """Return names by minor number, as NVIDIA's DRA driver does: `{"GPU-4cf8db2d-…": "gpu-0"}`.

    GPUs in `kept` keep their names. If the number is unknown or the name in use, the name has all digits of
    the UUID.
    """
    names: dict[str, str] = {}
    taken = {name for uuid, name in kept.items() if uuid not in minors}
    for uuid in sorted(minors, key=lambda uuid: uuid not in kept):
        name = kept.get(uuid, f"gpu-{minors[uuid]}")
        names[uuid] = f"gpu-{_hex_digits(uuid)}" if name in {"gpu-None", *taken} else name
        taken.add(names[uuid])
    return names


def names_gpus_by(device: str) -> Literal["uuid", "minor"] | None:
    """Return which scheme named the GPU; None for other names, and for all digits of a UUID, which both can
    produce.
    """
    found = _GPU_NAME.match(device)
    if found is None or len(found[1]) >= _WHOLE_UUID:
        return None
    return "minor" if len(found[1]) < _SHORTEST_UUID_PART else "uuid"


def gpu_of_device(device: str) -> str:
    """Return `gpu-0` of `gpu-0-mig-1g10gb-19-2`."""
    return device.partition("-mig-")[0]


def _hex_digits(uuid: str) -> str:
    text = uuid.lower().removeprefix("gpu-").replace("-", "")
    return re.sub(r"[^a-z0-9]", "", text) or "0"


def _shortest_unique(uuid: str, digits: Mapping[str, str]) -> str:
    own = digits[uuid]
    for length in range(_SHORTEST_UUID_PART, len(own), _UUID_PART_STEP):
        if not any(other.startswith(own[:length]) for key, other in digits.items() if key != uuid):
            return own[:length]
    return own


def mig_device_name(parent: str, mig: MigDevice) -> str:
    """Return `gpu-4cf8db2d-mig-1g10gb-19-2` for profile 19 at memory slice 2.

    The profile ID distinguishes `1g.24gb+me` from `1g.24gb-me`. The compute instance ID follows if several
    share one GPU instance (`1c.3g.40gb`).
    """
    name = mig_slot_name(parent, mig.profile, mig.placement)
    return f"{name}-{mig.compute_instance_id}" if mig.shares_gpu_instance else name


def mig_slot_name(parent: str, profile: MigProfile, placement: Placement) -> str:
    label = re.sub(r"[^a-z0-9]", "-", profile.name.lower().replace(".", ""))
    return f"{parent}-mig-{label}-{profile.profile_id}-{placement.start}"


def vfio_device_name(bus_id: str) -> str:
    """Return `vfio-0000-1b-00-0` for `0000:1b:00.0`."""
    return f"vfio-{re.sub('[:.]', '-', bus_id)}"


def is_dns_label(text: str) -> bool:
    return is_subdomain(text, 63) and "." not in text


def is_subdomain(text: str, most: int = 253) -> bool:
    """Whether the API server accepts the text as an object's name."""
    return len(text) <= most and _SUBDOMAIN.fullmatch(text) is not None


def is_uid(text: str) -> bool:
    """Whether the text can be an object's UID, which is safe in a file name."""
    return _UID.fullmatch(text) is not None and ".." not in text


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[IPv6]:port`; an empty host means all addresses.

    Raises: InvalidConfigError.
    """
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not port.isdecimal() or int(port) > 65535 or (":" in host) != is_bracketed:
        raise InvalidConfigError(
            f"{address!r} is not an address; expected host:port or :port, for example :8080, with an IPv6 host in "
            "brackets, for example [::1]:8080"
        )
    return host.strip("[]"), int(port)
