"""The settings of `run`: flags and environment variables win over a configuration file, which wins over defaults.

The command line reads them once and passes them on as one value; nothing else reads the environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from dra_driver.errors import InvalidConfigError
from dra_driver.model.companions import (
    HOST_DEVICES,
    LAST_IMEX_CHANNEL,
    Companions,
    HostDevice,
    ImexChannels,
    in_order,
)
from dra_driver.model.gpu import Gpu
from dra_driver.model.sharing import (
    MAX_SHARES,
    NO_SHARING,
    GpuSelector,
    SharingPolicy,
    SharingRule,
    share_all,
)

DEFAULT_DRIVER_NAME = "gpu.nvidia.com"
ALL_GPUS = GpuSelector()
METADATA_VERSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "off": (),
    "v1alpha1": ("v1alpha1",),
    "v1beta1": ("v1beta1",),
    "both": ("v1beta1", "v1alpha1"),
}
"""The versions to write, newest first, for each value of `device_metadata`."""
UNHEALTHY_DEVICES = ("auto", "taint", "withdraw")
TaintEffect = Literal["None", "NoSchedule", "NoExecute"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `run`. Paths are as this process sees them unless the name says host.

    `healthcheck_port` -1 and an empty `http_endpoint` switch the service off. `pod_uid` makes two instances
    of a rolling update possible. `mps_host` is `external` (its own DaemonSet) or `child` (of this
    process). `kube_api_qps` 0 is no limit. With `dynamic_mig` MIG devices are made on demand on the GPUs that
    `dynamic_mig_gpus` selects and that are capable of it; `adopt_mig` is `leave` or `destroy`, for the GPU
    instances that somebody else made there. `ignored_xids` and `fatal_xids` come on top of those that are known;
    `taint_effects` are by the key of the taint without its prefix. `device_metadata` is `off`, or the versions of
    the files that describe a container's devices to it: `v1alpha1`, `v1beta1` or `both`. `unhealthy_devices` is how new
    pods are kept from them: `taint`, `withdraw` or `auto`. `imex_channel` is what claims on GPUs in a fabric get, None
    for nothing; `host_devices` are what every claim gets beside its GPUs, `claim_host_devices` what its author may
    ask for.
    """

    node_name: str
    driver_name: str = DEFAULT_DRIVER_NAME
    cdi_root: str = "/etc/cdi"
    nvidia_driver_root: str = "/"
    container_driver_root: str = "/driver-root"
    host_root: str | None = None
    nvidia_cdi_hook_path: str | None = None
    kubelet_registrar_directory_path: str = "/var/lib/kubelet/plugins_registry"
    kubelet_plugins_directory_path: str = "/var/lib/kubelet/plugins"
    pod_uid: str | None = None
    kubeconfig: str | None = None
    kube_api_qps: float = 20.0
    kube_api_burst: int = 100
    http_endpoint: str = ""
    metrics_path: str = "/metrics"
    healthcheck_port: int = -1
    mps_host: str = "external"
    simulate: str | None = None
    simulator_dir: str | None = None
    log_level: str = "info"
    log_format: str = "json"
    sharing: SharingPolicy = NO_SHARING
    dynamic_mig: bool = False
    dynamic_mig_gpus: GpuSelector = ALL_GPUS
    adopt_mig: str = "leave"
    ignored_xids: frozenset[int] = frozenset()
    fatal_xids: frozenset[int] = frozenset()
    taint_effects: Mapping[str, TaintEffect] = field(default_factory=dict)
    device_metadata: str = "off"
    unhealthy_devices: str = "auto"
    imex_channel: ImexChannels | None = None
    host_devices: tuple[HostDevice, ...] = ()
    claim_host_devices: tuple[HostDevice, ...] = ()

    @property
    def companions(self) -> Companions:
        """What claims get of the host beside their GPUs."""
        return Companions(self.imex_channel, self.host_devices, self.claim_host_devices)

    @property
    def on_demand(self) -> Callable[[Gpu], bool] | None:
        """Which GPUs are to be cut into MIG devices on demand; None for none."""
        return self.dynamic_mig_gpus.matches_gpu if self.dynamic_mig else None

    @property
    def metadata_versions(self) -> tuple[str, ...]:
        """The versions of the device metadata to write, newest first; none if that is off."""
        return METADATA_VERSIONS[self.device_metadata]

    @property
    def plugin_directory(self) -> Path:
        """Where sockets, records and locks of this driver lie: below the kubelet's plugins directory."""
        return Path(self.kubelet_plugins_directory_path) / self.driver_name


