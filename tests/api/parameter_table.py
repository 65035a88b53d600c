"""Good and bad parameters, for all who judge them: the decoder, which a Prepare asks, `gpu-dra-driver validate`, and
the admission policy `gpu-dra-driver-parameters` on a real API server (tests/e2e/test_parameters_policy.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dra_driver.api.config import GROUP_VERSION

Json = dict[str, Any]
MIB = 1024 * 1024


@dataclass(frozen=True)
class Parameters:
    """`faults` are the decoder's, and so those of `validate` and the policy, each with the path before it.

    `policy` says why the policy lets faulty ones pass; `refused_by_server` is what Kubernetes itself says of them.
    """

    name: str
    value: Any
    faults: tuple[str, ...] = ()
    policy: str = ""
    refused_by_server: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim's `devices` whose parameters are right by themselves.

    `faults` are those of `validate` and the policy, with the path below `devices`. `device` is (request, type) of a
    device that the scheduler might allocate for it, `admin_access` how, and `prepare` what a Prepare then says; None
    if it takes it.
    """

    name: str
    devices: Json
    device: tuple[str, str]
    faults: tuple[str, ...] = ()
    prepare: str | None = None
    why_later: str = ""
    admin_access: bool = False


def parameters(kind: Any = "GpuConfig", **fields: Any) -> Json:
    return {"apiVersion": GROUP_VERSION, "kind": kind, **fields}


def slicing(**fields: Any) -> Json:
    return parameters(sharing={"strategy": "TimeSlicing", **fields})


def mps(kind: str = "GpuConfig", **fields: Any) -> Json:
    return parameters(kind, sharing={"strategy": "MPS", "mpsConfig": fields})


def _limits(**limits: Any) -> Json:
    return mps(defaultPerDevicePinnedMemoryLimit=limits)


_KINDS = "use one of GpuConfig, MigDeviceConfig, VfioDeviceConfig"
_MPS = "sharing.mpsConfig"
_LIMIT = f"{_MPS}.defaultPinnedDeviceMemoryLimit"
_BY_DEVICE = f"{_MPS}.defaultPerDevicePinnedMemoryLimit"
_PERCENTAGE = f"{_MPS}.defaultActiveThreadPercentage: must be a whole number from 1 to 100"
_NO_QUANTITY = "is not a quantity; expected a number with a suffix such as Mi or G"
_LEAST = "is below the least limit, 1Mi"
_NOT_MPS = "sharing.mpsConfig: does not fit strategy TimeSlicing; remove it or use strategy MPS"
_NOT_SLICING = "sharing.timeSlicingConfig: does not fit strategy MPS; remove it or use strategy TimeSlicing"

