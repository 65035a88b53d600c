"""What a release leaves on a node's disk, as fixtures: every file that another release may find.

`python -m tests.fakes.oldstate` writes those of the present release into tests/data/state-<version>, once. They are
frozen then: a later release reads what is there, not what it would write itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dra_driver.health.store import HealthStore, KeptHealth
from dra_driver.journal.record_codec import decode
from dra_driver.model.claim import AllocatedClaim, PodRef, Prepared
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity
from dra_driver.model.mig import Placement
from dra_driver.mps.compute_mode import EXCLUSIVE_PROCESS
from dra_driver.nvml.instances import MigHardware
from dra_driver.simulator.policy import TIMESLICE
from tests.fakes.kindnode import MPS, TIME_SLICING, KindNode, Site, parameters, share
from tests.fakes.preparing import Crash
from tests.fakes.samples import claim, result

DATA = Path(__file__).parents[1] / "data"
BOOT = "boot-1"
METADATA = ("v1beta1", "v1alpha1")
_ANSWERS = "answers.json"
_NODE, _MACHINE = "@NODE@", "@MACHINE@"

Json = dict[str, Any]


def fixtures() -> list[Path]:
    """The state of each release that was frozen."""
    return sorted(DATA.glob("state-*"))


# --- writing them ----------------------------------------------------------------------------------


def plain_claims(site: Site) -> tuple[AllocatedClaim, ...]:
    """Those whose containers are told nothing of their devices."""
    onlooker = result(site.possible(7, "1g.10gb", 3), admin_access=True)
    return (
        replace(claim(site.whole(2), uid="plain"), pods=(PodRef("trainer-0", "pod-uid-0"),)),
        claim(result(site.whole(2), admin_access=True), onlooker, uid="admin"),
        claim(site.static(0, "3g.40gb", 4), uid="static"),
    )


def described_claims(site: Site) -> tuple[AllocatedClaim, ...]:
    small, two = site.static(1, "1g.10gb", 0), site.static(1, "2g.20gb", 4)
    made = site.possible(7, "1g.10gb", 3)
    mps = parameters("MigDeviceConfig", **MPS)
    return (
        claim(result(small, "first"), result(two, "second/larger"), uid="several"),
        claim(site.whole(3), configs=(parameters(**TIME_SLICING),), uid="sliced"),
        claim(site.whole(4), configs=(parameters(**MPS),), uid="mps"),
        claim(share(site, 0), uid="share-0"),
        claim(share(site, 1), uid="share-1"),
        claim(made, configs=(mps,), uid="made"),
        claim(site.possible(7, "2g.20gb", 0), uid="leaving"),
    )


def half_done_claims(site: Site) -> Mapping[str, AllocatedClaim]:
    """By the change after which the process died."""
    mps = parameters("MigDeviceConfig", **MPS)
    return {
        "create": claim(site.possible(6, "1g.10gb", 0), uid="half-made"),
        "ensure": claim(site.static(1, "1g.10gb", 6), configs=(mps,), uid="half-mps"),
    }


def health(site: Site) -> KeptHealth:
    xid = Reason("xid", "48", Severity.UNHEALTHY, 100, 120, "Xid 48: double-bit ECC error", reset_seen=True)
    row = Reason("row-remapping", "pending", Severity.DEGRADED, 90, 90, "a row is to be remapped", "poll")
    whole = HealthState(HealthTarget(site.gpu(2).uuid), (xid, row), 3, None, (50, 100), 700)
    part = HealthState(HealthTarget(site.gpu(0).uuid, 1, 0), (xid,), identity="MIG-1")
    return KeptHealth(BOOT, "580.95.05", (whole, part))


def write_state(site: Site, directory: Path) -> dict[str, Any]:
    """Have a node in use below `directory`; what the kubelet was answered, by claim UID."""
    node = KindNode(site, directory, boot_id=BOOT)
    answers = {one.ref.uid: node.prepare(one) for one in plain_claims(site)}
    node = node.restarted(metadata=METADATA)
    answers |= {one.ref.uid: node.prepare(one) for one in described_claims(site)}
    node.mig.abandon(site.possible(7, "2g.20gb", 0))
    lost = claim(site.possible(7, "1g.10gb", 6), uid="lost")
    node.prepare(lost)
    node.mig.abandon(lost.results[0].device)
    for step in ("specs", "metadata_files"):
        getattr(node, step).remove(lost if step == "metadata_files" else "lost")
    node.records.delete("lost")
    for change, one in half_done_claims(site).items():
        with node.dying(None) as done:
            node.prepare(one)
            number = done.index(change) + 1
        node.unprepare(one)
        try:
            with node.dying(number):
                node.prepare(one)
        except Crash:
            continue
        raise AssertionError(f"{one.ref} was prepared")
    HealthStore(node.plugin / "health.json").save(health(site))
    assert all(isinstance(answer, Prepared) for answer in answers.values()), answers
    return {uid: _shown(answer) for uid, answer in answers.items()}


def _shown(answer: Prepared) -> list[Json]:
    return [
        {
            "requests": list(device.requests),
            "pool": device.pool,
            "device": device.device,
            "cdiIDs": list(device.cdi_ids),
            "shareID": device.share_id,
        }
        for device in answer.devices
    ]


def _freeze(target: Path) -> None:
    with tempfile.TemporaryDirectory() as top:
        site, directory = Site(Path(top, "machine")), Path(top, "node")
        answers = write_state(site, directory)
        for path in state_files(directory):
            text = (
                _shortened(path).replace(str(directory), _NODE).replace(str(Path(top, "machine")), _MACHINE)
            )
            copy = target / path.relative_to(directory)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
        (target / _ANSWERS).write_text(f"{json.dumps(answers, indent=2)}\n")
        site.close()


def _shortened(path: Path) -> str:
    """The file's content; of the driver's libraries, which every spec mounts by the hundred, a few are enough."""
    text = path.read_text()
    document = json.loads(text) if path.parent.name == "cdi" else {}
    if "containerEdits" not in document:
        return text
    document["containerEdits"]["mounts"] = document["containerEdits"]["mounts"][:3]
    return json.dumps(document)


def state_files(directory: Path) -> list[Path]:
    """All that is meant to be read by a later run. Locks and notes of minutes are not."""
    return [path for path in sorted(directory.rglob("*.json")) if "locks" not in path.parts]


# --- reading them ----------------------------------------------------------------------------------


@dataclass
class OldState:
    """A node's directory as a release left it, and the machine as it was then."""

    site: Site
    directory: Path
    answers: Mapping[str, list[Json]]

    def node(self, boot_id: str = BOOT) -> KindNode:
        """Today's driver over it, which knows the claims as the API server has them."""
        node = KindNode(self.site, self.directory, boot_id=boot_id, metadata=METADATA)
        node.collector.look()
        return node

    def claims(self) -> dict[str, AllocatedClaim]:
        return {
            path.stem: decode(path.read_bytes()).claim
            for path in sorted(self.directory.glob("plugin/claims/*.json"))
        }

    def documents(self) -> dict[str, Json]:
        """What is read again by the driver: records, ledger, daemons, health."""
        return {
            str(path.relative_to(self.directory)): json.loads(path.read_text())
            for top in ("claims", "mig", "mps")
            for path in sorted((self.directory / "plugin" / top).glob("*.json"))
        } | {"plugin/health.json": json.loads((self.directory / "plugin/health.json").read_text())}


