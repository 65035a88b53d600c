"""The settings of `run`. Flags and environment variables override a configuration file, which overrides the
defaults.

No other code reads settings from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

from dra_driver.app.config_file import (
    GPUS,
    IMEX_CHANNEL,
    MIG_LAYOUTS,
    POWER,
    SHARING,
    TAINTS,
    WORDS,
    XIDS,
    gpu_selector,
    imex_channel,
    mig_layouts,
    power_policy,
    read_document,
    sharing_policy,
    word,
)
from dra_driver.errors import InvalidConfigError
from dra_driver.model.dataclass import MISSING, dataclass, field, fields, replace
from dra_driver.model.driver_files import NO_HOOK
from dra_driver.model.gpu import Gpu
from dra_driver.model.host import (
    HOST_DEVICES,
    ExtraDevices,
    HostDevice,
    ImexChannels,
    in_order,
)
from dra_driver.model.ids import is_subdomain, is_uid, split_address
from dra_driver.model.mig import MigLayouts
from dra_driver.model.schema import Choice, ListField, Object, Scalar, Shape, Words, faults
from dra_driver.model.sharing import (
    MAX_SHARES,
    NO_SHARING,
    GpuSelector,
    SharingPolicy,
    SharingRule,
    share_all,
)
from dra_driver.model.steps import EVERY_METADATA_VERSION
from dra_driver.power.rules.limits import NO_POWER_POLICY, PowerPolicy

DEFAULT_DRIVER_NAME = "gpu.nvidia.com"
DEFAULT_SIMULATOR_DIR = "/var/lib/gpu-dra-simulator"
ALL_GPUS = GpuSelector()
DeviceNames = Literal["uuid", "minor"]
PROBE_PATHS = ("/healthz", "/startupz", "/readyz", "/problems")
ADVICE_PATH = "/advice"
UNHEALTHY_DEVICES = ("auto", "taint", "withdraw")
TaintEffect = Literal["None", "NoSchedule", "NoExecute"]
_TEXT: Final = Scalar(str)
_FLAG_WORDS: Final = Words(must="expected", whole="a whole number", names_found=False)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command, or an argument if it has a `count` (argparse's number of arguments).

    The value has `shape`, or is a text that `parsed` converts (it raises InvalidConfigError); `to` converts the value
    for the command.

    In the configuration file, a setting is at the dotted path `key`, and `of_file` converts it. A setting without
    `help` can only be in the file. For a setting that may be None, an empty text is valid.
    """

    name: str
    help: str | None = ""
    shape: Shape = _TEXT
    spelled: tuple[str, ...] = ()
    env: tuple[str, ...] | None = None
    metavar: str | None = None
    hidden: bool = False
    default: Any = None
    shown: str | None = None
    parsed: Callable[[str], Any] | None = None
    to: Callable[[Any], Any] | None = None
    count: str | None = None
    is_repeated: bool = False
    key: str = ""
    of_file: Callable[[Any], Any] | None = None
    is_required: bool = False
    is_none_if_empty: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.spelled or (f"--{self.name.replace('_', '-')}",)

    @property
    def variables(self) -> tuple[str, ...]:
        """In order of precedence. An empty variable counts as not set."""
        return (self.name.upper(),) if self.env is None else self.env

    @property
    def kind(self) -> Shape:
        return self.shape if self.parsed is None else _TEXT

    def fault(self, value: Any) -> str | None:
        if value == "" and self.is_none_if_empty:
            return None
        if self.parsed is None:
            return next((fault.text for fault in faults(value, self.shape, "", _FLAG_WORDS)), None)
        try:
            self.parsed(value)
        except InvalidConfigError as error:
            return str(error)
        return None


def _setting(default: Any, help: str | None, shape: Shape = _TEXT, *, flag: str = "", **more: Any) -> Any:
    """Return a field of Settings. `flag` is the flag's name if it is not the field's."""
    shown = f"{default:g}" if isinstance(default, (int, float)) else default
    more = {"shown": shown if isinstance(shown, str) else None, **more}
    given = Flag(flag, help, shape, is_none_if_empty=default in (None, MISSING), **more)
    return field(**{"default_factory" if default is dict else "default": default}, metadata={"flag": given})


