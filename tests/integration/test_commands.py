"""`doctor`, `claims` and `validate` as processes: on a running node, on examples, with every kind of mistake."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked_commands
import pytest
import yaml

from dra_driver.cli.claims import pods_text
from dra_driver.cli.rules.prepared_claims import age_text, usage_text
from dra_driver.health.store import KeptHealth, encode
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceResult, HeldDevice, PodRef
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity
from dra_driver.model.mig import OwnedInstance, Placement
from dra_driver.model.mps import LostMps, MpsDaemonSpec, MpsShared, SharingMode, TimeSliced
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, RunMps, SetTimeSlice, StartMaintenance, WriteCdiSpec
from tests.fakes.tables import data_of, read_yaml, tabled
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import DRIVER, NODE, Node, poll_all, received, sliced
from tests.integration.test_mig_commands import files
from tests.integration.test_process import call, environment

EXAMPLES = Path(__file__).parents[2] / "examples"
Json = dict[str, Any]


# --- doctor -------------------------------------------------------------------------------------


def health_lines(node: Node) -> list[tuple[str, str, str]]:
    """Status, what was seen, and the remedy, of each line `health`. Nothing else fails, but for a plugin that does not
    run."""
    done = call("doctor", "-o", "json", *node.flags())
    checks = json.loads(done.stdout)["checks"]
    failing = {check["check"] for check in checks if check["status"] == "FAIL"}
    away = {"plugin"} if node.driver is None else set()
    assert (done.returncode, failing - {"health"}) == (int(bool(failing)), away), checks
    return [
        (check["status"], check["seen"], str(check["remedy"]))
        for check in checks
        if check["check"] == "health"
    ]


def test_doctor_names_the_gpus_that_are_ill_when_the_plugin_runs(node: Node) -> None:
    eventually(lambda: health_lines(node) == [("OK", "8 GPUs are healthy", "None")])
    driver, machine, health = node.driver, node.machine, node.plugin_dir / "health.json"
    assert driver is not None
    one, two = machine.gpu(2), machine.gpu(3)

    def kept() -> set[str]:
        states = json.loads(health.read_text())["states"] if health.exists() else ()
        return {f"{it['key']} {it['value']}".strip() for state in states for it in state.get("reasons", ())}

    eventually(lambda: received(driver) == 8)
    machine.set_remapped_rows(2, failed=1)
    machine.raise_xid(3, 95)
    poll_all(driver)
    eventually(lambda: kept() == {"row-remap failure", "xid 95"})
    found = health_lines(node)
    assert [(status, seen.partition(" (for ")[0]) for status, seen, _ in found] == [
        ("FAIL", f"gpu-{one.uuid[4:12]} ({one.bus_id}) is unhealthy: memory rows could not be remapped"),
        (
            "FAIL",
            f"gpu-{two.uuid[4:12]} ({two.bus_id}) is unhealthy: Xid 95: uncorrectable memory error that was not "
            "contained",
        ),
    ]
    assert [remedy.partition(",")[0] for *_, remedy in found] == [
        "have the GPU replaced",
        f"run `gpu-dra-driver detach {two.bus_id}`",
    ]


def test_doctor_names_a_lost_gpu_when_no_plugin_runs(node: Node) -> None:
    node.stop_driver()
    health = node.plugin_dir / "health.json"
    health.unlink(missing_ok=True)
    gone = node.machine.gpu(5)
    node.machine.lose_gpu(5)
    done = call("doctor", *node.flags())
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert any(line.startswith("OK    NVML                 7 of 8 GPUs answer") for line in lines), lines
    named = f"gpu-{gone.uuid[4:12]} ({gone.bus_id}) is lost: the GPU fell off the bus and does not answer"
    assert any(line.startswith(f"FAIL  health               {named}") for line in lines)
    assert [line for line in lines if line.startswith("WARN  device nodes")] == []
    node.machine.restore_gpu(5)
    health.write_text("{broken")
    unknown, (status, seen, remedy) = health_lines(node)
    assert (unknown[0], unknown[2]) == ("WARN", "start gpu-dra-driver, then run doctor again")
    assert unknown[1].endswith(" and 4 more is unknown: gpu-dra-driver is not running on this node")
    assert (status, seen.startswith(f"the saved health {health} cannot be read: ")) == ("WARN", True)
    assert "restart gpu-dra-driver" in remedy
    assert health.read_text() == "{broken"


def test_a_gpu_that_hangs_hides_nothing_else_from_doctor(node: Node) -> None:
    node.stop_driver()
    ill, now = node.machine.gpu(5), int(time.time())
    bad = Reason("xid", "95", Severity.UNHEALTHY, now - 7200, now, "Xid 95")
    state = HealthState(HealthTarget(ill.uuid), (bad,), pci_bus_id=ill.bus_id)
    (node.plugin_dir / "health.json").write_bytes(encode(KeptHealth(node.machine.boot_id, None, (state,))))
    node.machine.set_fault("nvmlDeviceGetRemappedRows", delay_s=30.0, gpu=node.machine.gpu(3).uuid)
    done = call("doctor", "-o", "json", *node.flags())
    checks = json.loads(done.stdout)["checks"]
    found = {(one["check"], one["status"], re.sub(r"\d+s ago", "now", one["seen"])) for one in checks}
    named = f"gpu-{ill.uuid[4:12]} ({ill.bus_id})"
    known = ", ".join(f"gpu-{gpu.uuid[4:12]}" for gpu in list(node.machine.current().present)[:4])
    assert {entry for entry in found if entry[0] in ("NVML", "health", "device nodes", "MIG mode")} == {
        ("NVML", "OK", "8 GPUs answer, NVIDIA driver 580.95.05, CUDA 13.0"),
        ("health", "WARN", f"gpu-dra-driver saved for {named} now: Xid 95 (for 2h00m)"),
        (
            "health",
            "WARN",
            f"the health of {known} and 4 more is unknown: gpu-dra-driver is not running on this node",
        ),
        ("device nodes", "OK", "/dev/nvidiactl, /dev/nvidia-uvm and the device nodes of 8 GPUs"),
        ("MIG mode", "OK", "0 of 8 GPUs in MIG mode"),
    }


def test_doctor_on_a_node_at_work(node: Node) -> None:
    options = node.flags()
    before = node.server.writes("resourceslices")
    done = call("doctor", "-o", "json", *options)
    assert done.stderr == ""
    found = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert [name for name, check in found.items() if check["status"] == "FAIL"] == []
    assert done.returncode == 0
    assert found["NVML"]["seen"].startswith("8 GPUs answer")
    assert found["slices"]["seen"] == "8 devices in 1 slice"
    assert found["plugin"]["status"] == "OK"
    assert json.loads(done.stdout)["verified"] == {
        "driver": {"status": "OK", "version": "580.95.05"},
        "runtime": {"status": "WARN", "version": None},  # it reads specs from elsewhere
    }
    assert all((check["remedy"] is None) == (check["status"] in ("OK", "SKIP")) for check in found.values())
    assert node.server.writes("resourceslices") == before
    node.machine.unload_driver()
    done = call("doctor", *options)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("FAIL  kernel driver"))
    assert "-> run `modprobe nvidia`" in lines[start + 1]
    verified = json.loads(call("doctor", "-o", "json", *options).stdout)["verified"]
    assert verified["driver"] == {"status": "FAIL", "version": None}
    assert re.match(r"\d+ problems: \d+ OK, ", lines[-1])
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor_where_nothing_is_there(tmp_path: Path) -> None:
    done = call(
        "doctor", "--nvidia-driver-root", str(tmp_path), "--container-driver-root", str(tmp_path),
        "--kubelet-plugins-directory-path", str(tmp_path / "p"), "--cdi-root", str(tmp_path / "c"),
        "--kubelet-registrar-directory-path", str(tmp_path / "r"), "--kubeconfig", str(tmp_path / "k"),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert any(line.startswith("FAIL  kubelet directories") for line in done.stdout.splitlines())
    assert any(
        line.startswith("FAIL  API server") and "cannot be read" in line for line in done.stdout.splitlines()
    )
    (line,) = (line for line in done.stdout.splitlines() if "without the API server" in line)
    assert line.startswith("SKIP  7 checks             not checked without the API server: permissions, ")
    assert list(tmp_path.iterdir()) == []


# --- claims -------------------------------------------------------------------------------------


def record(
    number: int,
    *held: HeldDevice,
    steps: tuple[Any, ...] = (WriteCdiSpec(),),
    pods: Sequence[str] | None = None,
    **more: Any,
) -> ClaimRecord:
    ref = ClaimRef("team", f"claim-{number}", f"uid-{number}")
    results = tuple(DeviceResult("gpu", DRIVER, NODE, device.device) for device in held)
    values: Json = {"phase": "prepared", "boot_id": "boot-1", "prepared_at": "2020-01-01T00:00:00.000+00:00"}
    users = None if pods is None else tuple(PodRef(pod, f"uid-of-{pod}") for pod in pods)
    return ClaimRecord(AllocatedClaim(ref, results, pods=users), devices=held, steps=steps, **(values | more))


SPEC = MpsDaemonSpec("gpu-1", "GPU-1", "gpu", "GPU-1")
MIG = OwnedInstance(
    "gpu-2-mig-1g10gb-19-0",
    "GPU-2",
    "0000:1b:00.0",
    19,
    "1g.10gb",
    Placement(0, 1),
    "boot-1",
    "created",
    7,
    0,
    "MIG-7",
)


@pytest.fixture
def plugin_dir(tmp_path: Path) -> Path:
    """Records of every kind, and a machine's boot ID."""
    directory = tmp_path / "plugins" / DRIVER
    store = RecordStore(directory / "claims")
    store.open("boot-1")
    shared = HeldDevice(
        "gpu-1", "gpu", "GPU-1", "GPU-1", share_id="share-9", usage=MpsShared(SPEC, 10240, 50)
    )
    users = [f"trainer-{number}" for number in range(6)]
    store.save(record(1, shared, steps=(RunMps(SPEC), WriteCdiSpec()), pods=users))
    on_demand = HeldDevice(MIG.device, "mig", "", "GPU-2", placement=MIG.placement)
    made = CreateMig(MIG.device, "GPU-2", None, 19, "1g.10gb", MIG.placement)
    store.save(record(2, on_demand, steps=(made,), prepared_at=None, phase="preparing"))
    admin = HeldDevice("gpu-3", "gpu", "GPU-3", "GPU-3", admin_access=True)
    store.save(record(3, admin, boot_id="boot-0", prepared_at="nonsense", pods=["monitor"]))
    store.save(record(7, admin, prepared_at="nonsense", pods=["exporter"]))
    (directory / "claims/uid-4.json").write_text("{broken")
    (directory / "claims/uid-5.json.unreadable-1").write_text("x")
    ledger = Ledger(directory / "ledger", store, "boot-1")
    ledger.open()
    ledger.save(MIG)
    boot = tmp_path / "machine/root/proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("boot-1\n")
    cdi = tmp_path / "cdi"
    cdi.mkdir()
    for uid in ("uid-1", "uid-6"):
        spec = {"kind": f"k8s.{DRIVER}/claim", "devices": [{"name": f"{uid}-gpu-1"}]}
        (cdi / f"k8s.{DRIVER}-claim_{uid}.yaml").write_text(json.dumps(spec))
    return directory