def put(site: Site, fixture: Path, directory: Path, *, reboot: bool = False) -> OldState:
    """Lay a fixture out as the state of `site`; after a reboot nothing is left of it but files."""
    site.reset()
    names = {_NODE: str(directory), _MACHINE: str(site.machine.directory)}
    if not reboot:
        names |= dict(_made_again(site, fixture))
    for path in fixture.rglob("*"):
        if path.is_file() and path.name != _ANSWERS:
            text = path.read_text()
            for name, now in names.items():
                text = text.replace(name, now)
            copy = directory / path.relative_to(fixture)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
    return OldState(site, directory, json.loads((fixture / _ANSWERS).read_text()))


def _made_again(site: Site, fixture: Path) -> Iterator[tuple[str, str]]:
    """What the claims had made, made on the machine: MIG UUIDs then and now."""
    hardware = MigHardware(nullcontext)
    for path in sorted(fixture.glob("plugin/mig/gpu-*.json")):
        entry = json.loads(path.read_text())
        where = (entry["gpuUUID"], entry["pciBusID"])
        hardware.set_mode(*where, True)
        placement = Placement(entry["placement"]["start"], entry["placement"]["size"])
        made = hardware.create(*where, entry["profileID"], placement)
        assert entry["gpuInstanceID"] in (None, made), "the machine numbers instances otherwise"
        if entry["uuid"] is not None:
            compute, uuid = hardware.create_compute(*where, made)
            assert compute == entry["computeInstanceID"]
            yield entry["uuid"], uuid
    for path in fixture.glob("plugin/claims/*.json"):
        for step in json.loads(path.read_text())["steps"]:
            if step["kind"] == "set_time_slice":
                site.policies.set(TIMESLICE, step["gpuUUID"], step["interval"])
    for path in fixture.glob("plugin/mps/*.json"):
        spec = json.loads(path.read_text())["spec"]
        if spec["kind"] == "gpu":
            site.machine.set_compute_mode(spec["gpu_uuid"], EXCLUSIVE_PROCESS)


if __name__ == "__main__":
    frozen = DATA / f"state-{version('gpu-dra-driver')}"
    if frozen.exists():
        sys.exit(f"{frozen} is there already, and frozen")
    _freeze(frozen)
