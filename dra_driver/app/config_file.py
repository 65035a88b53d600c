"""The sections of the `--config` file. The keys are in dra_driver.app.settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from dra_driver.errors import InvalidConfigError
from dra_driver.model.health import TAINTED_KEYS
from dra_driver.model.host import LAST_IMEX_CHANNEL, ImexChannels
from dra_driver.model.ids import pci_bus_id
from dra_driver.model.mig import LayoutEntry, MigLayouts
from dra_driver.model.schema import YAML_ERRORS, Choice, ListField, MapField, Object, Scalar, Words
from dra_driver.model.sharing import (
    MAX_MPS_SHARES,
    MAX_SHARES,
    GpuSelector,
    SelectedDevices,
    SharingEntry,
    SharingPolicy,
    SharingRule,
    is_device_uuid,
)
from dra_driver.power.rules.limits import PowerPolicy

WORDS: Final = Words(
    must="expected",
    text="a string; put it in quotes",
    whole="a whole number",
    object="keys and values",
    word="{!r}",
    index=".{}",
    unknown="unknown key",
    names_found=False,
)
_MAX_BYTES: Final = 1 << 20


def read_document(path: Path) -> Any:
    """Read a YAML file. Raises: InvalidConfigError."""
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise InvalidConfigError(f"configuration file {path} is larger than 1 MiB; is it the right file?")
        document = yaml.safe_load(content.decode())
    except OSError as error:
        raise InvalidConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfigError(f"configuration file {path} is not a text file in UTF-8") from error
    except RecursionError as error:
        raise InvalidConfigError(f"configuration file {path} is nested too deeply") from error
    except (yaml.YAMLError, *YAML_ERRORS) as error:
        reason = " ".join(str(error).split())
        raise InvalidConfigError(f"configuration file {path} is not valid YAML: {reason}") from error
    return {} if document is None else document


def _uuid(text: str) -> str | None:
    if is_device_uuid(text):
        return None
    return f"{text!r} is not a UUID of a GPU or MIG device, such as GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"


def _bus_id(text: str) -> str | None:
    try:
        pci_bus_id(text)
    except ValueError as error:
        return str(error)
    return None


def _of_gpus(uuids: Sequence[str]) -> str | None:
    wrong = [uuid for uuid in uuids if not uuid.startswith("GPU-")]
    return f"{wrong[0]} is a MIG device's UUID; name the GPU" if wrong else None


def _can_match(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    uuids = given.get("uuids")
    if given.get("devices") == "gpu" and uuids and all(uuid.startswith("MIG-") for uuid in uuids):
        yield "devices", "gpu cannot match, because all uuids are those of MIG devices"


_PRODUCT: Final = Scalar(str, least=1, most=96)
_BUS_IDS: Final = ListField(Scalar(str, _bus_id), None, least=1)
GPUS: Final = Object(
    {
        "productName": _PRODUCT,
        "uuids": ListField(Scalar(str, _uuid), None, least=1, test=_of_gpus),
        "pciBusIDs": _BUS_IDS,
    }
)
"""A missing key matches every GPU."""
_DEVICES: Final = Object(
    {
        "productName": _PRODUCT,
        "uuids": ListField(Scalar(str, _uuid), None, least=1),
        "pciBusIDs": _BUS_IDS,
        "devices": Choice(get_args(SelectedDevices)),
    },
    also=_can_match,
)


def gpu_selector(given: Mapping[str, Any]) -> GpuSelector:
    return GpuSelector(
        given.get("productName"),
        frozenset(given.get("uuids") or ()),
        frozenset(map(pci_bus_id, given.get("pciBusIDs") or ())),
        given.get("devices") or "all",
    )


def _fit_together(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    mode, shares = given.get("mode"), given.get("shares")
    is_off = word(mode) == "off"
    enforce = None if is_off else given.get("enforce")
    if mode == "shares" and shares is None:
        yield "shares", "mode shares needs a number of shares"
    elif mode not in ("shares", None) and shares is not None:
        yield "shares", f"is not allowed with mode {word(mode)}; remove it or use mode shares"
    elif enforce == "mps" and (shares or 0) > MAX_MPS_SHARES:
        yield (
            "shares",
            f"MPS supports at most {MAX_MPS_SHARES} clients per device; use fewer shares, or set enforce to none",
        )
    for name in ("enforce", "multiprocessors"):
        if is_off and given.get(name) is not None:
            yield name, "is not allowed with mode off"
    if enforce != "mps" and given.get("multiUser") is not None:
        yield "multiUser", "needs enforce mps"


def word(value: Any) -> Any:
    """YAML reads an unquoted `off` as false."""
    return "off" if value is False else value


def _is_reached(entries: Sequence[Mapping[str, Any]]) -> str | None:
    selectors = [gpu_selector(entry.get("selector") or {}) for entry in entries]
    for number, selector in enumerate(selectors):
        for earlier in range(number):
            if selectors[earlier].covers(selector):
                return f"entry {number} can never apply: entry {earlier} matches all its devices; change the order"
    return None


SHARING: Final = ListField(
    Object(
        {
            "selector": _DEVICES,
            "mode": Choice(("off", "shares", "memory", "unlimited")),
            "enforce": Choice(("mps", "none")),
            "shares": Scalar(int, least=1, most=MAX_SHARES),
            "multiprocessors": Scalar(bool),
            "multiUser": Scalar(bool),
        },
        ("mode",),
        also=_fit_together,
    ),
    None,
    test=_is_reached,
)


def sharing_policy(entries: Sequence[Mapping[str, Any]]) -> SharingPolicy:
    return SharingPolicy(tuple(map(_entry, entries)))


def _entry(given: Mapping[str, Any]) -> SharingEntry:
    selector = gpu_selector(given.get("selector") or {})
    if word(given["mode"]) == "off":
        return SharingEntry(selector, None)
    rule = SharingRule(
        given["mode"],
        given.get("shares"),
        given.get("enforce") or "none",
        bool(given.get("multiprocessors")),
        given.get("multiUser") is not False,
    )
    return SharingEntry(selector, rule)


def _pci_id(text: str) -> str | None:
    if re.fullmatch(r"0[xX][0-9A-Fa-f]{8}", text):
        return None
    return f"{text!r} is not a PCI device and vendor ID, such as 0x233010DE"


def _pci_ids(value: Any) -> str | None:
    if isinstance(value, str):
        return _pci_id(value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return "expected a PCI ID, such as 0x233010DE in quotes, or a list of them"
    return next(filter(None, map(_pci_id, value)), None)


def _indexes(value: Any) -> str | None:
    is_list = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return None if value == "all" or is_list else "expected all, or a list of indexes such as [0, 1]"


def _mode_fits(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if given.get("mig-enabled") is False and given.get("mig-devices"):
        yield "mig-devices", "must be empty if mig-enabled is false"


def _uses_one(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if given.get("layout") is None and given.get("fromLabel") is not True:
        yield "layout", "no layout is selected; set layout or fromLabel"


_MIG_CONFIGS: Final = Object(
    {
        "version": Choice(("v1",)),
        "mig-configs": MapField(
            ListField(
                Object(
                    {
                        "device-filter": Scalar(object, _pci_ids),
                        "devices": Scalar(object, _indexes),
                        "mig-enabled": Scalar(bool),
                        "mig-devices": MapField(
                            Scalar(int, least=1),
                            lambda key: isinstance(key, str),
                            "{} is not the name of a profile",
                        ),
                    },
                    ("devices", "mig-enabled"),
                    also=_mode_fits,
                ),
                None,
            ),
            lambda key: isinstance(key, str),
            "{} is not the name of a layout",
        ),
    },
    ("version", "mig-configs"),
)
MIG_LAYOUTS: Final = Object(
    {
        "layout": Scalar(str, least=1, most=253),
        "fromLabel": Scalar(bool),
        "adopt": Choice(("leave", "destroy")),
        "configuration": _MIG_CONFIGS,
    },
    also=_uses_one,
)
"""`configuration` has the format of nvidia-mig-parted, as in the GPU operator's ConfigMap."""