def claims(plugin_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    root = plugin_dir.parents[1]
    return call(
        "claims", "--kubelet-plugins-directory-path", str(plugin_dir.parent), "--cdi-root", str(root / "cdi"),
        "--simulator-dir", str(root / "machine"), *more,
    )  # fmt: skip


def test_claims_says_who_holds_what_and_touches_nothing(plugin_dir: Path) -> None:
    root = plugin_dir.parents[1]
    before = files(root)
    done = claims(plugin_dir)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    pods = "pods trainer-0, trainer-1, trainer-2, trainer-3 and 2 more"
    pattern = rf"team/claim-1  Prepared \d+d\d+h ago +{pods}"
    assert re.fullmatch(pattern, lines[0]), lines[0]
    assert lines[1] == "    uid uid-1; set up: MPS daemon, CDI spec"
    assert lines[2].split("  ")[-1] == "MPS, at most 10240 MiB and 50 % of threads; share share-9"
    text = done.stdout
    assert "set up: MIG device" in text
    assert "mig  MIG-7  1g.10gb at 0, created GI 7 CI 0; on GPU-2" in text
    assert [re.split("  +", line)[1:] for line in lines if line.startswith("team/")][1:] == [
        ["Prepared, CDI SPEC MISSING", "pod exporter"],
        ["Preparing", "pods unknown"],
        ["NOT PREPARED SINCE THE LAST BOOT", "pod monitor"],
    ]
    assert "admin access" in text
    problems = [line for line in lines if line.startswith("problem: ")]
    assert len(problems) == 4
    for part in (
        "uid-4.json cannot be read",
        "uid-5.json.unreadable-1 was set aside",
        "UID uid-6 has a CDI spec but no record",
    ):
        assert any(part in line for line in problems), part
    assert any("claim team/claim-7 is prepared but its CDI spec is missing" in line for line in problems)
    assert not any("claim-3" in line for line in problems), "after a reboot nothing of it has to be there"
    assert files(root) == before


def test_claims_shows_the_state_of_maintenance(plugin_dir: Path) -> None:
    store = RecordStore(plugin_dir / "claims")
    held = HeldDevice("gpu-3", "gpu", "GPU-3", "GPU-3", admin_access=True)
    for number, phase in ((8, "prepared"), (9, "preparing")):
        store.save(record(number, held, steps=(StartMaintenance(("GPU-3",), "Wait", 900),), phase=phase))
    text = claims(plugin_dir).stdout
    assert re.search(r"^team/claim-8 .*, maintenance: overdue since an unknown time, ", text, re.MULTILINE)
    assert re.search(r"^team/claim-9  Preparing, maintenance: waiting ", text, re.MULTILINE)


def test_claims_flags_a_boot_that_is_not_known(plugin_dir: Path) -> None:
    (plugin_dir.parents[1] / "machine/root/proc/sys/kernel/random/boot_id").unlink()
    text = claims(plugin_dir).stdout
    assert re.search(r"^team/claim-1  Prepared \d+d\d+h ago, BOOT UNKNOWN ", text, re.MULTILINE)
    assert "problem: the ID of this boot cannot be read, so a claim that is shown as prepared may" in text


def test_claims_as_json_and_yaml_are_the_same(plugin_dir: Path) -> None:
    document = json.loads(claims(plugin_dir, "-o", "json").stdout)
    assert yaml.safe_load(claims(plugin_dir, "-o", "yaml").stdout).keys() == document.keys()
    found = {claim["name"]: claim for claim in document["claims"]}
    assert list(found) == ["claim-1", "claim-7", "claim-2", "claim-3"]
    assert [claim["phase"] for claim in found.values()] == ["prepared", "prepared", "preparing", "preparing"]
    assert [claim["boot"] for claim in found.values()] == ["this", "this", "this", "earlier"]
    assert [claim["cdi_spec"] for claim in found.values()] == ["present", "missing", "missing", "missing"]
    assert found["claim-1"]["age_s"] > 10**8
    assert found["claim-3"]["age_s"] is None
    assert found["claim-2"]["devices"][0]["uuid"] == "MIG-7"
    assert found["claim-1"]["pods"][5] == {"name": "trainer-5", "uid": "uid-of-trainer-5"}
    assert [claim["pods"] and len(claim["pods"]) for claim in found.values()] == [6, 1, None, 1]


def test_claim_of_an_earlier_boot_is_not_what_its_gpu_is_busy_with(plugin_dir: Path) -> None:
    """Nothing runs for it before the kubelet calls again; until then another claim may get its GPU."""
    locks, busy = GpuLocks(plugin_dir / "locks"), ("GPU-2", "GPU-3")
    locks.open()
    with locks.hold(busy, 1.0):
        running = json.loads(claims(plugin_dir, "-o", "json").stdout)["running"]
    assert running == {"uid-2": "GPU-2"}


def test_claims_of_a_node_that_never_had_any(tmp_path: Path) -> None:
    done = call(
        "claims", "--kubelet-plugins-directory-path", str(tmp_path), "--cdi-root", str(tmp_path / "cdi")
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"no prepared claims found (records: {tmp_path / DRIVER / 'claims'})\n"
    assert list(tmp_path.iterdir()) == []


def test_claims_shows_a_claim_that_fails_with_its_tries_and_the_last_error(node: Node) -> None:
    """Also while the plugin does not run, from its file."""
    ref = node.allocated_by_hand("broken", "gpu-none")
    options = [
        "--kubelet-plugins-directory-path", str(node.plugin_dir.parent), "--cdi-root", str(node.cdi),
        "--simulator-dir", str(node.root / "machine"),
    ]  # fmt: skip
    for _ in range(2):
        node.prepare(ref)
    shown = eventually(lambda: text if "2 tries" in (text := call("claims", *options).stdout) else "")
    [line] = shown.splitlines()
    assert re.match(r"default/broken  PREPARE FAILING for \d+s, 2 tries: .*gpu-none", line), line
    node.driver.stop()
    [found] = json.loads(call("claims", "-o", "json", *options).stdout)["failing"]
    assert (found["ref"]["name"], found["operation"], found["count"]) == ("broken", "prepare", 2)
    assert "PREPARE FAILING" in call("claims", *options).stdout


def test_claims_shows_the_gpu_on_which_an_operation_runs_for_a_claim(node: Node) -> None:
    gpu = node.machine.gpu(0).uuid
    device = next(one["name"] for one in node.devices() if gpu[4:12] in one["name"])
    ref = node.allocated_by_hand("slow", device, config=sliced("Long"))
    gate = threading.Event()
    runner = node.driver.cleaner.runner.runners[SetTimeSlice]
    real = runner.do
    runner.do = lambda step, plan: (gate.wait(PATIENCE_S), real(step, plan))
    calls = threading.Thread(target=node.prepare, args=(ref,))
    calls.start()
    options = [
        "--kubelet-plugins-directory-path", str(node.plugin_dir.parent), "--cdi-root", str(node.cdi),
        "--simulator-dir", str(node.root / "machine"),
    ]  # fmt: skip
    try:
        shown = f"default/slow  Preparing: an operation is running on {gpu}"
        text = eventually(lambda: shown in (text := call("claims", *options).stdout) and text)
        assert "ended" not in text
    finally:
        gate.set()
        calls.join(PATIENCE_S)
    assert "Prepared" in call("claims", *options).stdout


@tabled("seconds", "text")
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


@tabled("names", "text")
def test_pods_as_text(names: str | None, text: str) -> None:
    assert pods_text(None if names is None else tuple(PodRef(name, "uid") for name in names)) == text


@pytest.mark.parametrize(
    ("usage", "text"),
    [
        (None, None),
        (TimeSliced(), "time-slicing"),
        (TimeSliced(3), "time-slicing, long"),
        (TimeSliced(9), "time-slicing, 9"),
        (MpsShared(SPEC), "MPS"),
        (MpsShared(SPEC, None, 25), "MPS, at most 25 % of threads"),
        (LostMps(), "MPS"),
    ],
)
def test_usages(usage: SharingMode, text: str | None) -> None:
    assert usage_text(usage) == text


# --- validate -----------------------------------------------------------------------------------


def validate(*arguments: str, stdin: str = "") -> tuple[int, list[Json], str]:
    """Exit code, reports, and standard error."""
    done = forked_commands.run(["validate", "-o", "json", *arguments], env=environment(), stdin=stdin)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)["documents"] if done.stdout else [], done.stderr


def section(name: str) -> str:
    """The configuration that an example's README shows."""
    lines = (EXAMPLES / name / "README.md").read_text().splitlines()
    start = lines.index("    sharing:")
    return "\n".join(line[4:] for line in lines[start : lines.index("", start)])


WHOLE = (
    "admin-access", "cuda-job", "extended-resource", "gpu-feature-discovery", "h100-else-a100", "jobset", "kai",
    "kueue", "monitoring-daemonset", "mps-shared-claim", "nvlink-domain", "one-gpu", "pytorch-ddp", "reset-gpu",
    "selectors", "shared-claim", "time-slicing", "two-claims", "volcano",
)  # fmt: skip
SHARED = {
    "gpu-shares": "dgx-h100",
    "gpu-memory": "dgx-h100",
    "mig-shares": "h100-mig-static",
    "vllm": "dgx-h100",
}


CONFIGURED = (
    *SHARED, "imex-job", "mig-else-share", "mig-extended-resource", "mig-mps", "mig-on-demand", "mig-same-gpu",
    "mixed-inference", "mps-shared-claim", "vm-gpu",
)  # fmt: skip
"""The examples that need other values of the chart than the defaults."""
TUTORIALS = [
    path.relative_to(EXAMPLES.parent).with_suffix("")
    for path in EXAMPLES.parent.glob("docs/tutorials/*.md")
    if path.stem != "index"
]


def test_all_examples_are_right() -> None:
    """Also where a lost GPU evicts pods."""
    files = sorted(map(str, EXAMPLES.glob("*/*.yaml")))
    code, reports, error = validate("-", *files, stdin="health: {taints: {gpu-lost: NoExecute}}")
    assert (code, error) == (0, "")
    assert {report["verdict"] for report in reports} == {"OK", "SKIP", "not judged"}
    # The second class is not one of ours, and validate does not know the queues of schedulers.
    unknown = ["ResourceClaimTemplate gpu-and-nic", "Pod gpu-and-nic", "Queue team-a"]
    assert [report["name"] for report in reports if report["verdict"] == "not judged"] == unknown
    assert len(reports) >= 40
    assert [
        hint for report in reports for hint in report["hints"] if "extendedResourceName" not in hint
    ] == []


@pytest.mark.parametrize("machine", ["dgx-h100", "h100-mig-static"])
def test_claim_of_agents_in_the_manual_fits_with_and_without_whole_gpus(machine: str) -> None:
    manual = (EXAMPLES.parent / "docs/monitoring-agents.md").read_text()
    text = manual.partition("```yaml\napiVersion: resource.k8s.io/v1\n")[2].partition("```")[0]
    code, reports, error = validate(
        "-", "--simulate", machine, stdin=f"apiVersion: resource.k8s.io/v1\n{text}"
    )
    assert (code, error) == (0, "")
    assert [(report["verdict"], len(report["devices"])) for report in reports] == [("OK", 0), ("OK", 1)]


def test_examples_fit_the_machines_that_they_are_for() -> None:
    code, reports, error = validate(*(str(EXAMPLES / name) for name in WHOLE), "--simulate", "dgx-h100")
    assert (code, error) == (0, "")
    devices = {r["name"]: len(r["devices"]) for r in reports if r["name"].startswith("ResourceClaim")}
    assert devices["ResourceClaimTemplate nvlink-domain"] == 2
    assert all(devices.values())
    notes = [note for report in reports if report["name"] == "Pod two-claims" for note in report["notes"]]
    assert notes == ["the pod's 2 claims fit together"]
    code, reports, _ = validate(str(EXAMPLES / "static-mig"), "--simulate", "h100-mig-static")
    assert code == 0
    assert len(reports[0]["devices"]) == 1


def test_the_example_for_two_trays_fits_where_claims_get_a_channel() -> None:
    readme = (EXAMPLES / "imex-job/README.md").read_text().splitlines()
    assert "        --set imex.channel=0" in readme
    configured = "imex: {channel: 0}"
    tray = (str(EXAMPLES / "imex-job"), "--simulate", "gb200-nvl72-tray")
    code, reports, _ = validate("-", *tray, stdin=configured)
    assert (code, len(reports[1]["devices"])) == (0, 4)
    code, reports, _ = validate(*tray)
    assert code == 1
    assert any("imexChannels" in fault for fault in reports[0]["faults"])


def test_no_hint_is_given_on_devices_of_another_driver() -> None:
    code, reports, _ = validate(str(EXAMPLES / "gpu-and-nic"), "--simulate", "dgx-h100")
    assert code == 0
    assert [report["hints"] for report in reports] == [[], []]
    assert any("unknown DeviceClass dranet: " in note for note in reports[0]["notes"])


@pytest.mark.parametrize("name", SHARED)
def test_shared_examples_fit_with_the_configuration_of_their_readme(name: str) -> None:
    machine = SHARED[name]
    code, reports, _ = validate("-", str(EXAMPLES / name), "--simulate", machine, stdin=section(name))
    assert (code, reports[0]["name"], reports[0]["verdict"]) == (0, "configuration", "OK")
    assert len(reports[1]["devices"]) == 1


@tabled("machine", "options", "wish")
def test_first_available_takes_a_mig_device_or_else_a_share(
    machine: str, options: tuple[str, ...], wish: str
) -> None:
    name = "mig-else-share"
    given = ("-", str(EXAMPLES / name), "--simulate", machine, *options)
    code, reports, _ = validate(*given, stdin=section(name))
    (chosen,) = reports[1]["devices"]
    assert (code, chosen["request"]) == (0, f"gpu/{wish}")
    assert any(note.startswith(f"fits by gpu/{wish}, for example: ") for note in reports[1]["notes"])


def first_available(*bodies: Json, **devices: Any) -> Json:
    return {"requests": [{"name": "gpu", "firstAvailable": list(bodies)}]} | devices


@pytest.mark.parametrize("dynamic", [True, False])
def test_first_available_with_profiles_of_mig(dynamic: bool) -> None:
    def mig(profile: str, count: int = 1) -> Json:
        return {"name": f"m{count}", "deviceClassName": f"mig-{profile}.nvidia.com", "count": count}

    whole = {"name": "whole", "deviceClassName": "gpu.nvidia.com"}
    same_gpu = [{"requests": ["gpu"], "matchAttribute": "gpu.nvidia.com/parentUUID"}]
    gpu_config = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}
    config = [{"requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": gpu_config}}]
    only_whole = [config[0] | {"requests": ["gpu/whole"]}]
    documents = [
        claim("else-whole", first_available(mig("1g.10gb.me"), whole)),
        claim("three", first_available(mig("3g.40gb", 3), mig("7g.80gb", 2), constraints=same_gpu)),
        claim("two", first_available(mig("3g.40gb", 3), mig("3g.40gb", 2), constraints=same_gpu)),
        claim("config", first_available(mig("3g.40gb"), whole, config=config)),
        claim("config-of-one", first_available(mig("3g.40gb"), whole, config=only_whole)),
    ]
    options = ["--dynamic-mig"] if dynamic else []
    _, reports, _ = validate("-", "--simulate", "dgx-h100", *options, stdin=yaml.safe_dump_all(documents))
    given = [[device["request"] for device in report["devices"]] for report in reports]
    if dynamic:
        assert given == [["gpu/m1"], [], ["gpu/m2", "gpu/m2"], [], ["gpu/m1"]]
        (fault,) = reports[1]["faults"]
        assert fault.endswith(
            "no combination of them serves all requests and satisfies matchAttribute gpu.nvidia.com/parentUUID"
        )
        assert "GpuConfig does not apply to device" in reports[3]["faults"][0]
    else:
        # The classes are those of the driver, even without devices for them on this machine.
        assert given == [["gpu/whole"], [], [], ["gpu/whole"], ["gpu/whole"]]
        for report in reports[1:3]:
            assert report["hints"] == [
                "the machine has no MIG devices; with --dynamic-mig they are created on demand; the possible profiles "
                "are 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb"
            ]
    assert reports[3]["hints"] == [
        "spec.devices.config[0].requests: GpuConfig does not apply to gpu/m1, so Prepare would refuse its devices; "
        "write gpu/whole instead of gpu"
    ]
    assert reports[4]["hints"] == []


