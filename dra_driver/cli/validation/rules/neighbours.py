"""Objects that are not ours and have to do with GPUs: what they are, and what to write instead."""

from __future__ import annotations

from dra_driver.model.schema import JsonObject

_OLD = (
    "is of the old API of NVIDIA's DRA driver, before Kubernetes 1.31; write a ResourceClaim of resource.k8s.io/v1, "
    "and sharing under spec.devices.config as opaque parameters of resource.nvidia.com/v1beta1"
)
_KUBEVIRT = "is of KubeVirt; its GPUs come from the ResourceClaims that it names (docs/passthrough.md)"
_KINDS = {
    "GpuClaimParameters": _OLD,
    "MigDeviceClaimParameters": _OLD,
    "ComputeInstanceParameters": _OLD,
    "ResourceClass": "was replaced by DeviceClass in Kubernetes 1.31; the chart installs the classes of this driver",
    "PodSchedulingContext": "is gone since Kubernetes 1.32; nothing replaces it",
    "ComputeDomain": "is of NVIDIA's driver for compute domains, which runs beside this one; it is not judged here",
    "ClusterPolicy": "is of NVIDIA's GPU operator; docs/gpu-operator.md says which of its parts must be off",
    "NVIDIADriver": "is of NVIDIA's GPU operator, which installs the NVIDIA driver; it is not judged here",
    "ResourceSlice": "is written by the plugin of a node; `gpu-dra-driver inspect` prints what it would write",
    "VirtualMachine": _KUBEVIRT,
    "VirtualMachineInstance": _KUBEVIRT,
}


def neighbour(content: JsonObject) -> str | None:
    """What an object is that is not judged; None if it has nothing to do with GPUs."""
    kind = str(content.get("kind"))
    return f"{kind} {_KINDS[kind]}" if kind in _KINDS else None


def misspelled_kind(content: JsonObject, known: tuple[str, ...]) -> str | None:
    """The kind that is meant by one in other letters, such as `resourceclaim`."""
    kind = str(content.get("kind"))
    return next((one for one in known if one.lower() == kind.lower() and one != kind), None)
