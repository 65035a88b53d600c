"""Decides how each device of a claim is used: exclusively, time-sliced, or through MPS with limits.

A client of an MPS daemon sees only the daemon's devices: one, or the whole GPUs of one request. A container gets all
devices of each request that it names, or of the whole claim. So a mix within one request can never work. A mix of
requests works if each container names its own; only pods say so, and the plugin cannot refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dra_driver.api.config import MpsConfig, Sharing
from dra_driver.api.resolve import ResolvedConfig
from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import DeviceResult
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.inventory import DriverVersions, OfferedDevice, WholeGpu
from dra_driver.model.mps import (
    INTERVALS,
    LostMps,
    MpsDaemonSpec,
    MpsKind,
    MpsMember,
    MpsShared,
    SharingMode,
    TimeSliced,
    usage_kind,
)
from dra_driver.model.record import ClaimRecord
from dra_driver.model.sharing import SharingPolicy, SharingRule
from dra_driver.sharing.rules.client_limits import bounded_rule, why_one_user
from dra_driver.sharing.rules.shared_device import limits_of, memory_mib_of

_MIB = 1 << 20


Allocated = tuple[DeviceResult, OfferedDevice]


@dataclass(frozen=True, slots=True)
class _Wanted:
    result: DeviceResult
    device: OfferedDevice
    rule: SharingRule | None
    versions: DriverVersions

    @property
    def enforced(self) -> SharingRule | None:
        """The rule, if this is a share and MPS enforces it."""
        has_rule = self.result.share_id is not None and self.rule is not None and self.rule.enforce == "mps"
        return self.rule if has_rule else None

    @property
    def serves_users(self) -> bool:
        rule = self.enforced
        return rule is not None and rule.multi_user and why_one_user(self.device.gpu, self.versions) is None


def sharing_modes_of(
    devices: Sequence[Allocated],
    parameters: Sequence[ResolvedConfig],
    policy: SharingPolicy,
    versions: DriverVersions,
) -> list[SharingMode]:
    """Return the mode of each device, in order. Opaque parameters decide it; a share keeps the lower of their limits
    and the policy's. Without a sharing section, it gets the policy's limits if MPS enforces them.

    Raises: ClaimRefusedError, InvalidConfigError.
    """
    for (result, _), resolved in zip(devices, parameters, strict=True):
        _refuse_parameters(result, resolved)
    bounded = [bounded_rule(policy, device, versions) if policy.entries else None for _, device in devices]
    wanted = [
        _Wanted(*each, None if bound is None else bound.rule, versions)
        for each, bound in zip(devices, bounded, strict=True)
    ]
    modes = [
        _usage(one, each, _same_entry(parameters, devices, one))
        for one, each in zip(parameters, wanted, strict=True)
    ]
    if any(isinstance(mode, MpsShared) for mode in modes):
        refuse_mixed_requests(devices, modes)
        modes = _grouped(devices, modes)
    _refuse_rival_shares(devices, modes)
    return modes


def _grouped(devices: Sequence[Allocated], usages: Sequence[SharingMode]) -> list[SharingMode]:
    """Add up the limits of shares of one device in one request, and give several GPUs of one request a common daemon,
    because the same containers get all devices of a request.
    """
    shares: dict[str, dict[str, list[MpsShared]]] = {}
    for (result, device), usage in zip(devices, usages, strict=True):
        if isinstance(usage, MpsShared):
            shares.setdefault(result.request, {}).setdefault(device.name, []).append(usage)
    added = {
        request: {name: _sum(of_device) for name, of_device in found.items()}
        for request, found in shares.items()
    }
    return [
        _together(added[result.request], device.name) if isinstance(usage, MpsShared) else usage
        for (result, device), usage in zip(devices, usages, strict=True)
    ]


def _together(members: Mapping[str, MpsShared], device: str) -> MpsShared:
    """MPS has only one percentage for all GPUs of a daemon."""
    if len(members) == 1:
        return members[device]
    usages = sorted(members.values(), key=lambda usage: usage.spec.gpu_uuid)
    specs = [usage.spec for usage in usages]
    spec = replace(
        specs[0],
        multi_user=all(one.multi_user for one in specs),
        default_active_thread_percentage=_least_of(one.default_active_thread_percentage for one in specs),
        others=tuple(MpsMember(one.device, one.gpu_uuid, one.default_memory_limit_mib) for one in specs[1:]),
    )
    percentage = _least_of(usage.active_thread_percentage for usage in usages)
    limits = tuple(usage.memory_limit_mib for usage in usages)
    return MpsShared(spec, members[device].memory_limit_mib, percentage, limits)


def _least_of(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _sum(shares: Sequence[MpsShared]) -> MpsShared:
    memory = [share.memory_limit_mib for share in shares]
    threads = [share.active_thread_percentage for share in shares]
    return MpsShared(
        shares[0].spec,
        None if None in memory else sum(one for one in memory if one is not None),
        None if None in threads else min(100, sum(one for one in threads if one is not None)),
    )


def _sharing(resolved: ResolvedConfig) -> Sharing | None:
    """Return the sharing section of a device's opaque parameters."""
    return getattr(resolved.config, "sharing", None)


