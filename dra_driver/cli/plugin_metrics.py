"""The metrics of all plugins of a cluster, through the API server's proxy to pods."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError
from functools import partial

from dra_driver.base.threads import side_by_side
from dra_driver.cli.rules.cluster_usage import PluginPod, loads_of
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import ApiClient
from dra_driver.model.gpu import GpuLoad

_AT_ONCE = 16
_ONE_S = 10.0
_ALL_S = 60.0


def read_loads(
    client: ApiClient, pods: Sequence[PluginPod], driver: str
) -> tuple[dict[tuple[str, str], GpuLoad], list[str]]:
    """The load of each device of a claim by pool and device name, and a sentence for each node that does not say it."""
    if not pods:
        return {}, [f"no pod of driver {driver} serves metrics"]
    reads = [partial(client.text, pod.path, action="read its metrics", timeout_s=_ONE_S) for pod in pods]
    loads: dict[tuple[str, str], GpuLoad] = {}
    problems: dict[str, str] = {}
    answered: set[str] = set()
    for pod, answer in zip(pods, side_by_side(reads, _AT_ONCE, _ALL_S), strict=True):
        try:
            found = loads_of(answer.result(0), driver)
        except (CancelledError, TimeoutError):
            problems[pod.node] = "there was no time left to ask it"
        except ApiRejectedError as error:
            if error.status == 403:
                right = f"ask for a Role with the verb get for pods/proxy in namespace {pod.namespace}"
                return {}, [f"this user may not read the metrics of the plugins; {right}"]
            problems[pod.node] = str(error)
        except (ApiUnavailableError, ValueError) as error:
            way = f"if a network policy protects its pod, that must let the API server reach port {pod.port}"
            problems[pod.node] = f"{error}; {way}"
        else:
            if found is None:
                problems[pod.node] = (
                    "its plugin does not measure use (--no-usage-metrics, or an older release)"
                )
                continue
            # In a rolling update a node has two pods, of which one may be about to end.
            answered.add(pod.node)
            loads |= {(pod.node, device): load for device, load in found.items()}
    return loads, [f"node {node}: {text}" for node, text in problems.items() if node not in answered]