def test_each_sort_of_machine_is_tried_and_the_pods_of_an_object_as_one() -> None:
    template = claim("t", {}) | {
        "kind": "ResourceClaimTemplate",
        "spec": {"spec": {"devices": request(count=3)}},
    }
    pods = POD | {"resourceClaims": [{"name": name, "resourceClaimTemplateName": "t"} for name in "xyz"]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"replicas": 100, "template": {"spec": POD | {"resourceClaims": pods["resourceClaims"][:1]}}},
    }
    greedy = deployment | {"metadata": {"name": "greedy"}, "spec": {"template": {"spec": pods}}}
    documents = [template, deployment, greedy, claim("eight", request(count=8))]
    machines = ["--simulate", "dgx-h100", "--simulate", "a30-4"]
    code, reports, _ = validate("-", *machines, stdin=yaml.safe_dump_all(documents))
    assert code == 1
    assert [report["verdict"] for report in reports] == ["OK", "OK", "FAULT", "OK"]
    free = "although each fits alone: request gpu asks for 3 devices, but other claims use too many"
    assert reports[2]["faults"] == [
        f"the pod's 3 claims do not fit on dgx-h100 together, {free} (matching: 8, free: 2)",
        f"the pod's 3 claims do not fit on a30-4 together, {free} (matching: 4, free: 1)",
    ]
    # A claim that fits one kind of machine fits, and the report names the kind that it does not fit.
    assert any(note.startswith("fits dgx-h100, for example: ") for note in reports[3]["notes"])
    assert any(note.startswith("does not fit a30-4: ") for note in reports[3]["notes"])