def _refuse_parameters(result: DeviceResult, resolved: ResolvedConfig) -> None:
    if result.admin_access and _changes(_sharing(resolved)):
        raise ClaimRefusedError(
            f"request {result.request}: opaque parameters ({resolved.entry}) would change a device that other "
            "claims may use, which adminAccess does not allow; remove the parameters or adminAccess"
        )


def _changes(sharing: Sharing | None) -> bool:
    """Whether the parameters change a device, which a claim with adminAccess must not do."""
    if sharing is None:
        return False
    if sharing.strategy != "TimeSlicing":
        return True
    return sharing.time_slicing is not None and sharing.time_slicing.interval is not None


def _same_entry(
    parameters: Sequence[ResolvedConfig], devices: Sequence[Allocated], one: ResolvedConfig
) -> list[str]:
    """Return the sorted identities of the devices with the same parameters, whose indexes refer to this list."""
    pairs = zip(parameters, devices, strict=True)
    return sorted({_identity(device) for other, (_, device) in pairs if other.entry == one.entry})


def _identity(device: OfferedDevice) -> str:
    """Parameters name a device that gets a new UUID at each creation by its name."""
    return device.uuid or device.name


def _usage(resolved: ResolvedConfig, one: _Wanted, group: Sequence[str]) -> SharingMode:
    if one.result.admin_access:
        return None
    sharing = _sharing(resolved)
    if sharing is None:
        return _enforced(one)
    if sharing.strategy == "TimeSlicing":
        interval = sharing.time_slicing.interval if sharing.time_slicing else None
        # A MIG device has its own part of the GPU; the plugin does not set its time slices.
        if not isinstance(one.device, WholeGpu):
            return None
        return TimeSliced(None if interval is None else INTERVALS.index(interval))
    return _mps(sharing.mps or MpsConfig(), one, group)


def _enforced(one: _Wanted) -> SharingMode:
    if one.enforced is None:
        return None
    limits = limits_of(one.result, one.device, one.enforced)
    spec = _neutral_spec(one.device, one.serves_users)
    return MpsShared(spec, limits.memory_mib, limits.active_thread_percentage)


def _mps(config: MpsConfig, one: _Wanted, group: Sequence[str]) -> MpsShared:
    memory = _memory_limit(config, one, group)
    percentage = config.active_thread_percentage
    spec = _neutral_spec(one.device, _multi_user(config, one))
    if one.result.share_id is None:
        # No other claim uses the daemon, so the claim's limits also apply to clients that lost their environment
        # variables.
        own = replace(spec, default_active_thread_percentage=percentage, default_memory_limit_mib=memory)
        return MpsShared(own, memory, percentage)
    if one.rule is None:
        return MpsShared(spec, memory, percentage)
    limits = limits_of(one.result, one.device, one.rule)
    return MpsShared(
        spec,
        _least_of((memory, limits.memory_mib)),
        _least_of((percentage, limits.active_thread_percentage)),
    )


def _multi_user(config: MpsConfig, one: _Wanted) -> bool:
    """Without a value in the parameters, a share uses the setting of the device's other shares."""
    if config.multi_user is None:
        return one.serves_users
    reason = why_one_user(one.device.gpu, one.versions) if config.multi_user else None
    if reason is not None:
        raise ClaimRefusedError(
            f"request {one.result.request}: multiUser is not possible on device {one.device.name}, because {reason}, "
            "or leave multiUser out and run all pods of the device as one user"
        )
    return config.multi_user


def _neutral_spec(device: OfferedDevice, multi_user: bool) -> MpsDaemonSpec:
    """Leave out limits, so that claims with different limits can share the daemon."""
    kind: MpsKind = "gpu" if isinstance(device, WholeGpu) else "mig"
    return MpsDaemonSpec(device.name, device.uuid, kind, device.gpu.uuid, multi_user)


def _memory_limit(config: MpsConfig, one: _Wanted, group: Sequence[str]) -> int | None:
    """Return the limit in whole MiB. In the parameters, keys are identities, or indexes into the group."""
    by_uuid = _limits_by_uuid(config.per_device_memory_limits, one.result, group)
    limit = by_uuid.get(_identity(one.device), config.memory_limit)
    if limit is None:
        return None
    total = memory_mib_of(one.device)
    if total is not None and limit // _MIB > total:
        raise ClaimRefusedError(
            f"request {one.result.request}: the MPS memory limit of {limit // _MIB}Mi is above the {total}Mi of "
            f"device {one.device.name}; lower the limit"
        )
    return limit // _MIB