def resolve(
    given: Mapping[str, Any], config_file: Path | None, defaults: Mapping[str, Any] | None = None
) -> Settings:
    """Settings from what was given on the command line and from a file.

    In `given`, None means not given, and a name that is not a setting has no effect. `defaults` are the command's own.
    `consumable_shares` is the short form of a sharing section. Raises: InvalidConfigError that lists every fault with
    its path.
    """
    values: dict[str, Any] = dict(defaults or {})
    values.update(read_config_file(config_file) if config_file else {})
    values.update({name: _plain(value) for name, value in given.items() if value is not None})
    shared = consumable_shares(values.get("consumable_shares") or "disabled")
    if shared != NO_SHARING:
        if "sharing" in values:
            raise InvalidConfigError(
                f"--consumable-shares and the section sharing of {config_file} contradict each other; "
                "remove one of them"
            )
        values["sharing"] = shared
    if given.get("dynamic_mig") is None and has_gate(given.get("feature_gates") or "", "DynamicMIG"):
        values["dynamic_mig"] = True
    ignored = values.pop("additional_xids_to_ignore", None)
    if ignored is not None:
        values["ignored_xids"] = frozenset(values.get("ignored_xids", ())) | xid_list(ignored)
    values |= _companions(values)
    values = {name: value for name, value in values.items() if value is not None}
    if not values.get("node_name"):
        raise InvalidConfigError(
            "the node's name is missing; set --node-name or NODE_NAME (in a pod: fieldRef spec.nodeName)"
        )
    _check_forms(values)
    known = {entry.name for entry in fields(Settings)}
    return Settings(**{name: value for name, value in values.items() if name in known})


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PATH = (lambda text: text.startswith("/"), "an absolute path")

_PATH_OR_NONE = (lambda text: text[:1] in ("", "/"), _PATH[1])


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda word: word in words), f"{', '.join(words[:-1])} or {words[-1]}"


def _dns_name(longest: int) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda text: len(text) <= longest and _DNS_NAME.fullmatch(text) is not None,
        f"a DNS name of at most {longest} lower-case letters, digits, dots and dashes",
    )


_FORMS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "node_name": _dns_name(253),
    "driver_name": _dns_name(63),
    "cdi_root": _PATH,
    "nvidia_driver_root": _PATH,
    "container_driver_root": _PATH,
    "host_root": _PATH_OR_NONE,
    "nvidia_cdi_hook_path": _PATH_OR_NONE,
    "kubelet_registrar_directory_path": _PATH,
    "kubelet_plugins_directory_path": _PATH,
    "metrics_path": (lambda text: text.startswith("/"), "a path that begins with /"),
    "kube_api_qps": (lambda number: 0 <= number < math.inf, "a number from 0"),
    "kube_api_burst": (lambda number: number >= 1, "a whole number from 1"),
    "healthcheck_port": (lambda number: -1 <= number <= 65535, "a port up to 65535, or -1 for none"),
    "mps_host": _one_of("external", "child"),
    "log_format": _one_of("json", "console"),
    "adopt_mig": _one_of("leave", "destroy"),
    "unhealthy_devices": _one_of(*UNHEALTHY_DEVICES),
    "device_metadata": _one_of(*METADATA_VERSIONS),
}
"""What each setting may be, and how that is said. The configuration file checks its own values before."""


def _check_forms(values: Mapping[str, Any]) -> None:
    """Raises: InvalidConfigError that lists every fault."""
    faults = [
        f"--{name.replace('_', '-')} {values[name]!r}: expected {expected}"
        for name, (fits, expected) in _FORMS.items()
        if name in values and not fits(values[name])
    ]
    name = values.get("driver_name", DEFAULT_DRIVER_NAME)
    if values.get("device_metadata", "off") != "off" and name[:1].isdecimal():
        faults.append(
            f"--device-metadata needs a driver name that begins with a letter, because CDI does; {name} does not"
        )
    if faults:
        raise InvalidConfigError("; ".join(faults), faults=tuple(faults))


def consumable_shares(text: str) -> SharingPolicy:
    """The policy of `--consumable-shares`: one rule for every device, counted by the scheduler only.

    Raises: InvalidConfigError for anything but disabled, memory, unlimited or a number of shares.
    """
    match text.strip():
        case "" | "disabled":
            return NO_SHARING
        case "memory":
            return share_all(SharingRule("memory"))
        case "unlimited":
            return share_all(SharingRule("unlimited"))
        case number if re.fullmatch(r"[1-9][0-9]{0,5}", number) and int(number) <= MAX_SHARES:
            return share_all(SharingRule("shares", int(number)))
    raise InvalidConfigError(
        f"--consumable-shares {text!r}: expected disabled, memory, unlimited or a number from 1 to {MAX_SHARES}"
    )