def mig_layouts(given: Mapping[str, Any]) -> MigLayouts:
    configs = (given.get("configuration") or {}).get("mig-configs") or {}
    return MigLayouts(
        {name: tuple(map(_layout_entry, entries or ())) for name, entries in configs.items()},
        given.get("layout"),
        bool(given.get("fromLabel")),
        given.get("adopt") == "destroy",
    )


def _layout_entry(given: Mapping[str, Any]) -> LayoutEntry:
    filters = given.get("device-filter") or ()
    devices = given["devices"]
    return LayoutEntry(
        given["mig-enabled"],
        given.get("mig-devices") or {},
        None if devices == "all" else tuple(devices),
        tuple(item.lower() for item in ([filters] if isinstance(filters, str) else filters)),
    )


_WATTS: Final = Scalar(int, least=1, most=1_000_000)


def _below_maximum(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    default, most = given.get("defaultWatts"), given.get("maxWatts")
    if default is not None and most is not None and default > most:
        yield "defaultWatts", f"is above maxWatts, {most}"


POWER: Final = Object(
    {"defaultWatts": _WATTS, "maxWatts": _WATTS, "nodeBudgetWatts": _WATTS}, also=_below_maximum
)


def power_policy(given: Mapping[str, Any]) -> PowerPolicy:
    return PowerPolicy(given.get("defaultWatts"), given.get("maxWatts"), given.get("nodeBudgetWatts"))


XIDS: Final = ListField(Scalar(int, least=1, most=9999), None)
TAINTS: Final = MapField(
    Choice(("None", "NoSchedule", "NoExecute")),
    lambda key: key in TAINTED_KEYS,
    f"unknown taint {{}}; available: {', '.join(TAINTED_KEYS)}",
)


def _channel(value: Any) -> str | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value is False or value in ("all", "off") or (is_number and 0 <= value <= LAST_IMEX_CHANNEL):
        return None
    return f"expected off, all or a channel's number from 0 to {LAST_IMEX_CHANNEL}"


IMEX_CHANNEL: Final = Scalar(object, _channel)


def imex_channel(given: Any) -> ImexChannels | None:
    channel: ImexChannels | None = None if word(given) == "off" else given
    return channel