def blocks(page: Path) -> list[Json]:
    """The YAML that a page shows: fenced, or an indented part of a claim."""
    text = page.read_text()
    found = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    found += re.findall(r"^\n((?: {4}.*\n)+)", re.sub(r"(?ms)^```.*?^```", "", text), re.MULTILINE)
    return [
        document
        for block in map(textwrap.dedent, found)
        if block in found or block.startswith(("requests:", "devices:"))
        for document in yaml.load_all(block, Loader=yaml.CSafeLoader)
    ]


def whole(document: Json) -> Json:
    """An object or a configuration as it is, and a part of a claim in a claim."""
    if "requests" in document:
        return claim("shown", document)
    return claim("shown", document["devices"]) if "devices" in document else document


PAGES = [
    page
    for page in (
        *EXAMPLES.parent.glob("*.md"), *EXAMPLES.parent.glob("docs/**/*.md"), *EXAMPLES.glob("*/README.md")
    )
    if blocks(page)
]  # fmt: skip


def test_every_yaml_block_of_the_docs_is_valid(tmp_path: Path) -> None:
    assert len(PAGES) >= 20
    files: dict[bool, list[str]] = {True: [], False: []}
    for page in PAGES:
        for number, document in enumerate(blocks(page)):
            if isinstance(document, dict):
                file = tmp_path / f"{page.stem}-{number}-{page.parent.name}.yaml"
                file.write_text(yaml.safe_dump(whole(document)))
                files["power" in document].append(str(file))
    # A power budget excludes the settings of other pages.
    answers = [validate(*files[False]), *map(validate, files[True])]
    assert [error for _, _, error in answers if error] == []
    reports = [report for _, found, _ in answers for report in found]
    assert [(report["name"], report["faults"]) for report in reports if report["faults"]] == []
    assert sum(report["verdict"] == "OK" for report in reports) >= 35


