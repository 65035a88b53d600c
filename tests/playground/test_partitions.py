"""Partitionable devices in the playground control plane: the published counters decide what is allocated together."""

from __future__ import annotations

from typing import Any

import pytest
from playground.apiserver import PlaygroundApiServer
from playground.scheduler import AllocationError, PlaygroundScheduler

from dra_driver.mig.rules.counters import partitioned
from dra_driver.model.mig import GpuInstance, Placement
from dra_driver.model.sharing import NO_SHARING, SharingPolicy, SharingRule, share_all
from dra_driver.slices.rules.build import build_pool
from dra_driver.slices.rules.diff import Owner, slice_changes
from tests.fakes.samples import DRIVER, GPU_0, NODE, h100, inventory
from tests.mig.migtables import MODELS, table

GROUP = "resource.k8s.io"
OWNER = Owner(DRIVER, NODE, "node-uid")
H100, A30 = (table(MODELS[key]) for key in ("h100-sxm", "a30"))
ONE_GPU = [{"matchAttribute": f"{DRIVER}/parentUUID"}]


class Cluster:
    """One node whose slices are those that the driver would write."""

    def __init__(self, *gpus: Any, sharing: SharingPolicy = NO_SHARING) -> None:
        self.server = PlaygroundApiServer()
        self.scheduler = PlaygroundScheduler(self.server)
        pool = build_pool(inventory(*gpus), NODE, sharing)
        assert pool.faults == ()
        for index, entry in enumerate(slice_changes(pool, [], OWNER).creates):
            named = {**entry["metadata"], "name": f"{index:05x}"}
            self.server.add("resourceslices", entry | {"metadata": named}, group=GROUP)
        for kind in ("gpu", "mig"):
            expression = f"device.attributes['{DRIVER}'].type == '{kind}'"
            spec = {"selectors": [{"cel": {"expression": expression}}]}
            self.server.add("deviceclasses", {"metadata": {"name": kind}, "spec": spec}, group=GROUP)

    def claim(self, name: str, *requests: dict[str, Any], **devices: Any) -> list[str]:
        """The devices of a new claim. Raises: AllocationError."""
        spec = {"devices": {"requests": list(requests), **devices}}
        body = {"metadata": {"name": name, "namespace": "default"}, "spec": spec}
        self.server.add("resourceclaims", body, group=GROUP)
        stored = self.scheduler.allocate_claim("default", name)
        return [result["device"] for result in stored["status"]["allocation"]["devices"]["results"]]


def mig(profile: str, name: str = "mig", **fields: Any) -> dict[str, Any]:
    expression = f"device.attributes['{DRIVER}'].profile == '{profile}'"
    selectors = [{"cel": {"expression": expression}}]
    return {"name": name, "exactly": {"deviceClassName": "mig", "selectors": selectors, **fields}}


def whole(name: str = "gpu", **fields: Any) -> dict[str, Any]:
    return {"name": name, "exactly": {"deviceClassName": "gpu", **fields}}


def on_demand(number: int, *withheld: GpuInstance, raw: Any = H100) -> Any:
    return h100(number, partitioning=partitioned(raw, withheld, offers_whole=True))


def slots(devices: list[str]) -> list[str]:
    return [name.removeprefix(f"{GPU_0}-mig-") for name in devices]


def test_seven_small_devices_fill_a_gpu_from_the_end() -> None:
    cluster = Cluster(on_demand(0))
    taken = [slots(cluster.claim(f"c{number}", mig("1g.10gb"))) for number in range(7)]
    assert taken == [[f"1g10gb-19-{start}"] for start in (6, 5, 4, 3, 2, 1, 0)]
    for refused in (mig("1g.10gb"), mig("1g.10gb+me"), mig("1g.20gb"), whole()):
        with pytest.raises(AllocationError):
            cluster.claim(f"after-{len(cluster.server.objects('resourceclaims'))}", refused)


def test_four_devices_of_one_claim_lie_side_by_side_on_one_gpu() -> None:
    cluster = Cluster(on_demand(0), on_demand(1))
    cluster.claim("before", mig("1g.10gb"))
    requests = [mig("3g.40gb", "a"), mig("2g.20gb", "b"), mig("1g.10gb", "c", count=2)]
    together = cluster.claim("together", *requests, constraints=ONE_GPU)
    assert len(together) == 4
    assert len({name[: len(GPU_0)] for name in together}) == 1
    with pytest.raises(AllocationError):
        cluster.claim("eight", mig("1g.10gb", count=8), constraints=ONE_GPU)


def test_admin_access_takes_nothing_of_the_counters_but_needs_them() -> None:
    """As kube-scheduler has it, which `tests/e2e/test_mig.py` shows."""
    cluster = Cluster(on_demand(0))
    assert cluster.claim("watch", whole(adminAccess=True)) == [GPU_0]
    assert slots(cluster.claim("most", mig("7g.80gb"))) == ["7g80gb-0-0"]
    with pytest.raises(AllocationError):
        cluster.claim("watch-too", whole(adminAccess=True))


def test_devices_with_media_extensions_exclude_each_other_where_there_is_one_engine() -> None:
    cluster = Cluster(on_demand(0, raw=A30))
    assert slots(cluster.claim("one", mig("1g.6gb+me"))) == ["1g6gb-me-21-3"]
    with pytest.raises(AllocationError):
        cluster.claim("two", mig("2g.12gb+me"))
    assert slots(cluster.claim("plain", mig("2g.12gb"))) == ["2g12gb-5-0"]


def test_what_is_withheld_is_not_allocated() -> None:
    cluster = Cluster(on_demand(0, GpuInstance(1, 9, Placement(4, 4))))
    assert slots(cluster.claim("half", mig("3g.40gb"))) == ["3g40gb-9-0"]
    with pytest.raises(AllocationError):
        cluster.claim("rest", mig("1g.10gb"))


def test_shares_of_one_part_take_its_counters_once() -> None:
    sharing = share_all(SharingRule("shares", 2))
    cluster = Cluster(on_demand(0), sharing=sharing)
    taken = [slots(cluster.claim(f"c{number}", mig("3g.40gb"))) for number in range(4)]
    assert taken == [["3g40gb-9-4"], ["3g40gb-9-4"], ["3g40gb-9-0"], ["3g40gb-9-0"]]
    with pytest.raises(AllocationError):
        cluster.claim("late", mig("3g.40gb"))