def _companions(values: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of `--imex-channel` and of both lists of nodes as values. A file has checked its own."""
    found: dict[str, Any] = {}
    if isinstance(values.get("imex_channel"), str):
        found["imex_channel"] = imex_channels(values["imex_channel"])
    for name in ("host_devices", "claim_host_devices"):
        value = values.get(name)
        if isinstance(value, str):
            found[name] = host_device_list(value, f"--{name.replace('_', '-')}")
        elif value is not None:
            found[name] = in_order(value)
    return found


def imex_channels(text: str) -> ImexChannels | None:
    """The channels of `--imex-channel`: `off`, `all` or a number. Raises: InvalidConfigError."""
    match text.strip():
        case "off":
            return None
        case "all":
            return "all"
        case number if re.fullmatch(r"[0-9]{1,7}", number) and int(number) <= LAST_IMEX_CHANNEL:
            return int(number)
    raise InvalidConfigError(
        f"--imex-channel {text!r}: expected off, all or a channel's number from 0 to {LAST_IMEX_CHANNEL}"
    )


def host_device_list(text: str, flag: str) -> tuple[HostDevice, ...]:
    """The names of a flag: `"gds,mofed"`. Raises: InvalidConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not set(names) <= set(HOST_DEVICES):
        raise InvalidConfigError(
            f"{flag} {text!r}: expected names with commas between them, of {', '.join(HOST_DEVICES)}"
        )
    return in_order(names)


def xid_list(text: str) -> frozenset[int]:
    """The numbers of `--additional-xids-to-ignore`: `"45, 63"`. Raises: InvalidConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(re.fullmatch(r"[0-9]{1,4}", part) for part in parts):
        raise InvalidConfigError(
            f"--additional-xids-to-ignore {text!r}: expected Xid numbers with commas between them"
        )
    return frozenset(int(part) for part in parts)


def has_gate(text: str, name: str) -> bool:
    """Whether `--feature-gates`, such as `A=true,B=false`, switches a gate on."""
    return f"{name}=true" in text.replace(" ", "").split(",")


_MOST_CONFIG_BYTES = 1 << 20


def read_config_file(path: Path) -> dict[str, Any]:
    """The values of a YAML file by setting name.

    Raises: InvalidConfigError that lists every fault with its path in the file.
    """
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(_MOST_CONFIG_BYTES + 1)
        if len(content) > _MOST_CONFIG_BYTES:
            raise InvalidConfigError(f"configuration file {path} has more than 1 MiB; is it the right file?")
        document = yaml.safe_load(content.decode())
    except OSError as error:
        raise InvalidConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfigError(f"configuration file {path} is not a text file in UTF-8") from error
    except RecursionError as error:
        raise InvalidConfigError(f"configuration file {path} is nested too deep") from error
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist is a ValueError
        reason = " ".join(str(error).split())
        raise InvalidConfigError(f"configuration file {path} is not valid YAML: {reason}") from error
    return config_values(document if document is not None else {}, path)


def config_values(document: Any, path: Path) -> dict[str, Any]:
    """The values of a configuration document by setting name; `path` is for error texts. Raises: InvalidConfigError."""
    from pydantic import ValidationError

    from dra_driver.config_file import ConfigFile

    try:
        parsed = ConfigFile.model_validate(document)
    except ValidationError as error:
        faults = tuple(
            f"{'.'.join(str(part) for part in fault['loc']) or '(document)'}: {_in_words(fault)}"
            for fault in error.errors()
        )
        raise InvalidConfigError(f"configuration file {path}: {'; '.join(faults)}", faults=faults) from error
    values = parsed.model_dump(exclude_none=True, exclude={"sharing", "dynamic_mig", "health", "imex"})
    if parsed.dynamic_mig is not None:
        values |= parsed.dynamic_mig.values()
    if parsed.health is not None:
        values |= parsed.health.values()
    if parsed.imex is not None:
        # Also where it is off: the text is what a flag gives.
        values["imex_channel"] = str(parsed.imex.channel)
    return values if parsed.sharing is None else values | {"sharing": parsed.sharing_policy()}


_PYDANTIC: Final[Mapping[str, str]] = {
    "extra_forbidden": "there is no such key",
    "missing": "is required",
    "string_type": "expected a text; put it into quotes",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "list_type": "expected a list",
    "dict_type": "expected keys and values",
    "model_type": "expected keys and values",
    "literal_error": "expected {expected}",
    "greater_than_equal": "expected {ge} or more",
    "less_than_equal": "expected {le} or less",
    "greater_than": "expected more than {gt}",
    "less_than": "expected less than {lt}",
    "string_too_short": "expected a length of {min_length} or more",
    "string_too_long": "expected a length of {max_length} or less",
    "too_short": "expected {min_length} or more entries",
    "too_long": "expected {max_length} or fewer entries",
}


def _in_words(fault: Mapping[str, Any]) -> str:
    """A fault of the configuration file in our words; pydantic's own are for programmers."""
    if fault["type"] == "string_pattern_mismatch":
        form = _FORMS.get(_setting_name(str(fault["loc"][-1])))
        return f"expected {form[1]}" if form else f"{fault['input']!r} has the wrong form"
    text = _PYDANTIC.get(fault["type"])
    limits = {
        name: f"{value:g}" if isinstance(value, float) else value
        for name, value in fault.get("ctx", {}).items()
    }
    return str(fault["msg"]) if text is None else text.format_map(limits)


def _setting_name(key: str) -> str:
    """`cdiRoot` is the setting cdi_root, `nvidiaCDIHookPath` nvidia_cdi_hook_path."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", key).lower()
