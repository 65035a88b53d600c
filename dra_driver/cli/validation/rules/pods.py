"""The faults of pods' claims, and the claims that the scheduler creates for extended resources such as
`nvidia.com/gpu: 2`.

Based on Kubernetes 1.37: the validation of Pods, and kube-scheduler's createRequestsAndMappings. A DeviceClass serves
its `extendedResourceName`, and always `deviceclass.resource.kubernetes.io/<its name>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

from dra_driver.api.config import DeviceType
from dra_driver.api.resolve import config_for_result
from dra_driver.cli.validation.rules.manifests import alternatives, class_type, requests_of
from dra_driver.cli.validation.rules.schema import amount, distinct, faults, model_shape
from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import DeviceConfig, DeviceResult
from dra_driver.model.schema import Anything, JsonObject, ListField, MapField, Object, Scalar
from dra_driver.model.units import parse_quantity

IMPLICIT = "deviceclass.resource.kubernetes.io/"
_DEEPEST = 16
_PLACES = ("initContainers", "containers")
_STANDARD = ("cpu", "memory", "ephemeral-storage")


def pod_specs(content: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, JsonObject]]:
    """Yield path and spec of the pods in an object of any kind, such as `spec.template.spec` of a Deployment."""
    if depth > _DEEPEST:
        return
    if isinstance(content, list):
        for number, inner in enumerate(content):
            yield from pod_specs(inner, f"{path}[{number}]", depth + 1)
    elif isinstance(content, dict) and depth == 0:
        yield from pod_specs(content.get("spec"), "spec", 1)
    elif isinstance(content, dict) and path.endswith("spec") and isinstance(content.get("containers"), list):
        yield path, content
    elif isinstance(content, dict):
        for name, inner in content.items():
            yield from pod_specs(inner, f"{path}.{name}", depth + 1)


@cache
def _pod_shape() -> Object:
    resources = model_shape("V1ResourceRequirements")
    # `claims` is often written under limits or requests by mistake; it belongs next to them.
    amounts = MapField(Scalar(object, amount), lambda name: name != "claims", "{}")
    resources = Object({**resources.fields, "limits": amounts, "requests": amounts})
    containers = ListField(
        Object({"resources": resources, "env": ListField(Anything(), None)}, open=True), None
    )
    entries = ListField(model_shape("V1PodResourceClaim"), None, test=distinct)
    return Object(
        {"initContainers": containers, "containers": containers, "resourceClaims": entries}, open=True
    )


def pod_faults(spec: JsonObject, path: str) -> list[str]:
    found = faults(spec, _pod_shape(), path)
    if found:
        return found
    entries = spec.get("resourceClaims") or []
    for number, entry in enumerate(entries):
        given = [key for key in ("resourceClaimName", "resourceClaimTemplateName") if entry.get(key)]
        if len(given) != 1:
            text = "exactly one of `resourceClaimName` and `resourceClaimTemplateName` is required"
            found.append(f"{path}.resourceClaims[{number}]: {text}")
    names = {entry["name"] for entry in entries}
    for here, claim in _used_claims(spec):
        if claim["name"] not in names:
            known = ", ".join(sorted(names)) or "none"
            text = f"there is no entry {claim['name']!r} in resourceClaims; the entries are: {known}"
            found.append(f"{path}.{here}.name: {text}")
    return [*found, *_resource_faults(spec, path)]


def _resource_faults(spec: JsonObject, path: str) -> Iterator[str]:
    for place, container in _containers(spec):
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        for kind, amounts in (("requests", requests), ("limits", limits)):
            for name, wanted in amounts.items():
                here = f"{path}.{place}.resources.{kind}.{name}"
                if "/" not in str(name):
                    yield from _not_standard(str(name), here)
                elif not _is_whole(wanted):
                    text = f"{wanted!r} is not a whole number; a device cannot be divided"
                    yield f"{here}: {text}"
                elif kind == "requests" and str(limits.get(name)) != str(wanted):
                    text = "an extended resource needs a limit that is equal to the request"
                    yield f"{here}: {text}; write it under limits alone"


def _containers(spec: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    for place in _PLACES:
        for number, container in enumerate(spec.get(place) or ()):
            yield f"{place}[{number}]", container


def _claims_in(container: JsonObject) -> Sequence[JsonObject]:
    return (container.get("resources") or {}).get("claims") or ()


def _not_standard(name: str, path: str) -> Iterator[str]:
    if name not in _STANDARD and not name.startswith("hugepages-"):
        near = ["nvidia.com/gpu"] if "gpu" in name else get_close_matches(name, _STANDARD, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        yield f"{path}: is not a Kubernetes resource and has no domain{meant}"


def _is_whole(amount: Any) -> bool:
    try:
        return parse_quantity(str(amount)).denominator == 1
    except InvalidConfigError:
        return False


def claims_of(spec: JsonObject) -> list[tuple[str, str, str]]:
    return [
        (str(entry["name"]), "ResourceClaim", str(entry["resourceClaimName"]))
        if entry.get("resourceClaimName")
        else (str(entry["name"]), "ResourceClaimTemplate", str(entry["resourceClaimTemplateName"]))
        for entry in spec.get("resourceClaims") or ()
    ]


def with_claims_once(spec: JsonObject) -> JsonObject:
    """Merge the entries for one ResourceClaim of a valid pod: they are one allocation."""
    kept: dict[str, JsonObject] = {}
    same: dict[str, str] = {}
    for entry in spec.get("resourceClaims") or ():
        claim = entry.get("resourceClaimName")
        key = f"ResourceClaim {claim}" if claim else entry["name"]
        same[entry["name"]] = kept.setdefault(key, entry)["name"]

    def renamed(container: JsonObject) -> JsonObject:
        resources = container.get("resources") or {}
        claims = [used | {"name": same[used["name"]]} for used in _claims_in(container)]
        return container | {"resources": resources | {"claims": claims}}

    containers = {place: list(map(renamed, spec[place])) for place in _PLACES if spec.get(place)}
    return spec | containers | {"resourceClaims": [*kept.values()]}


def node_name_texts(spec: JsonObject, path: str, lacking: Sequence[str]) -> list[str]:
    if not spec.get("nodeName") or not lacking:
        return []
    return [
        f"{path}.nodeName: kube-scheduler does not see a pod with nodeName and allocates no devices for it, so the "
        f"kubelet refuses the pod ({', '.join(lacking)}); write nodeSelector: "
        f"{{kubernetes.io/hostname: {spec['nodeName']}}} instead"
    ]


def unused_claims(spec: JsonObject) -> list[str]:
    used = {claim["name"] for _, claim in _used_claims(spec)}
    return [entry["name"] for entry in spec.get("resourceClaims") or () if entry["name"] not in used]


def unknown_requests(spec: JsonObject, entry: str, claim: JsonObject) -> list[str]:
    """Return requests that containers name but the claim lacks. `entry` is the claim's name in the pod."""
    there = [str(request["name"]) for request in requests_of(claim)]
    return [
        f"{here}.request: the claim has no request {used['request']!r}, so the container would get no device; the "
        f"requests are: {', '.join(there) or 'none'}"
        for here, used in _used_claims(spec)
        if used["name"] == entry and used.get("request") and used["request"] not in there
    ]


