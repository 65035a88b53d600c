"""The kubelet's pod-resources API, as a monitoring agent in a container uses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")

_RESPONSE = grpc.protos("tests/e2e/podresources.proto").ListPodResourcesResponse


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
    for pod in _RESPONSE.FromString(answer).pod_resources:
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