PARAMETERS = (
    Parameters("nothing but the kind", parameters()),
    Parameters("null is not given", parameters(sharing=None, more=None)),
    Parameters("time slices", slicing()),
    Parameters("time slices without settings", slicing(timeSlicingConfig={})),
    Parameters("time slices with null", slicing(timeSlicingConfig={"interval": None})),
    *(Parameters(f"interval {word}", slicing(timeSlicingConfig={"interval": word}))
      for word in ("Default", "Short", "Medium", "Long")),
    Parameters("MPS", parameters(sharing={"strategy": "MPS"})),
    Parameters(
        "MPS with everything",
        mps(
            defaultActiveThreadPercentage=50,
            defaultPinnedDeviceMemoryLimit="10Gi",
            defaultPerDevicePinnedMemoryLimit={"0": "1.5Gi", "GPU-4cf8db2d-06c0": 2 * MIB, "MIG-4cf8db2d": "1e9"},
            multiUser=True,
        ),
    ),
    *(Parameters(f"percentage {number}", mps(defaultActiveThreadPercentage=number)) for number in (1, 100)),
    *(Parameters(f"limit {limit!r}", mps(defaultPinnedDeviceMemoryLimit=limit))
      for limit in ("1Mi", "1048575.5", "1048576", MIB, MIB - 0.5, 1.5e10, "2e39", "+2Mi", ".5Gi", "2.M", "1E")),
    Parameters("MIG", parameters("MigDeviceConfig")),
    Parameters("MIG with time slices", parameters("MigDeviceConfig", sharing={"strategy": "TimeSlicing"})),
    Parameters("MIG with MPS", mps("MigDeviceConfig", multiUser=False)),
    *(Parameters(f"{kind} with management {value}", parameters(kind, management=value))
      for kind in ("GpuConfig", "MigDeviceConfig") for value in (False, None)),
    Parameters("nodes of the host", parameters(hostDevices=["gds", "mofed", "gdrcopy", "nvswitch"])),
    Parameters("nodes of the host for MIG with MPS", mps("MigDeviceConfig") | {"hostDevices": ["gds", "gds"]}),
    Parameters("no nodes of the host", parameters(hostDevices=[])),
    Parameters("nodes of the host are null", parameters(hostDevices=None)),
    *(Parameters(f"nodes of the host are {value!r}", parameters(hostDevices=value), ("hostDevices: must be a list",))
      for value in ("gds", {"gds": True}, True)),
    Parameters(
        "nodes of the host that nobody knows",
        parameters("MigDeviceConfig", hostDevices=["gds", "GDS", None, 1]),
        tuple(f"hostDevices[{number}]: must be gds, mofed, gdrcopy or nvswitch" for number in (1, 2, 3)),
    ),
    Parameters(
        "nodes of the host for VFIO",
        parameters("VfioDeviceConfig", hostDevices=["gds"]),
        ("hostDevices: unknown field",),
    ),
    Parameters(
        "no apiVersion", {"kind": "GpuConfig"}, (f"apiVersion: is required; use {GROUP_VERSION}",)
    ),
    Parameters("nothing", {}, (f"apiVersion: is required; use {GROUP_VERSION}",)),
    Parameters(
        "another version",
        {"apiVersion": "resource.nvidia.com/v1", "kind": "GpuConfig"},
        (f"apiVersion: 'resource.nvidia.com/v1' is not supported; use {GROUP_VERSION}",),
    ),
    Parameters(
        "a version that is a number",
        {"apiVersion": 1, "kind": "GpuConfig"},
        (f"apiVersion: must be a string; use {GROUP_VERSION}",),
    ),
    Parameters("no kind", {"apiVersion": GROUP_VERSION}, (f"kind: is required; {_KINDS}",)),
    Parameters("an unknown kind", parameters("Gpu"), (f"kind: 'Gpu' is not supported; {_KINDS}",)),
    Parameters("a kind that is an object", parameters({"a": 1}), (f"kind: must be a string; {_KINDS}",)),
    Parameters("an unknown field", parameters(shring=1), ("shring: unknown field",)),
    Parameters("two unknown fields", parameters(a=1, b={}), ("a: unknown field", "b: unknown field")),
    Parameters(
        "an unknown field of two lines",
        parameters(**{"a\nb": 1}),
        ("a b: unknown field",),
    ),
    Parameters("sharing is a list", parameters(sharing=[]), ("sharing: must be an object",)),
    Parameters("sharing is a word", parameters(sharing="MPS"), ("sharing: must be an object",)),
    Parameters("no strategy", parameters(sharing={}), ("sharing.strategy: is required",)),
    Parameters("strategy is null", parameters(sharing={"strategy": None}), ("sharing.strategy: is required",)),
    Parameters(
        "an unknown strategy",
        parameters(sharing={"strategy": "Mps"}),
        ("sharing.strategy: must be TimeSlicing or MPS",),
    ),
    Parameters(
        "a strategy that is a list",
        parameters(sharing={"strategy": ["MPS"]}),
        ("sharing.strategy: must be TimeSlicing or MPS",),
    ),
    Parameters(
        "unknown fields at every depth",
        parameters(a=1, sharing={"strategy": "MPS", "b": 1, "mpsConfig": {"c": 1}}),
        (f"{_MPS}.c: unknown field", "sharing.b: unknown field", "a: unknown field"),
    ),
    Parameters(
        "an unknown interval",
        slicing(timeSlicingConfig={"interval": "Forever"}),
        ("sharing.timeSlicingConfig.interval: must be Default, Short, Medium or Long",),
    ),
    Parameters(
        "an interval that is a number",
        slicing(timeSlicingConfig={"interval": 2}),
        ("sharing.timeSlicingConfig.interval: must be Default, Short, Medium or Long",),
    ),
    Parameters(
        "time slices are a list",
        slicing(timeSlicingConfig=[1]),
        ("sharing.timeSlicingConfig: must be an object",),
    ),
    Parameters("MPS settings with time slices", slicing(mpsConfig={}), (_NOT_MPS,)),
    Parameters("MPS settings that are null with time slices", slicing(mpsConfig=None), (_NOT_MPS,)),
    Parameters(
        "time slices with MPS",
        parameters(sharing={"strategy": "MPS", "timeSlicingConfig": {}}),
        (_NOT_SLICING,),
    ),
    Parameters(
        "an interval for MIG",
        parameters("MigDeviceConfig", sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {}}),
        ("sharing.timeSlicingConfig: unknown field",),
    ),
    Parameters(
        "time slices with MPS for MIG",
        parameters("MigDeviceConfig", sharing={"strategy": "MPS", "timeSlicingConfig": {}}),
        (_NOT_SLICING, "sharing.timeSlicingConfig: unknown field"),
    ),
    *(Parameters(f"percentage {value!r}", mps(defaultActiveThreadPercentage=value), (_PERCENTAGE,))
      for value in (0, 101, -1, 50.5, 50.0, "50", True, 2**40, [])),
    *(Parameters(f"limit {value!r}", mps(defaultPinnedDeviceMemoryLimit=value), (f"{_LIMIT}: {value} {_LEAST}",))
      for value in ("1023Ki", "0", "-1Gi", "1048575", "1m", MIB - 1, 0, -1, 0.5)),
    *(Parameters(f"limit {value!r}", mps(defaultPinnedDeviceMemoryLimit=value),
                 (f"{_LIMIT}: {value!r} {_NO_QUANTITY}",))
      for value in ("", "much", "10 Gi", "10GiB", "1e", "Gi", "0x10", "1" * 65)),
    *(Parameters(f"limit {value!r}", mps(defaultPinnedDeviceMemoryLimit=value),
                 (f"{_LIMIT}: must be a quantity such as 10Gi",))
      for value in (True, {}, ["1Gi"])),
    Parameters(
        "an exponent beyond reason",
        mps(defaultPinnedDeviceMemoryLimit="1e65"),
        (f"{_LIMIT}: '1e65' is not a quantity; its exponent is too large",),
        policy="Kubernetes takes it for a quantity",
    ),
    Parameters(
        "keys that are no devices",
        _limits(one="1Gi"),
        (f"{_BY_DEVICE}: 'one' is not a device UUID or an index",),
    ),
    *(Parameters(f"key {key!r}", _limits(**{key: "1Gi"}), (f"{_BY_DEVICE}: {key!r} is not a device UUID or an index",))
      for key in ("", "-1", "12345", "GPU-1", "gpu-4cf8db2d", "GPU-4cf8db2d.", "0 ", "٣")),
    Parameters(
        "limits by device",
        _limits(**{"0": "x", "1": 1, "GPU-4cf8db2d": "1Gi"}),
        (f"{_BY_DEVICE}.0: 'x' {_NO_QUANTITY}", f"{_BY_DEVICE}.1: 1 {_LEAST}"),
    ),
    Parameters(
        "no limit for a device",
        _limits(**{"2": None}),
        (f"{_BY_DEVICE}.2: must be a quantity such as 10Gi",),
    ),
    Parameters(
        "limits by device are a list",
        mps(defaultPerDevicePinnedMemoryLimit=["1Gi"]),
        (f"{_BY_DEVICE}: must be an object",),
    ),
    *(Parameters(f"management {value!r}", parameters(management=value), ("management: must be true or false",))
      for value in ("yes", 1, {})),
    Parameters(
        "management of a VFIO device",
        parameters("VfioDeviceConfig", management=True),
        ("management: unknown field",),
    ),
    Parameters("users that are a word", mps(multiUser="yes"), (f"{_MPS}.multiUser: must be true or false",)),
    Parameters("users that are a number", mps(multiUser=1), (f"{_MPS}.multiUser: must be true or false",)),
    Parameters(
        "several at once",
        parameters(more=1, sharing={"strategy": "MPS", "timeSlicingConfig": None,
                                    "mpsConfig": {"defaultActiveThreadPercentage": 0}}),
        (
            _NOT_SLICING,
            _PERCENTAGE,
            "more: unknown field",
        ),
    ),
    Parameters(
        "faults of a VFIO device",
        parameters("VfioDeviceConfig", iommu={"backendPolicy": "Any", "enableApiDevice": True}),
        (
            "iommu.backendPolicy: must be LegacyOnly or PreferIommuFD",
            "iommu.enableApiDevice: unknown field",
        ),
    ),
    Parameters(
        "a switch of a VFIO device",
        parameters("VfioDeviceConfig", iommu={"enableAPIDevice": "on"}),
        ("iommu.enableAPIDevice: must be true or false",),
    ),
    Parameters(
        "sharing of a VFIO device",
        parameters("VfioDeviceConfig", sharing={"strategy": "MPS", "timeSlicingConfig": {}}),
        (_NOT_SLICING, "sharing: unknown field"),
    ),
    Parameters(
        "too large",
        parameters(x="a" * 11000),
        ("the parameters have 11070 bytes; at most 10240 are allowed",),
        refused_by_server="Too long: may not be more than 10240 bytes",
    ),
    Parameters(
        "no object",
        "text",
        ("the parameters must be an object with apiVersion and kind, not str",),
        refused_by_server="JSON object",
    ),
)  # fmt: skip