def mps_requests(claim: JsonObject, classes: Mapping[str, JsonObject], driver: str) -> Mapping[str, bool]:
    """Return which requests without adminAccess use MPS, through parameters of the claim or of their classes."""
    of_claim = _configs("FromClaim", claim.get("devices") or {})
    found: dict[str, bool] = {}
    for request in requests_of(claim):
        for name, body in alternatives(request):
            if body.get("adminAccess"):
                continue
            of_class = _configs("FromClass", classes.get(body["deviceClassName"], {}).get("spec") or {})
            kind = class_type(body["deviceClassName"])
            uses = any(
                _uses_mps(name, [*of_class, *of_claim], driver, one)
                for one in (("gpu", "mig") if kind is None else (kind,))
            )
            found[request["name"]] = found.get(request["name"], False) or uses
    return found


def _configs(source: Literal["FromClass", "FromClaim"], configured: JsonObject) -> list[DeviceConfig]:
    entries = (entry for entry in configured.get("config") or () if entry.get("opaque"))
    return [
        DeviceConfig(
            source,
            tuple(entry.get("requests") or ()),
            entry["opaque"]["driver"],
            entry["opaque"].get("parameters"),
        )
        for entry in entries
    ]


def _uses_mps(request: str, configs: Sequence[DeviceConfig], driver: str, kind: DeviceType) -> bool:
    try:
        config = config_for_result(DeviceResult(request, driver, "", ""), configs, driver, kind).config
    except InvalidConfigError:
        return False
    sharing = getattr(config, "sharing", None)
    return sharing is not None and sharing.strategy == "MPS"


