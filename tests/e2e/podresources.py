"""The kubelet's pod-resources API, as a monitoring agent in the container asks it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")

_TEXT, _MESSAGE = (
    descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
)
_ONE, _MANY = (
    descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
    descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
)
# Name, number, and the message of a field that is a list of messages. A client knows more fields than it needs.
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "ListPodResourcesResponse": [("pod_resources", 1, "PodResources")],
    "PodResources": [("name", 1, ""), ("namespace", 2, ""), ("containers", 3, "ContainerResources")],
    "ContainerResources": [("name", 1, ""), ("dynamic_resources", 5, "DynamicResource")],
    "DynamicResource": [("claim_name", 2, ""), ("claim_namespace", 3, ""), ("claim_resources", 4, "ClaimResource")],
    "ClaimResource": [
        ("cdi_devices", 1, "CDIDevice"), ("driver_name", 2, ""), ("pool_name", 3, ""), ("device_name", 4, ""),
        ("share_id", 5, ""),
    ],
    "CDIDevice": [("name", 1, "")],
}  # fmt: skip


@dataclass(frozen=True)
class Use:
    """A device of a claim in a container."""

    namespace: str
    pod: str
    container: str
    claim: str
    claim_namespace: str
    driver: str
    pool: str
    device: str
    share_id: str
    cdi_devices: tuple[str, ...]


def uses() -> list[Use]:
    """All devices of claims that containers on the node have, as the kubelet says it."""
    with grpc.insecure_channel(f"unix:{SOCKET}") as channel:
        ask = channel.unary_unary("/v1.PodResourcesLister/List")
        return list(_uses(ask(b"", timeout=30, wait_for_ready=True)))


def _uses(answer: bytes) -> Iterator[Use]:
    for pod in _response().FromString(answer).pod_resources:
        for container in pod.containers:
            for claim in container.dynamic_resources:
                for one in claim.claim_resources:
                    yield Use(
                        pod.namespace,
                        pod.name,
                        container.name,
                        claim.claim_name,
                        claim.claim_namespace,
                        one.driver_name,
                        one.pool_name,
                        one.device_name,
                        one.share_id,
                        tuple(device.name for device in one.cdi_devices),
                    )


def _response():  # type: ignore[no-untyped-def]
    """In a pool of its own: other APIs of the kubelet have a package v1 too."""
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, inner in fields:
            kind = {"type": _MESSAGE, "type_name": f".v1.{inner}"} if inner else {"type": _TEXT}
            message.field.add(name=field, number=number, label=_MANY if inner else _ONE, **kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))