def _limits_by_uuid(limits: Mapping[str, int], result: DeviceResult, group: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, limit in limits.items():
        if key in group:
            found[key] = limit
        elif key.isdigit() and int(key) < len(group):
            found.setdefault(group[int(key)], limit)
        else:
            raise ClaimRefusedError(
                f"request {result.request}: defaultPerDevicePinnedMemoryLimit names {key}, but these parameters apply "
                f"only to: {', '.join(group)}"
            )
    return found


def _refuse_rival_shares(devices: Sequence[Allocated], usages: Sequence[SharingMode]) -> None:
    """Two shares of one device within a claim are like the shares of two claims."""
    for number, (result, device) in enumerate(devices):
        for (other, same), usage in zip(devices[:number], usages[:number], strict=True):
            if same.name != device.name or result.admin_access or other.admin_access:
                continue
            reason = incompatibility(usage, usages[number])
            if reason is not None:
                raise ClaimRefusedError(
                    f"requests {other.request} and {result.request} share device {device.name}: {reason}"
                )


def incompatibility(held: SharingMode, wanted: SharingMode) -> str | None:
    """Return why two claims cannot use one device in these modes at the same time. A claim without a time slice
    accepts another claim's.
    """
    match held, wanted:
        case MpsShared(spec=mine), MpsShared(spec=theirs):
            differences = "; ".join(theirs.differences(mine))
            return (
                f"one MPS daemon serves both, so their settings must not differ ({differences})"
                if differences
                else None
            )
        case LostMps(), MpsShared():
            return None  # the MPS host knows the daemon's settings, and rejects different ones
        case (MpsShared() | LostMps(), _) | (_, MpsShared() | LostMps()):
            return f"one uses {usage_kind(held)} and the other {usage_kind(wanted)}; MPS excludes other modes"
        case TimeSliced(interval=int(mine)), TimeSliced(interval=int(theirs)) if mine != theirs:
            return (
                f"all claims on a GPU have the same time slice; one requests {INTERVALS[mine]}, the other "
                f"{INTERVALS[theirs]}"
            )
        case _:
            return None


def refuse_mixed_requests(
    devices: Sequence[tuple[DeviceResult, OfferedDevice]], usages: Sequence[SharingMode]
) -> None:
    """Refuse a request with a device of an MPS daemon and another device that the daemon does not serve."""
    first: dict[str, tuple[OfferedDevice, SharingMode]] = {}
    for (result, device), usage in zip(devices, usages, strict=True):
        if result.admin_access:
            continue
        other, its_usage = first.setdefault(result.base_request, (device, usage))
        is_mps, is_other_mps = isinstance(usage, MpsShared), isinstance(its_usage, MpsShared)
        is_whole = isinstance(device, WholeGpu) and isinstance(other, WholeGpu)
        if is_mps and is_other_mps and device.name != other.name and not is_whole:
            raise ClaimRefusedError(
                f"request {result.base_request}: {other.name} and {device.name} each have an MPS daemon, and a "
                "container can reach only one of them; make a request with count 1 for each device and let each "
                "container name its own request, or use the devices without MPS"
            )
        if is_mps != is_other_mps:
            shared, plain = (device, other) if is_mps else (other, device)
            raise ClaimRefusedError(
                f"request {result.base_request}: {shared.name} is used through MPS and {plain.name} is not, but a CUDA "
                f"process that uses MPS sees only {shared.name}; use one device per request, and let each container "
                "name its request"
            )


def advice_on_requests(record: ClaimRecord, others: Iterable[ClaimRecord] = ()) -> str | None:
    """Return how containers must use a claim with MPS and several requests, or whose pods use `others` too; None if
    containers cannot go wrong.
    """
    pods = {pod.uid for pod in record.claim.pods or ()}
    related = [
        other
        for other in others
        if other.ref.uid != record.ref.uid and not pods.isdisjoint(pod.uid for pod in other.claim.pods or ())
    ]
    through = dict(_daemons_of_requests(record))
    for other in related:
        found = _daemons_of_requests(other)
        through |= {f"{other.ref.name}/{request}": devices for request, devices in found.items()}
    with_mps = [f"{request} ({devices})" for request, devices in through.items() if devices is not None]
    if not with_mps or len(set(through.values())) == 1:
        return None
    plain = [request for request, devices in through.items() if devices is None]
    rest = f", and {', '.join(plain)} without MPS" if plain else ""
    return (
        f"{'The claims of the pod have' if related else 'The claim has'} requests with MPS: "
        f"{', '.join(with_mps)}{rest}. Let each container name only one request (resources.claims[].request): a "
        "container with several requests reaches only one MPS daemon and no other GPU"
    )


def _daemons_of_requests(record: ClaimRecord) -> Mapping[str, str | None]:
    """Return None for a request without MPS."""
    held = {(one.device, one.share_id): one for one in record.devices if not one.admin_access}
    found: dict[str, str | None] = {}
    for result in record.claim.results:
        one = held.get((result.device, result.share_id))
        if one is not None and not result.admin_access:
            usage = one.usage
            found[result.base_request] = (
                ", ".join(usage.spec.devices) if isinstance(usage, MpsShared) else None
            )
    return found
