"""The allocator of `validate` and of the playground against that of kube-scheduler, on every simulated machine."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import localcluster
import pytest
from playground.pools import free_devices

from dra_driver.cli.inspect import slices_to_publish
from dra_driver.cli.machine import CommandMachine
from dra_driver.cli.scratch import scratch_settings
from dra_driver.cli.validation.rules import allocator
from dra_driver.cli.validation.rules.allocator import AllocationError, UndecidedError, allocate
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.model.units import parse_quantity
from dra_driver.simulator.catalogue import machine_names

Json = dict[str, Any]

NODE = "worker-1"
DRIVER = "gpu.nvidia.com"
CASES = 2000
SETTINGS: list[Json] = [
    {},
    {"dynamic_mig": True, "consumable_shares": "memory"},
    {"dynamic_mig": True, "passthrough": True, "consumable_shares": "2"},
]
OTHER = "other.example.com"
UNDECIDED = "undecided"
Answer = list[list[Any]] | str | None
"""The results of each claim of a pod, None for a pod that gets nothing."""


def published(machine: str, settings: Json) -> list[Json]:
    """The slices of an empty machine."""
    given = {"simulate": machine, "node_name": NODE, **settings}
    with scratch_settings("allocator", given, None) as resolved:
        slices, _, _ = slices_to_publish(CommandMachine(resolved), is_empty=True)
    return [entry | {"metadata": {"name": f"slice-{number:04d}"}} for number, entry in enumerate(slices)]


def classes_of(slices: list[Json]) -> list[Json]:
    """The classes of the chart, and others that select more and less."""
    attributes = [device["attributes"] for entry in slices for device in entry["spec"].get("devices") or ()]
    profiles = {one["profile"]["string"] for one in attributes if "profile" in one}
    made = {
        "any": [f'device.driver == "{DRIVER}"'],
        "everything": [],
        "other": [f'device.driver == "{OTHER}"'],
    }
    own = [
        {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": text}} for text in texts]}}
        for name, texts in made.items()
    ]
    return [*standard_classes(DRIVER, profiles).values(), *own]


class Changed:
    """A machine as it may become: devices get taints, pools are split, other drivers and nodes have some."""

    def __init__(self, chance: random.Random, slices: list[Json]) -> None:
        self.chance = chance
        self.slices = json.loads(json.dumps(slices))
        if chance.random() < 0.4:
            self.taint()
        if chance.random() < 0.3:
            self.split()
        if chance.random() < 0.3:
            self.slices += self.pool_of_another_driver()
        if chance.random() < 0.1:
            self.slices += self.broken_pool()
        chance.shuffle(self.slices)

    def taint(self) -> None:
        for entry in self.slices:
            for device in entry["spec"].get("devices") or ():
                if self.chance.random() < 0.3:
                    taint = {"key": self.chance.choice(["a/xid", "a/cleanup"])}
                    taint["effect"] = self.chance.choice(["None", "NoSchedule", "NoExecute"])
                    if self.chance.random() < 0.5:
                        taint["value"] = "79"
                    device["taints"] = [taint]

    def split(self) -> None:
        """Put some of the devices into another slice of the pool."""
        for entry in list(self.slices):
            devices = entry["spec"].get("devices") or []
            if len(devices) > 1:
                place = self.chance.randrange(1, len(devices))
                other = json.loads(json.dumps(entry))
                other["metadata"]["name"] += self.chance.choice(["-b", "-a"])
                other["spec"].pop("sharedCounters", None)
                entry["spec"]["devices"], other["spec"]["devices"] = devices[:place], devices[place:]
                self.slices.append(other)
        for entry in self.slices:
            entry["spec"]["pool"]["resourceSliceCount"] = len(self.slices)

    def device(self, number: int) -> Json:
        chance = self.chance
        made: Json = {"name": f"d{number}", "attributes": {}, "capacity": {}}
        if chance.random() < 0.8:
            made["attributes"]["kind"] = {"string": chance.choice(["x", "y"])}
        if chance.random() < 0.8:
            made["attributes"]["index"] = {"int": chance.randrange(3)}
        if chance.random() < 0.5:
            made["attributes"]["good"] = {"bool": chance.random() < 0.5}
        if chance.random() < 0.5:
            made["attributes"]["release"] = {"version": chance.choice(["1.0.0", "1.2.0", "2.0.0"])}
        if chance.random() < 0.7:
            made["capacity"]["memory"] = {"value": chance.choice(["4Gi", "8Gi"])}
            if chance.random() < 0.5:
                limits = {"min": "1Gi", "max": "4Gi", "step": chance.choice(["1Gi", "1536Mi"])}
                kept = {key: limits[key] for key in limits if key == "min" or chance.random() < 0.7}
                made["capacity"]["memory"]["requestPolicy"] = {"default": "1Gi", "validRange": kept}
        if chance.random() < 0.4:
            policy = {"default": "2", "validValues": ["1", "2", "4"]}
            made["capacity"]["slots"] = {"value": "4", "requestPolicy": policy}
        if chance.random() < 0.5:
            made["allowMultipleAllocations"] = True
        if chance.random() < 0.5:
            counters = {"room": {"value": chance.choice(["1", "2", "500m"])}}
            made["consumesCounters"] = [{"counterSet": "set", "counters": counters}]
        return made

    def pool_of_another_driver(self) -> list[Json]:
        """Devices of this node, of all nodes, of another one, or of several, with counters that they share."""
        pool = {"name": self.chance.choice(["a", "z"]), "generation": 2, "resourceSliceCount": 3}
        spec: Json = {"driver": OTHER, "pool": pool}
        where = [
            {"nodeName": NODE},
            {"allNodes": True},
            {"nodeName": "elsewhere"},
            {"perDeviceNodeSelection": True},
        ]
        sets = [{"name": "set", "counters": {"room": {"value": self.chance.choice(["2", "3"])}}}]
        made = [
            {"metadata": {"name": "counters"}, "spec": {**spec, "nodeName": NODE, "sharedCounters": sets}}
        ]
        for number in range(2):
            chosen = self.chance.choice(where)
            devices = [self.device(10 * number + index) for index in range(self.chance.randrange(1, 4))]
            if "perDeviceNodeSelection" in chosen:
                devices = [device | self.chance.choice(where[:3]) for device in devices]
            made.append(
                {"metadata": {"name": f"other-{number}"}, "spec": {**spec, **chosen, "devices": devices}}
            )
        if self.chance.random() < 0.3:  # a remaining slice of an older generation
            old = {**pool, "generation": 1}
            made.append(
                {
                    "metadata": {"name": "old"},
                    "spec": {**spec, "pool": old, "nodeName": NODE, "devices": [self.device(5)]},
                }
            )
        return made

    def broken_pool(self) -> list[Json]:
        """One that is not complete, has one name twice, or wants counters that are not there."""
        sort = self.chance.randrange(3)
        pool = {"name": "broken", "generation": 1, "resourceSliceCount": 2 if sort == 0 else 1}
        devices = [self.device(0), self.device(0 if sort == 1 else 1)]
        if sort == 2:
            devices[0]["consumesCounters"] = [{"counterSet": "none", "counters": {"room": {"value": "1"}}}]
        else:
            devices = [
                {key: value for key, value in one.items() if key != "consumesCounters"} for one in devices
            ]
        spec = {"driver": OTHER, "nodeName": NODE, "pool": pool, "devices": devices}
        return [{"metadata": {"name": "broken"}, "spec": spec}]


class Claims:
    """Random claims for a machine."""

    def __init__(self, chance: random.Random, slices: list[Json], classes: list[Json]) -> None:
        self.chance = chance
        self.devices = [
            (entry["spec"]["driver"], device)
            for entry in slices
            for device in entry["spec"].get("devices") or ()
        ]
        self.classes = [one["metadata"]["name"] for one in classes]
        kinds = {str(device["attributes"].get("type", {}).get("string")) for _, device in self.devices}
        self.usual = ["any", *sorted(f"{kind}.nvidia.com" for kind in kinds & {"gpu", "mig"})]
        self.usual += ["shares.gpu.nvidia.com"] * any(
            "allowMultipleAllocations" in device for _, device in self.devices
        )

    def pods(self) -> list[list[Json]]:
        count = self.chance.choice([1, 1, 1, 2, 3, 5])
        return [
            [self.claim(number) for number in range(self.chance.choice([1, 1, 1, 2, 3]))]
            for _ in range(count)
        ]

    def claim(self, number: int) -> Json:
        requests = [self.request(name) for name in ("a", "b", "c")[: self.chance.choice([1, 1, 1, 2, 3])]]
        devices: Json = {"requests": requests}
        if self.chance.random() < 0.3:
            devices["constraints"] = [self.constraint(requests) for _ in range(self.chance.choice([1, 1, 2]))]
        return {"metadata": {"name": f"claim-{number}", "namespace": "x"}, "spec": {"devices": devices}}

    def request(self, name: str) -> Json:
        if self.chance.random() < 0.2:
            parts = [{"name": f"s{number}", **self.body()} for number in range(self.chance.choice([2, 2, 3]))]
            return {"name": name, "firstAvailable": parts}
        body = self.body()
        if self.chance.random() < 0.15:
            body["adminAccess"] = True
        return {"name": name, "exactly": body}

    def body(self) -> Json:
        chance = self.chance
        name = chance.choice(self.usual if chance.random() < 0.8 else self.classes)
        if chance.random() < 0.02:
            name = "absent"
        body: Json = {"deviceClassName": name}
        if chance.random() < 0.15:
            body["allocationMode"] = "All"
        else:
            count = (
                chance.choice([1, 1, 1, 1, 2, 2, 3, 4, 8])
                if chance.random() < 0.97
                else chance.choice([20, 33])
            )
            body |= {"allocationMode": "ExactCount", "count": count}
        if chance.random() < 0.35:
            body["selectors"] = [
                {"cel": {"expression": self.selector()}} for _ in range(chance.choice([1, 1, 2]))
            ]
        if chance.random() < 0.3:
            body["tolerations"] = [self.toleration()]
        if chance.random() < 0.2:
            body["capacity"] = {"requests": self.capacity()}
        return body

    def toleration(self) -> Json:
        chance = self.chance
        if chance.random() < 0.5:
            made: Json = {"operator": "Exists"}
            if chance.random() < 0.6:
                made["key"] = chance.choice(["a/xid", "a/cleanup"])
        else:
            made = {"operator": "Equal", "key": chance.choice(["a/xid", "a/cleanup"])}
            if chance.random() < 0.6:
                made["value"] = chance.choice(["79", "80"])
        if chance.random() < 0.4:
            made["effect"] = chance.choice(["NoSchedule", "NoExecute"])
        return made

    def capacity(self) -> Json:
        """Amounts for one or two capacities of a device, or of none."""
        _, device = self.chance.choice(self.devices)
        names = [*(device.get("capacity") or {}), "gpu.nvidia.com/memory", "absent"]
        amounts = ["0", "1", "2", "3", "1Gi", "1500Mi", "10Gi", "25G", "100Gi", "500m"]
        return {
            self.chance.choice(
                names[:-2] if names[:-2] and self.chance.random() < 0.9 else names
            ): self.chance.choice(amounts)
            for _ in range(self.chance.choice([1, 1, 2]))
        }

    def constraint(self, requests: list[Json]) -> Json:
        driver, device = self.chance.choice(self.devices)
        names = [name if "/" in name else f"{driver}/{name}" for name in device.get("attributes") or ()]
        name = self.chance.choice([*names, f"{DRIVER}/absent"])
        made: Json = {self.chance.choice(["matchAttribute", "matchAttribute", "distinctAttribute"]): name}
        if self.chance.random() < 0.5:
            known = [request["name"] for request in requests]
            known += [
                f"{one['name']}/{part['name']}"
                for one in requests
                for part in one.get("firstAvailable") or ()
            ]
            made["requests"] = self.chance.sample(known, self.chance.randrange(1, len(known) + 1))
        return made

    def selector(self) -> str:
        one = self.term()
        match self.chance.randrange(8):
            case 0:
                return f"{one} && {self.term()}"
            case 1:
                return f"{one} || {self.term()}"
            case 2:
                return f"!({one})"
            case 3:
                return f"({one}) ? ({self.term()}) : ({self.term()})"
        return one

    def term(self) -> str:
        """A condition on an attribute or a capacity that some device has, and others may lack."""
        chance = self.chance
        driver, device = chance.choice(self.devices)
        domain = driver if chance.random() < 0.95 else chance.choice(["nvidia.com", OTHER])
        if device.get("capacity") and chance.random() < 0.3:
            return self.capacity_term(domain, device)
        made: list[Callable[[], str]] = [
            lambda: f'device.driver == "{domain}"',
            lambda: "device.allowMultipleAllocations",
            lambda: f'"{domain}" in device.attributes',
            lambda: f'has(device.attributes["{domain}"].type)',
            lambda: f'device.attributes["{domain}"].absent == "x"',
            lambda: f'"absent" in device.attributes["{domain}"]',
            lambda: f'device.attributes["{domain}"].?absent.orValue("x") == "x"',
        ]
        if not device.get("attributes") or chance.random() < 0.15:
            return chance.choice(made)()
        full = chance.choice([*device["attributes"]])
        [(kind, value)] = device["attributes"][full].items()
        own, _, name = full.rpartition("/")
        read = f'device.attributes["{own or domain}"].{name}'
        before = f'"{name}" in device.attributes["{own or domain}"] && ' if chance.random() < 0.3 else ""
        if chance.random() < 0.05:
            value, kind = ("0", "string") if kind == "int" else (0, "int")
        return before + self.comparison(read, kind, value)

    def comparison(self, read: str, kind: str, value: Any) -> str:
        chance, text = self.chance, json.dumps(value)
        match kind:
            case "int":
                return f"{read} {chance.choice(['==', '!=', '<', '>=', '>'])} {text}"
            case "bool":
                return chance.choice([f"{read} == {text}", read, f"!{read}"])
            case "version":
                one = f"semver({text})"
                return chance.choice(
                    [
                        f"{read}.compareTo({one}) >= 0",
                        f"{read} == {one}",
                        f"{read}.isGreaterThan({one})",
                        f"{read}.major() >= 1",
                    ]
                )
        return chance.choice(
            [
                f"{read} == {text}",
                f"{read} != {text}",
                f"{read}.startsWith({json.dumps(value[:3])})",
                f"{read} in [{text}, 'other']",
                f"{read}.lowerAscii().matches('^[a-z]')",
                f"{read}.contains('H100')",
            ]
        )

    def capacity_term(self, domain: str, device: Json) -> str:
        name = self.chance.choice([*device["capacity"]])
        value = self.chance.choice([device["capacity"][name]["value"], "10Gi", "80Gi", "2"])
        read, amount = f'device.capacity["{domain}"].{name}', f'quantity("{value}")'
        return self.chance.choice(
            [
                f"{read}.compareTo({amount}) >= 0",
                f"{read}.isGreaterThan({amount})",
                f"{read} == {amount}",
                f"{read}.isLessThan({amount})",
                f"{read}.sub({amount}).asInteger() > 0",
            ]
        )


def ours(slices: list[Json], classes: Json, pods: list[list[Json]]) -> Iterator[Answer]:
    """What each pod gets of an empty machine, one after the other."""
    held: list[Json] = []
    for claims in pods:
        try:
            found = allocate(free_devices(slices, held, NODE), claims, classes, NODE)
        except UndecidedError:
            yield UNDECIDED
            return
        except AllocationError:
            yield None
            continue
        held += [{"status": {"allocation": one}} for one in found]
        yield [shown(one) for one in found]


def theirs(answer: Json) -> Answer:
    if "filter operation aborted" in answer.get("error", ""):
        return UNDECIDED
    return [shown(one) for one in answer["allocations"]] if "allocations" in answer else None


def shown(allocation: Json) -> list[Any]:
    """The results of a claim, without what is random."""
    parts = []
    for one in allocation["devices"].get("results") or ():
        taken = one.get("consumedCapacity") or {}
        amounts = sorted((name, parse_quantity(str(amount))) for name, amount in taken.items())
        is_admin, is_share = one.get("adminAccess", False), "shareID" in one
        parts.append([one["request"], one["pool"], one["device"], is_admin, is_share, amounts])
    return parts


def random_machines(chance: random.Random, count: int) -> Iterator[Json]:
    """Machines with ten cases each, as the program takes them."""
    published_ones = [
        (f"{name} {settings}", slices)
        for name in machine_names()
        for settings in SETTINGS
        if (slices := published(name, settings))
    ]
    for number in range(count):
        name, slices = published_ones[number % len(published_ones)]
        changed, classes = Changed(chance, slices).slices, classes_of(slices)
        claims = Claims(chance, changed, classes)
        cases = [claims.pods() for _ in range(10)]
        yield {"name": name, "slices": changed, "classes": classes, "node": NODE, "cases": cases}


@pytest.mark.cluster
def test_allocator_on_random_claims_decides_as_kube_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_MAX_TRIES", 20_000)  # what takes longer is not judged
    machines = list(random_machines(random.Random(20261127), CASES // 10))
    text = "".join(map(json.dumps, machines))
    done = subprocess.run(
        [str(localcluster.allocator())], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counts: Counter[str] = Counter()
    for machine, line in zip(machines, done.stdout.splitlines(), strict=True):
        classes = {one["metadata"]["name"]: one for one in machine["classes"]}
        for pods, answers in zip(machine["cases"], json.loads(line), strict=True):
            mine = ours(machine["slices"], classes, pods)
            for claims, other in zip(pods, map(theirs, answers), strict=True):
                own = UNDECIDED if other == UNDECIDED else next(mine)
                if own == UNDECIDED:
                    counts["not judged: the search takes too long"] += 1
                    break
                assert own == other, (machine["name"], json.dumps(claims))
                counts["pods that fit" if own else "pods that do not fit"] += 1
    print(dict(counts))
    assert counts["pods that fit"] > CASES / 3
    assert counts["not judged: the search takes too long"] < CASES / 10
