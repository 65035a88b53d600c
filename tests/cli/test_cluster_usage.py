"""How busy the devices of a cluster are, from the metrics of the plugins."""

from __future__ import annotations

from typing import Any

from prometheus_client.exposition import generate_latest

from dra_driver.cli.rules.cluster_usage import Used, loads_of, plugin_pod, used_together
from dra_driver.cli.rules.cluster_view import ClusterDevice, Holder, by_user
from dra_driver.model.gpu import GpuLoad
from dra_driver.reporting.metrics import Metrics
from tests.fakes.samples import DRIVER, GPU_0, MIG_1G, NODE
from tests.fakes.scrapes import complete_metrics
from tests.fakes.tables import tabled

GIB = 1 << 30


def test_loads_are_read_from_the_metrics_of_a_plugin() -> None:
    text = generate_latest(complete_metrics().registry).decode()
    assert loads_of(text, DRIVER) == {
        GPU_0: GpuLoad(60 * GIB, 80 * GIB, 70), MIG_1G: GpuLoad(1 * GIB, 10 * GIB, 0),
    }  # fmt: skip
    assert loads_of(text, "gpu.example.com") == {}


def test_plugin_that_measures_nothing_is_not_one_without_claims() -> None:
    metrics = Metrics(DRIVER, NODE, list)
    assert loads_of(generate_latest(metrics.registry).decode(), DRIVER) is None


def pod(**changes: Any) -> dict[str, Any]:
    env = {"DRIVER_NAME": DRIVER, "HTTP_ENDPOINT": "[::]:9090", **changes}
    container = {"env": [{"name": name, "value": value} for name, value in env.items() if value is not None]}
    return {
        "metadata": {"name": "p", "namespace": "gpus"},
        "spec": {"nodeName": "n", "containers": [{}, container]},
    }


@tabled("changes", "spec", "expected")
def test_pod_of_a_plugin_is_known_by_its_environment(
    changes: dict[str, Any], spec: dict[str, Any] | None, expected: str | None
) -> None:
    found = pod(**changes)
    plugin = plugin_pod({**found, "spec": {} if spec is None else {**found["spec"], **spec}}, DRIVER)
    assert (plugin and plugin.path) == expected


@tabled("loads", "expected")
def test_use_of_several_devices(loads: list[list[int | None] | None], expected: list[int | None]) -> None:
    read = [one and GpuLoad(one[0] * GIB, one[1] * GIB, one[2]) for one in loads]
    percent, used, total, wasted, unknown = expected
    assert used_together([one or None for one in read], is_shared=False) == Used(
        percent, used * GIB, total * GIB, wasted * GIB, unknown
    )


def test_use_of_a_device_that_others_share_says_so() -> None:
    one, other = (Holder(team, f"claim-{team}", f"uid-{team}", ()) for team in ("a", "b"))
    device = ClusterDevice("n", "n", GPU_0, "gpu", "H100", None, True, "allocated", (), (one, other))
    alone = ClusterDevice("n", "n", "gpu-1", "gpu", "H100", None, False, "allocated", (), (one,))
    loads = {("n", GPU_0): GpuLoad(0, 80 * GIB, 50), ("n", "gpu-1"): GpuLoad(0, 80 * GIB, 0)}
    rows = {row.name: row.used for row in by_user([device, alone], "claim", {}, loads)}
    assert rows == {
        "claim-a": Used(25, 0, 160 * GIB, 120 * GIB, is_shared=True),
        "claim-b": Used(50, 0, 80 * GIB, 40 * GIB, is_shared=True),
    }
    assert list(rows) == ["claim-a", "claim-b"]
    assert [row.used for row in by_user([alone], "namespace", {})] == [None]
    [row] = by_user([alone], "namespace", {}, loads)
    assert row.used == Used(0, 0, 80 * GIB, 80 * GIB)