def mps_hints(
    spec: JsonObject, claims: Mapping[str, Mapping[str, bool]], extended: Mapping[str, bool]
) -> Iterator[str]:
    """Yield the containers of a valid pod that get a device with MPS and another one.

    `claims` has results of `mps_requests` by entry of `resourceClaims`.
    """
    for index, (_, container) in enumerate(_containers(spec)):
        used = {
            f"the request {name} of claim {one['name']}": uses
            for one in _claims_in(container)
            for name, uses in claims.get(one["name"], {}).items()
            if one.get("request") in (None, "", name)
        }
        by_limit = [uses for name, uses in extended.items() if name.startswith(f"container-{index}-")]
        used |= {"its extended resource": any(by_limit)} if by_limit else {}
        with_mps = [name for name, uses in used.items() if uses]
        if with_mps and len(used) > 1:
            others = [name for name in used if name != with_mps[0]]
            yield (
                f"container {container.get('name')}: {with_mps[0]} uses MPS, and a CUDA process that uses MPS reaches "
                f"only its daemon's devices, so not those of {' or '.join(others)}; use one container for each"
            )


def trap_hints(spec: JsonObject, entry: str, *, uses_mps: bool) -> Iterator[str]:
    users = set()
    for place, container in _containers(spec):
        if entry not in [one["name"] for one in _claims_in(container)]:
            continue
        who = f"container {container.get('name')}"
        user = (container.get("securityContext") or spec.get("securityContext") or {}).get("runAsUser")
        users |= {user} if place.startswith("containers") else set()
        for mount in container.get("volumeMounts") or () if uses_mps else ():
            if isinstance(mount, dict) and str(mount.get("mountPath")).rstrip("/") == "/dev/shm":  # noqa: S108
                yield (
                    f"{who}: the claim {entry} uses MPS, whose /dev/shm hides the volume {mount.get('name')} that "
                    "the container mounts there; remove the volume"
                )
        for variable in container.get("env") or ():
            if isinstance(variable, dict) and variable.get("name") == "NVIDIA_VISIBLE_DEVICES":
                yield (
                    f"{who}: NVIDIA_VISIBLE_DEVICES={variable.get('value')} gives the container other GPUs than "
                    "its claim if NVIDIA's container runtime is the default; remove the variable"
                )
    if uses_mps and len(users) > 1:
        yield (
            f"containers of several users use the claim {entry}, and an MPS daemon without multiUser serves one user "
            "at a time: the others wait; use the same runAsUser, or set multiUser (docs/sharing.md)"
        )


def _used_claims(spec: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    for place, container in _containers(spec):
        for index, claim in enumerate(_claims_in(container)):
            yield f"{place}.resources.claims[{index}]", claim


def served_resources(classes: Iterable[JsonObject]) -> Mapping[str, str]:
    """Return resource names with their class. The newer of two classes serves a resource."""
    ordered = sorted(classes, key=lambda entry: str(entry["metadata"].get("creationTimestamp") or ""))
    explicit = {
        entry["spec"]["extendedResourceName"]: entry["metadata"]["name"]
        for entry in ordered
        if (entry.get("spec") or {}).get("extendedResourceName")
    }
    return {IMPLICIT + entry["metadata"]["name"]: entry["metadata"]["name"] for entry in ordered} | explicit


def extended_requests(spec: JsonObject, served: Mapping[str, str]) -> list[JsonObject]:
    """Return the requests of the claim that the scheduler creates for a pod.

    Init containers that exit share devices with later containers, so only the one that needs most in addition counts.
    """
    initial = [one for one in spec.get("initContainers") or () if isinstance(one, dict)]
    containers = [*initial, *(one for one in spec.get("containers") or () if isinstance(one, dict))]
    short = {index for index, one in enumerate(initial) if one.get("restartPolicy") != "Always"}
    found: list[JsonObject] = []
    for resource in sorted(
        {name for one in containers for name in requested_resources(one) if name in served}
    ):
        amounts = [requested_resources(one).get(resource, 0) for one in containers]
        kept = [0 if index in short else amount for index, amount in enumerate(amounts)]
        more = {index: amounts[index] - sum(kept[index:]) for index in sorted(short)}
        most = max(more, key=lambda index: more[index], default=None)
        if most is not None and more[most] > 0:
            kept[most] = more[most]
        for index, count in enumerate(kept):
            if count > 0:
                number = sorted(_resources(containers[index])).index(resource)
                exactly = {
                    "deviceClassName": served[resource], "allocationMode": "ExactCount", "count": count
                }  # fmt: skip
                found.append({"name": f"container-{index}-request-{number}", "exactly": exactly})
    return sorted(found, key=lambda request: str(request["name"]))


def requested_resources(container: JsonObject) -> dict[str, int]:
    """Skip amounts that are not whole numbers."""
    return {
        str(name): int(str(amount))
        for name, amount in _resources(container).items()
        if str(amount).isascii() and str(amount).isdecimal()
    }


def _resources(container: JsonObject) -> JsonObject:
    resources = container.get("resources")
    resources = resources if isinstance(resources, dict) else {}
    parts = [part for part in (resources.get("requests"), resources.get("limits")) if isinstance(part, dict)]
    return {str(name): amount for part in parts for name, amount in part.items()}