def _dns_name(longest: int) -> Scalar:
    text = f"expected a DNS name of at most {longest} lower-case letters, digits, dots and dashes"
    return Scalar(str, lambda name: None if is_subdomain(name, longest) else text, least=1)


def _begins_with_slash(expected: str, *others: str) -> Scalar:
    return Scalar(str, lambda path: None if path.startswith("/") or path in others else expected)


def _metrics_path(path: str) -> str | None:
    if path in (*PROBE_PATHS, ADVICE_PATH):
        return f"{path} is already used by a probe"
    return None if path == "off" or path.startswith("/") else "expected off, or a path that begins with /"


def _address(text: str) -> str | None:
    try:
        split_address(text or ":0")
    except InvalidConfigError as error:
        return str(error)
    return None


def consumable_shares(text: str) -> SharingPolicy:
    """Return the policy of `--consumable-shares`: one rule for every device, which only the scheduler enforces.

    Raises: InvalidConfigError.
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
    raise InvalidConfigError(f"expected disabled, memory, unlimited or a number from 1 to {MAX_SHARES}")


def imex_channels(text: str) -> ImexChannels | None:
    """Parse `off`, `all` or a number. Raises: InvalidConfigError."""
    word = text.strip()
    value = int(word) if re.fullmatch(r"[0-9]{1,7}", word) else word
    for fault in faults(value, IMEX_CHANNEL, ""):
        raise InvalidConfigError(fault.text)
    return imex_channel(value)


def host_device_list(text: str) -> tuple[HostDevice, ...]:
    """Parse for example `"gds,mofed"`. Raises: InvalidConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not set(names) <= set(HOST_DEVICES):
        raise InvalidConfigError(f"expected a comma-separated list of {', '.join(HOST_DEVICES)}")
    return in_order(names)


