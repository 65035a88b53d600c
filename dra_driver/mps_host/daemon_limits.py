"""Limits: what can be asked for, and how the control program says and shows them."""

from __future__ import annotations

import re

from dra_driver.errors import PermanentError
from dra_driver.model.mps import MpsDaemonSpec

_UUIDS = {"gpu": re.compile(r"GPU-[0-9A-Fa-f-]{1,64}"), "mig": re.compile(r"MIG-[0-9A-Za-z/-]{1,96}")}
_SIZE = re.compile(r"(?<!\d)(\d{1,18})(?!\d)\s*([KMGT]?)(?:i?B)?")
_MIB = {"": 1 / 1048576, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1048576}


def check_spec(spec: MpsDaemonSpec) -> None:
    """UUIDs go into command lines. Raises: PermanentError if one is none."""
    for uuid, kind in {spec.uuid: spec.kind, **dict.fromkeys(spec.gpu_uuids, "gpu")}.items():
        if not _UUIDS[kind].fullmatch(uuid):
            whose = "MIG device" if kind == "mig" else "GPU"
            raise PermanentError(
                f"no MPS daemon can be started for {spec.device}: {uuid!r} is not the UUID of a {whose}"
            )


def limit_commands(spec: MpsDaemonSpec) -> tuple[tuple[str, str, str], ...]:
    """(setter, getter, the answer that the getter must give) for each default limit of the spec. Devices go by the
    number that they have in the daemon: every driver understands that."""
    commands = []
    percentage = spec.default_active_thread_percentage
    if percentage is not None:
        name = "default_active_thread_percentage"
        commands.append((f"set_{name} {percentage}", f"get_{name}", f"{percentage} %"))
    for ordinal, memory in enumerate(spec.default_memory_limits_mib):
        if memory is None:
            continue
        name = f"default_device_pinned_mem_limit {ordinal}"
        commands.append((f"set_{name} {memory}M", f"get_{name}", f"{memory} MiB"))
    return tuple(commands)


def is_answer(wanted: str, text: str) -> bool:
    """Whether the getter's text says the wanted value: `25 %` as `25.0`, `4096 MiB` as `4G` or `4096M`.

    NVIDIA's program rounds sizes down to the unit that it shows: 1536 MiB are `1G`.
    """
    number, unit = wanted.split()
    if unit == "%":
        return is_number(text) and round(float(text), 3) == float(number)
    found = _SIZE.search(text.upper().rpartition(":")[2])
    return found is not None and 0 < int(found[1]) == int(number) // _MIB[found[2]]


def is_number(text: str) -> bool:
    """Whether a text is a plain decimal number."""
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None