@pytest.mark.parametrize(
    "name",
    ["README", "docs/concepts", "docs/first-hour", "docs/index", "docs/install", *map(str, TUTORIALS)],
)
def test_page_for_newcomers_shows_a_claim_of_at_most_15_lines_that_an_example_has(name: str) -> None:
    page = EXAMPLES.parent / f"{name}.md"
    assert all(
        block.count("\n") <= 15 for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    )
    published = [
        document["spec"]["spec"]["devices"]
        for file in EXAMPLES.glob("*/*.yaml")
        for document in yaml.safe_load_all(file.read_text())
        if document["kind"] == "ResourceClaimTemplate"
    ]
    shown = [
        document.get("spec", {"spec": {"devices": document}})["spec"]["devices"]
        for document in blocks(page)
        if "requests" in document or document.get("kind") == "ResourceClaimTemplate"
    ]
    assert shown
    assert [claimed for claimed in shown if claimed not in published] == []


def test_examples_that_need_values_say_how_to_set_them() -> None:
    values = read_yaml(EXAMPLES.parent / "daemonset/chart/values.yaml")
    for readme in EXAMPLES.glob("*/README.md"):
        commands = re.findall(r"^    (helm upgrade .*(?:\\\n.*)*)", readme.read_text(), re.MULTILINE)
        assert len(commands) == (readme.parent.name in CONFIGURED), readme
        for command in commands:
            assert "--reset-then-reuse-values" in command
            for setting in re.findall(r"([\w.]+)=", command):
                inner = values
                for key in setting.split("."):
                    inner = inner[key]