def _claim(requests: list[Json], *entries: tuple[list[str], str], **fields: Any) -> Json:
    config = [
        {"requests": names, "opaque": {"driver": "gpu.nvidia.com", "parameters": parameters(kind, **fields)}}
        for names, kind in entries
    ]
    return {"requests": requests, "config": config}


def _ask(name: str, device_class: str, **fields: Any) -> Json:
    return {"name": name, "exactly": {"deviceClassName": device_class, **fields}}


def _first(name: str, **classes: str) -> Json:
    return {
        "name": name,
        "firstAvailable": [{"name": key, "deviceClassName": value} for key, value in classes.items()],
    }


_UNFIT = "does not fit device"


def _lacks(request: str) -> str:
    return f"management works only with adminAccess: true, which request '{request}' lacks"


def _managed(requests: list[Json], *entries: tuple[list[str], str]) -> Json:
    return _claim(requests, *entries, management=True)


CLAIMS = (
    Claim("each its own", _claim([_ask("a", "gpu.nvidia.com")], (["a"], "GpuConfig")), ("a", "gpu")),
    Claim("for any request", _claim([_ask("a", "gpu.nvidia.com")], ([], "MigDeviceConfig")), ("a", "gpu")),
    Claim("an unknown class", _claim([_ask("a", "team.example.com")], (["a"], "GpuConfig")), ("a", "gpu")),
    Claim(
        "parameters of a whole GPU for MIG",
        _claim([_ask("a", "mig.nvidia.com")], (["a"], "GpuConfig")),
        ("a", "mig"),
        ("config[0].requests[0]: GpuConfig does not fit request 'a' of class mig.nvidia.com",),
        _UNFIT,
    ),
    Claim(
        "parameters of MIG for whole GPUs",
        _claim(
            [_ask("a", "mig-1g.10gb.nvidia.com"), _ask("b", "mps.gpu.nvidia.com")],
            (["a"], "MigDeviceConfig"),
            (["a", "b"], "MigDeviceConfig"),
        ),
        ("b", "gpu"),
        ("config[1].requests[1]: MigDeviceConfig does not fit request 'b' of class mps.gpu.nvidia.com",),
        _UNFIT,
    ),
    Claim(
        "parameters of a whole GPU for a profile",
        _claim([_ask("a", "mig-1g.10gb.nvidia.com")], (["a"], "GpuConfig")),
        ("a", "mig"),
        ("config[0].requests[0]: GpuConfig does not fit request 'a' of class mig-1g.10gb.nvidia.com",),
        _UNFIT,
    ),
    Claim(
        "one of several classes",
        _claim([_first("a", whole="gpu.nvidia.com", part="mig.nvidia.com")], (["a/part"], "GpuConfig")),
        ("a/part", "mig"),
        ("config[0].requests[0]: GpuConfig does not fit request 'a/part' of class mig.nvidia.com",),
        _UNFIT,
    ),
    Claim(
        "all of several classes",
        _claim(
            [_first("a", one="gpu.nvidia.com", two="timeslice.gpu.nvidia.com")], (["a"], "MigDeviceConfig")
        ),
        ("a/one", "gpu"),
        (
            "config[0].requests[0]: MigDeviceConfig does not fit request 'a' "
            "of class gpu.nvidia.com, timeslice.gpu.nvidia.com",
        ),
        _UNFIT,
    ),
    Claim(
        "one of several classes by the name of all",
        _claim([_first("a", whole="gpu.nvidia.com", part="mig.nvidia.com")], (["a"], "GpuConfig")),
        ("a/part", "mig"),
        prepare=_UNFIT,
        why_later="it fits if the scheduler takes the first",
    ),
    Claim(
        "a device that is not built yet",
        _claim([_ask("a", "gpu.nvidia.com")], (["a"], "VfioDeviceConfig")),
        ("a", "gpu"),
        ("config[0].requests[0]: VfioDeviceConfig does not fit request 'a' of class gpu.nvidia.com",),
        _UNFIT,
    ),
    Claim(
        "parameters of MIG by a class of another's making",
        _claim([_ask("a", "team.example.com")], (["a"], "MigDeviceConfig")),
        ("a", "gpu"),
        prepare=_UNFIT,
        why_later="only the scheduler knows what the class gives",
    ),
    Claim(
        "management of a request with admin access",
        _managed([_ask("a", "gpu.nvidia.com", adminAccess=True)], (["a"], "GpuConfig")),
        ("a", "gpu"),
        admin_access=True,
    ),
    Claim(
        "management of MIG devices by no name",
        _managed([_ask("a", "mig.nvidia.com", adminAccess=True)], ([], "MigDeviceConfig")),
        ("a", "mig"),
        admin_access=True,
    ),
    Claim(
        "management without admin access",
        _managed(
            [_ask("a", "gpu.nvidia.com", adminAccess=True), _ask("b", "gpu.nvidia.com", adminAccess=False)],
            (["a", "b"], "GpuConfig"),
        ),
        ("b", "gpu"),
        (f"config[0].requests[1]: {_lacks('b')}",),
        _lacks("b"),
    ),
    Claim(
        "management without admin access by no name",
        _managed([_ask("a", "gpu.nvidia.com"), _ask("b", "mig.nvidia.com")], ([], "GpuConfig")),
        ("a", "gpu"),
        (f"config[0].opaque.parameters.management: {_lacks('a')}",),
        _lacks("a"),
    ),
    Claim(
        "management without admin access of a profile",
        _managed([_ask("a", "mig-1g.10gb.nvidia.com")], ([], "MigDeviceConfig")),
        ("a", "mig"),
        (f"config[0].opaque.parameters.management: {_lacks('a')}",),
        _lacks("a"),
    ),
    Claim(
        "management of one of several",
        _managed(
            [_first("a", one="gpu.nvidia.com", two="timeslice.gpu.nvidia.com")], (["a/two"], "GpuConfig")
        ),
        ("a/two", "gpu"),
        (f"config[0].requests[0]: {_lacks('a')}",),
        _lacks("a"),
    ),
    Claim(
        "management without admin access by a class of another's making",
        _managed([_ask("a", "team.example.com")], ([], "GpuConfig")),
        ("a", "gpu"),
        prepare=_lacks("a"),
        why_later="only the scheduler knows what the class gives",
    ),
)