def xid_list(text: str) -> frozenset[int]:
    """Parse for example `"45, 63"`. Raises: InvalidConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(re.fullmatch(r"[0-9]{1,4}", part) for part in parts):
        raise InvalidConfigError("expected comma-separated Xid numbers")
    return frozenset(int(part) for part in parts)


_POD_UID = Scalar(str, lambda uid: None if is_uid(uid) else "expected a UID, such as metadata.uid of a pod")
_PATH = _begins_with_slash("expected an absolute path")
_SWITCH = Scalar(bool)


@dataclass(frozen=True, slots=True)
class Settings:
    """Paths are paths in this container, unless the help says that they are on the host.

    `healthcheck_port` -1 and an empty `http_endpoint` disable these services. `ignored_xids` and `fatal_xids` extend
    the built-in lists. The keys of `taint_effects` have no prefix.
    """

    node_name: str = _setting(MISSING, "Name of this node; also the pool's name.", _dns_name(253))
    driver_name: str = _setting(DEFAULT_DRIVER_NAME, "DRA driver name.", _dns_name(63))
    cdi_root: str = _setting("/etc/cdi", "Directory for CDI specs.", _PATH)
    nvidia_driver_root: str = _setting(
        "/",
        "Driver root on the host.",
        _PATH,
        spelled=("--host_driver-root", "--nvidia-driver-root"),
        env=("NVIDIA_DRIVER_ROOT", "HOST_DRIVER_ROOT"),
    )
    container_driver_root: str = _setting(
        "/driver-root",
        "Path of the driver root in this container, if it exists.",
        _PATH,
        env=("DRIVER_ROOT_CTR_PATH",),
    )
    host_root: str | None = _setting(
        None,
        "Path of the host's / in this container, if it is mounted; used for nvidia-cdi-hook, IMEX and passthrough.",
        _PATH,
    )
    nvidia_cdi_hook_path: str | None = _setting(
        None,
        "Path of nvidia-cdi-hook on the host, or none to work without it (containers get more mounts).",
        _begins_with_slash("expected an absolute path or none", NO_HOOK),
        key="nvidiaCDIHookPath",
        shown="searched on the host, next to the plugin, and in the driver root",
    )
    kubelet_registrar_directory_path: str = _setting(
        "/var/lib/kubelet/plugins_registry", "The kubelet's plugin registry.", _PATH
    )
    kubelet_plugins_directory_path: str = _setting(
        "/var/lib/kubelet/plugins", "The kubelet's plugin data directory.", _PATH
    )
    pod_uid: str | None = _setting(
        None, "UID of this pod. Needed for rolling updates without downtime.", _POD_UID, key="podUID"
    )
    kubeconfig: str | None = _setting(None, "", shown="in-cluster")
    kube_api_qps: float = _setting(
        20.0,
        "Maximum API calls per second; 0 means no limit.",
        Scalar(float, least=0),
        key="kubeAPIQPS",
        of_file=float,
    )
    kube_api_burst: int = _setting(
        100, "Maximum API calls in a burst.", Scalar(int, least=1), key="kubeAPIBurst"
    )
    http_endpoint: str = _setting(
        "", "host:port of metrics, /healthz, /readyz, /startupz.", Scalar(str, _address), shown="off"
    )
    metrics_path: str = _setting(
        "/metrics",
        "Path of the metrics; off serves only the probes.",
        Scalar(str, _metrics_path),
    )
    usage_metrics: bool = _setting(
        True,
        "Measure the usage of claims' devices at each scrape, and report GPU memory that does not belong to a claim.",
        _SWITCH,
        shown="on",
    )
    dev_char_links: bool = _setting(
        True,
        "Create links to the NVIDIA driver's device nodes in the host's /dev/char.",
        _SWITCH,
        shown="on",
    )
    healthcheck_port: int = _setting(
        -1, "Port of the gRPC health service.", Scalar(int, least=-1, most=65535), shown="-1, off"
    )
    simulate: str | None = _setting(
        None,
        "Run on a simulated machine: a name from `gpu-dra-driver simulate list`, or a YAML file.",
        metavar="MACHINE",
    )
    simulator_dir: str | None = _setting(None, "Directory of the simulated machine's state.")
    log_level: str = _setting("info", "", Choice(("debug", "info", "warning", "error")))
    log_format: str = _setting("json", "", Choice(("json", "console")))
    sharing: SharingPolicy = _setting(
        NO_SHARING,
        "How every device is shared: disabled, memory, unlimited, or a number of shares.",
        SHARING,
        of_file=sharing_policy,
        flag="consumable_shares",
        parsed=consumable_shares,
        shown="disabled",
    )
    dynamic_mig: bool = _setting(
        False,
        "Create MIG devices on demand, on GPUs that support it.",
        _SWITCH,
        key="dynamicMig.enabled",
        is_required=True,
        shown="off",
    )
    dynamic_mig_gpus: GpuSelector = _setting(
        ALL_GPUS, None, GPUS, key="dynamicMig.gpus", of_file=gpu_selector
    )
    passthrough: bool = _setting(
        False,
        "Also publish GPUs for virtual machines; a claim binds its GPU to vfio.",
        _SWITCH,
        key="passthrough.enabled",
        is_required=True,
        shown="off",
    )
    passthrough_gpus: GpuSelector = _setting(
        ALL_GPUS, None, GPUS, key="passthrough.gpus", of_file=gpu_selector
    )
    mps: bool = _setting(
        False,
        "Expect an MPS host on this node, and report it as a problem if none runs.",
        _SWITCH,
        shown="off",
    )
    mig_layouts: MigLayouts = _setting(MigLayouts(), None, MIG_LAYOUTS, of_file=mig_layouts)
    power: PowerPolicy = _setting(NO_POWER_POLICY, None, POWER, of_file=power_policy)
    ignored_xids: frozenset[int] = _setting(
        frozenset(),
        "Xids that do not make a GPU unhealthy, in addition to the built-in list, for example 45,63.",
        XIDS,
        key="health.ignoredXids",
        of_file=frozenset,
        flag="additional_xids_to_ignore",
        parsed=xid_list,
    )
    fatal_xids: frozenset[int] = _setting(frozenset(), None, XIDS, key="health.fatalXids", of_file=frozenset)
    taint_effects: Mapping[str, TaintEffect] = _setting(dict, None, TAINTS, key="health.taints", of_file=dict)
    device_names: DeviceNames = _setting(
        "uuid",
        "How devices are named: uuid (gpu-4cf8db2d), or minor (gpu-0), as in NVIDIA's own DRA driver. It can be "
        "changed only on a node without claims.",
        Choice(get_args(DeviceNames)),
    )
    device_metadata: str = _setting(
        "off",
        "Mount files that describe the devices into containers: off, or both versions of the format (both).",
        Choice(("off", "both")),
        of_file=word,
    )
    unhealthy_devices: str = _setting(
        "auto",
        "How to keep new pods off unhealthy devices: taint, withdraw (leave them out of the slices), or auto "
        "(withdraw if the API server drops taints, otherwise taint).",
        Choice(UNHEALTHY_DEVICES),
        key="health.unhealthyDevices",
    )
    imex_channel: ImexChannels | None = _setting(
        None,
        "The IMEX channel for claims on GPUs in a multi-node NVLink fabric: a number, all or off.",
        IMEX_CHANNEL,
        key="imex.channel",
        of_file=imex_channel,
        is_required=True,
        parsed=imex_channels,
        shown="off",
    )
    host_devices: tuple[HostDevice, ...] = _setting(
        (),
        "Device nodes that claims for containers also get: a comma-separated list of gds, mofed, gdrcopy "
        "and nvswitch.",
        ListField(Choice(HOST_DEVICES), None),
        of_file=in_order,
        parsed=host_device_list,
        shown="none",
    )

    @property
    def extra_devices(self) -> ExtraDevices:
        return ExtraDevices(self.imex_channel, self.host_devices)

    @property
    def needs_mps(self) -> bool:
        rules = [entry.rule for entry in self.sharing.entries]
        return self.mps or any(rule is not None and rule.enforce == "mps" for rule in rules)

    @property
    def on_demand(self) -> Callable[[Gpu], bool] | None:
        """None if no GPU is partitioned into MIG devices on demand."""
        return self.dynamic_mig_gpus.matches_gpu if self.dynamic_mig else None

    @property
    def for_virtual_machines(self) -> Callable[[Gpu], bool] | None:
        """None if virtual machines may use no GPU."""
        return self.passthrough_gpus.matches_gpu if self.passthrough else None

    @property
    def metadata_versions(self) -> tuple[str, ...]:
        return EVERY_METADATA_VERSION if self.device_metadata == "both" else ()

    @property
    def plugin_directory(self) -> Path:
        return Path(self.kubelet_plugins_directory_path) / self.driver_name


def _named(name: str, flag: Flag) -> Flag:
    first, *rest = name.split("_")
    return replace(flag, name=flag.name or name, key=flag.key or first + "".join(map(str.capitalize, rest)))


SETTINGS: Final[Mapping[str, Flag]] = {
    entry.name: _named(entry.name, entry.metadata["flag"]) for entry in fields(Settings)
}
CONFIG: Final = Flag(
    "config",
    "YAML file with settings; flags and environment variables override it.",
    env=("CONFIG_FILE",),
    metavar="FILE",
    to=Path,
)
FLAGS: Final[Mapping[str, Flag]] = {
    flag.name: flag for flag in (*SETTINGS.values(), CONFIG) if flag.help is not None
}


def _document() -> Object:
    """Unknown keys are faults; otherwise a misspelt key would silently mean the default."""
    top: dict[str, Shape] = {}
    sections: dict[str, dict[str, Flag]] = {}
    for setting in SETTINGS.values():
        section, _, key = setting.key.rpartition(".")
        if section:
            sections.setdefault(section, {})[key] = setting
        else:
            top[key] = setting.shape
    for name, within in sections.items():
        required = tuple(key for key, setting in within.items() if setting.is_required)
        top[name] = Object({key: setting.shape for key, setting in within.items()}, required)
    return Object(top)


DOCUMENT: Final = _document()
GATES: Final = {"DynamicMIG": "dynamic_mig", "PassthroughSupport": "passthrough"}
"""The settings that feature gates of NVIDIA's own DRA driver enable."""
_BY_FLAG: Final = {flag.name: name for name, flag in SETTINGS.items()}