def test_index_of_the_examples_is_complete() -> None:
    index = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| \[([\w-]+)\]\(([\w-]+)\) \|$", index, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(
        path.name for path in EXAMPLES.iterdir() if path.is_dir()
    )
    for name, target in rows:
        assert target == name
        assert {path.name for path in (EXAMPLES / name).iterdir()} == {"README.md", f"{name}.yaml"}
        readme = (EXAMPLES / name / "README.md").read_text()
        assert f"kubectl apply -f examples/{name}" in readme
        for item in yaml.safe_load_all((EXAMPLES / name / f"{name}.yaml").read_text()):
            if name.startswith("mig-") and item["kind"] == "Pod":
                assert f"kubectl logs {item['metadata']['name']}" in readme


def request(**exactly: Any) -> Json:
    return {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"} | exactly}]}


def claim(name: str, devices: Json, version: str = "resource.k8s.io/v1") -> Json:
    metadata = {"name": name}
    return {
        "apiVersion": version,
        "kind": "ResourceClaim",
        "metadata": metadata,
        "spec": {"devices": devices},
    }


POD = {"containers": [{"name": "c", "resources": {"claims": [{"name": "x"}]}}]}


def written_out(short: Json) -> Json:
    """A document of the table of mistakes as a user writes it."""
    more = dict(short)
    selectors = [{"cel": {"expression": more.pop("selector")}}] if "selector" in more else []
    if "claim" in more:
        exactly = more.pop("exactly", {}) | ({"selectors": selectors} if selectors else {})
        name, version = more.pop("claim"), more.pop("apiVersion", "resource.k8s.io/v1")
        return claim(name, request(**exactly) | more, version)
    if "class" in more:
        own = {"metadata": {"name": more["class"]}, "spec": {"selectors": selectors}}
        return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", **own}
    if "pod" in more:
        entries = [{"name": name, "resourceClaimName": of} for name, of in more["claims"].items()]
        own = {"metadata": {"name": more["pod"]}, "spec": POD | {"resourceClaims": entries}}
        return {"apiVersion": "v1", "kind": "Pod", **own}
    return more


def test_each_mistake_has_its_sentence() -> None:
    wrong = data_of(__file__)["test_each_mistake_has_its_sentence"]
    text = yaml.safe_dump_all([written_out(document) for document, _, _ in wrong])
    text += "---\na: 1\na: 2\n---\n- 1\n---\nx: [\n"
    code, reports, error = validate("-", "--simulate", "dgx-h100", stdin=text)
    assert (code, error) == (1, "")
    for (_, kind, expected), report in zip(wrong, reports, strict=False):
        assert any(expected in entry for entry in report[kind]), (report["name"], report)
        assert (report["verdict"] == "FAULT") == bool(report["faults"])
        if kind != "faults" and report["name"] != "Pod unused":
            assert report["faults"] == [], report
    rest = [report["faults"] for report in reports[len(wrong) :]]
    assert rest[0] == ["a appears twice"]
    assert rest[1] == ["this document is not a Kubernetes object"]
    assert rest[2][0].startswith("this is not valid YAML: ")


def test_the_table_shows_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "claims.yaml"
    file.write_text(yaml.safe_dump_all([claim("a", request()), claim("b", request(count=-1))]))
    second = file.read_text().splitlines().index("---") + 2
    done = call("validate", str(file), "--simulate", "t4-4")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    assert lines[0].split() == ["OK", f"{file}:1", "ResourceClaim", "a"]
    assert f"FAULT  {file}:{second}  ResourceClaim b" in lines
    assert "         fault: spec.devices.requests[0].exactly.count: -1 must be greater than zero" in lines
    assert lines[-1] == "2 documents, 1 with faults; checked against t4-4 with all devices free (4 devices)"


@tabled("arguments", "part")
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: tuple[str, ...], part: str) -> None:
    code, _, error = validate(*arguments, stdin="" if len(arguments) == 1 else "a: 1")
    assert code == 2
    (line,) = error.strip().splitlines()
    assert part in line
