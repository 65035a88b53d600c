"""Objects of a cluster that documents need."""

from __future__ import annotations

from collections.abc import Sequence

from dra_driver.cli.validation.documents import Document
from dra_driver.cli.validation.rules.pods import claims_of, pod_faults, pod_specs
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import ApiClient, is_not_found
from dra_driver.kube.endpoint import Endpoint
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.schema import JsonObject

Reference = tuple[str, str, str]
"""Kind, namespace and name."""

_PLURALS = {"ResourceClaim": "resourceclaims", "ResourceClaimTemplate": "resourceclaimtemplates"}
_TIMEOUT_S = 15.0


@dataclass(slots=True)
class ClusterObjects:
    """`classes` is None if they cannot be read. `found` has the claims and templates that pods name but no file
    contains, None if they do not exist. `problem` is the first read error.
    """

    server: str
    problem: str | None = None
    classes: list[JsonObject] | None = None
    found: dict[Reference, JsonObject | None] = field(default_factory=dict)


def read_cluster(endpoint: Endpoint, wanted: Sequence[Reference]) -> ClusterObjects:
    """Stop at the first error, which becomes `problem`."""
    client, cluster = ApiClient(endpoint, timeout_s=_TIMEOUT_S), ClusterObjects(endpoint.server)
    try:
        classes = client.call("GET", "deviceclasses", action="list DeviceClasses")
        cluster.classes = list(classes.get("items") or ())
        for kind, namespace, name in wanted:
            action = f"get {kind} {namespace}/{name}"
            try:
                one = client.call("GET", _PLURALS[kind], action=action, namespace=namespace, name=name)
            except ApiRejectedError as error:
                if not is_not_found(error):
                    raise
                cluster.found[kind, namespace, name] = None
            else:
                cluster.found[kind, namespace, name] = {
                    "kind": kind, "apiVersion": "resource.k8s.io/v1", **one
                }  # fmt: skip
    except (ApiUnavailableError, ApiRejectedError) as error:
        cluster.problem = str(error)
    return cluster


def references(documents: Sequence[Document], namespace: str) -> list[Reference]:
    there = set()
    wanted: dict[Reference, None] = {}
    for document in documents:
        content = document.content
        if not isinstance(content, dict):
            continue
        metadata = document.metadata
        own = str(metadata.get("namespace") or namespace)
        there.add((str(content.get("kind")), own, str(metadata.get("name"))))
        for path, spec in pod_specs(content):
            if not pod_faults(spec, path):
                wanted |= dict.fromkeys((kind, own, name) for _, kind, name in claims_of(spec))
    return [reference for reference in wanted if reference not in there]