def resolve(
    given: Mapping[str, Any], config_file: Path | None, defaults: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings from the command line and a configuration file. Raises: InvalidConfigError that lists all
    faults.

    `given` has the value of each setting or the text of its flag; None means that it is not given. It may also have
    `feature_gates`, and `faults`: what the command line found, by flag name. Other names are ignored.
    """
    flag_faults: Mapping[str, str] = given.get("faults", {})
    wrong = [*flag_faults.values()]
    values: dict[str, Any] = dict(defaults or {})
    in_file: tuple[str, ...] = ()
    is_read = True
    if config_file is not None:
        try:
            found, in_file = _checked(read_document(config_file))
            values |= found
        except InvalidConfigError as error:
            wrong.append(str(error))
            is_read = False
    shared = NO_SHARING
    for name, raw in given.items():
        target = _BY_FLAG.get(name, name)
        if raw is None or target not in SETTINGS:
            continue
        value = _flag_value(raw, SETTINGS[target], wrong)
        if name == "consumable_shares":
            shared = value
        elif name == "additional_xids_to_ignore":
            values[target] = frozenset(values.get(target, ())) | frozenset(value)
        else:
            values[target] = value
    if shared != NO_SHARING and "sharing" in values:
        wrong.append(
            f"--consumable-shares and the section sharing of {config_file} contradict each other; remove one of them"
        )
    elif shared != NO_SHARING:
        values["sharing"] = shared
    gates = given.get("feature_gates") or ""
    values |= {
        name: True for gate, name in GATES.items() if given.get(name) is None and has_gate(gates, gate)
    }
    is_reported = "node_name" in flag_faults or any(fault.startswith("nodeName:") for fault in in_file)
    if not values.get("node_name") and is_read and not is_reported:
        wrong.append(
            "the node's name is missing; set --node-name or NODE_NAME (in a pod: fieldRef spec.nodeName)"
        )
    driver = values.get("driver_name", DEFAULT_DRIVER_NAME)
    needs_letter = {
        "--device-metadata": values.get("device_metadata", "off") != "off",
        "--passthrough": bool(values.get("passthrough")),
    }
    wrong += [
        f"{flag} needs a driver name that begins with a letter, as CDI requires; {driver} does not"
        for flag, is_on in needs_letter.items()
        if is_on and driver[:1].isdecimal()
    ]
    power = values.get("power", NO_POWER_POLICY)
    names = ("sharing", "dynamic_mig", "passthrough", "mig_layouts")
    others = [name for name in names if values.get(name) not in (None, False)]
    if power.budget_w is not None and others:
        keys = " and ".join(SETTINGS[key].key.partition(".")[0] for key in others)
        wrong.append(f"power.nodeBudgetWatts counts whole GPUs with one claim each; remove it, or {keys}")
    _raise(wrong, in_file, config_file)
    return Settings(**values)


def _flag_value(raw: Any, flag: Flag, wrong: list[str]) -> Any:
    value = str(raw) if isinstance(raw, Path) else raw
    if flag.help is None or (flag.parsed is not None and not isinstance(value, str)):
        return value  # already checked, like a value from a file
    text = flag.fault(value)
    if text is not None:
        wrong.append(f"{flag.spellings[-1]} {raw!r}: {text}")
    return value if flag.parsed is None or text is not None else flag.parsed(value)


def _raise(wrong: Sequence[str], in_file: Sequence[str], path: Path | None) -> None:
    if wrong or in_file:
        texts = [f"configuration file {path}: {'; '.join(in_file)}"] if in_file else []
        raise InvalidConfigError("; ".join([*texts, *wrong]), faults=(*in_file, *wrong))


def has_gate(text: str, name: str) -> bool:
    return f"{name}=true" in text.replace(" ", "").split(",")


def config_values(document: Any, path: Path) -> dict[str, Any]:
    """Return the values of a configuration document by setting name. Raises: InvalidConfigError that lists all
    faults.
    """
    values, in_file = _checked(document)
    _raise((), in_file, path)
    return values


def _checked(document: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    found = faults(document, DOCUMENT, "", WORDS)
    wrong = {fault.path for fault in found}
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        value = document
        for part in setting.key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and not any(f"{path}.".startswith(f"{setting.key}.") for path in wrong):
            values[name] = value if setting.of_file is None else setting.of_file(value)
    texts = (str(fault) if fault.path else f"(document): {fault}" for fault in found)
    return values, tuple(" ".join(text.split()) for text in texts)
