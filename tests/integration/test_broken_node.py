"""A node that is broken in one way: within a minute an event, a readiness note, the metric and `top` say so, and
`doctor` fails if pods will not get their devices. What each tool prints is the table of docs/troubleshooting.md.

The daemons are processes of their own, with the time limits that users have. All nodes of this file are broken at the
same time, since each of them mostly waits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from playground.kubelet import KubeletSettings

from dra_driver.model.claim import ClaimRef
from tests.fakes.machines import silence
from tests.fakes.mps_behaviour import fails_to_start, misbehave
from tests.fakes.scrapes import samples_in
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import DRIVER, Node, own_address, parameters
from tests.integration.test_process import call
from tests.kubelet.support import OtherDriver, notify

pytestmark = pytest.mark.timeout(1800)  # the first test starts all nodes

WITHIN_S = 60.0 + PATIENCE_S
"""A minute is what the daemon may take on a machine that has time for it."""
PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
GOLDEN = Path(__file__).with_name("golden") / "broken_node.md"
"""The page's table, with the texts of checks and events, and remedies."""
POD = "gpu-dra-driver-7xk2p"
_LONG = re.compile(r"[\w/.:-]{23,}[\w/-]")
"""What the manual's tables must be able to break."""
_SECONDS = re.compile(r"\b\d+ s\b")
_VARIES = re.compile(
    r" \(for \w+\)| \(UID [0-9a-f-]+\)| \(GPU-[0-9a-f-]+\)"
    r"|(?<=GPU-[0-9a-f]{8})-[0-9a-f-]{27}|\[[-0-9: ]+ Control \d+\] "
    r"|unmonitored:None, |(?<=claim_)[0-9a-f-]{36}|(?<=/claims/)[0-9a-f-]{36}"
)


class Site:
    """A node, its daemon in a process, and the address where that serves HTTP."""

    def __init__(self, root: Path) -> None:
        self.node = Node(root)
        self.node.configure_runtime()
        self.node.kubelet.settings = KubeletSettings(poll_s=0.2)  # there are many
        self.refused = root / "refused"
        self.address = own_address()
        self.process: Any = None
        self.more = ExitStack()
        self.pod = self.node.service_account() | {"HOSTNAME": POD}

    def start(self, before: str = "", **settings: str) -> None:
        """Start a daemon that cannot write where the file `refused` says, for the reason that it gives."""
        hook = f"""
import errno, os
refused, opened = {str(self.refused)!r}, os.open
def guarded(path, flags, *more, **options):
    if flags & (os.O_WRONLY | os.O_RDWR) and os.path.exists(refused):
        name, place = open(refused).read().split()
        if os.path.abspath(os.fspath(path)).startswith(place):
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
    return opened(path, flags, *more, **options)
os.open = guarded
{before}
"""
        self.process = self.node.spawn(before=hook, HTTP_ENDPOINT=self.address, **settings)

    def wait(self) -> None:
        """Until the daemon serves."""
        self.node.kubelet.wait_registered(DRIVER)
        eventually(lambda: len(self.node.devices()) >= 8)

    def stop(self) -> None:
        self.more.close()
        self.node.stop()

    def refuse(self, error: str, directory: Path) -> None:
        """Let the daemon write nothing below a directory."""
        self.refused.write_text(f"{error} {directory}")

    def get(self, path: str) -> str:
        """The page, whatever its status is; empty while no one answers."""
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=PATIENCE_S) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except OSError:
            return ""

    def answer(self, *command: str) -> Any:
        """What a command prints that runs in the plugin's pod."""
        own = self.node.environment() | self.pod | {"HTTP_ENDPOINT": self.address}
        del own["KUBECONFIG"]
        done = call(*command, "-o", "json", **own)
        assert done.stdout, (command, done.stderr)
        return json.loads(done.stdout)

    def for_manual(self, text: str) -> str:
        """The text without what differs from run to run, with the usual directories."""
        node = self.node
        for ours, usual in (
            (f"{node.machine.host_root}/", "/"),
            (node.machine.host_root, "/"),
            (node.cdi, "/var/run/cdi"),
            (node.root / "plugins", "/var/lib/kubelet/plugins"),
            (node.registry, "/var/lib/kubelet/plugins_registry"),
            (node.root / "serviceaccount", "/var/run/secrets/kubernetes.io/serviceaccount"),
        ):
            text = text.replace(str(ours), str(usual))
        return _VARIES.sub("", _SECONDS.sub("N s", text)).replace("|", "\\|").replace("<version>", "VERSION")

    def device(self, index: int = 0) -> str:
        return str(self.node.devices()[index]["name"])

    def claim(self, config: list[dict[str, Any]] | None = None, device: str | None = None) -> ClaimRef:
        """A claim that a Prepare was tried for."""
        name = f"train-{len(self.node.server.objects('resourceclaims'))}"
        ref = self.node.allocated_by_hand(name, device or self.device(), config=config)
        self.node.kubelet.prepare(DRIVER, [ref], timeout_s=20)
        return ref


@dataclass(frozen=True)
class Break:
    """How a node is broken, and what is then seen: the kind of problem and a word of its sentence, if it is one of the
    node's problems, and the event."""

    do: Callable[[Site], object]
    event: str | None = None
    problem: str | None = None
    says: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    check: str | None = None
    """The check of `doctor` that knows the cause, if not the first that fails."""
    is_running: bool = True
    fails_readiness: bool = False


def _foreign(site: Site) -> None:
    other = OtherDriver(site.node.registry / "other-reg.sock", site.node.root / "other.sock", DRIVER)
    site.more.callback(other.stop)


def _fill_the_disk(site: Site) -> None:
    site.refuse("ENOSPC", site.node.plugin_dir)
    site.claim()


def _make_cdi_read_only(site: Site) -> None:
    site.claim()
    site.refuse("EROFS", site.node.cdi)
    site.claim(device=site.device(1))


def _lose_a_gpu(site: Site) -> None:
    site.claim()
    site.node.machine.lose_gpu(0)


def _xid(number: int, action: int) -> Callable[[Site], None]:
    """With the recovery action that NVML then requests."""

    def do(site: Site) -> None:
        site.claim()
        site.node.machine.raise_xid(0, number)
        site.node.machine.set_recovery_action(0, action)

    return do


def _unload(site: Site) -> None:
    device = site.device()
    site.node.machine.unload_driver()
    site.claim(device=device)


def _take_libraries(site: Site) -> None:
    for file in site.node.machine.host_root.rglob("libcuda.so*"):
        file.unlink()
    site.claim()


def _refuse_slices(site: Site) -> None:
    user = "system:serviceaccount:gpu-dra-driver:gpu-dra-driver"
    message = f"resourceslices.resource.k8s.io is forbidden: User {user} cannot create resourceslices"
    body = json.dumps({"kind": "Status", "code": 403, "reason": "Forbidden", "message": message}).encode()
    for method in ("POST", "PUT", "PATCH"):
        site.node.server.faults.fail(10**6, 403, path="resourceslices", method=method, body=body)
    site.node.wipe()


def _lose_the_token(site: Site) -> None:
    site.node.service_account = lambda: site.pod  # type: ignore[method-assign]
    Path(site.node.root, "serviceaccount/token").unlink()
    site.start()


def _kill(site: Site) -> None:
    site.process.kill()
    site.process.wait()


def _lose_the_kubelet(site: Site) -> None:
    site.node.kubelet.stop()
    site.start()


def _refuse_registration(site: Site) -> None:
    with suppress(grpc.RpcError):  # it answers that this failed
        notify(site.node.registry / f"{DRIVER}-reg.sock", False, "plugin versions are not supported")


def _end_the_mps_daemon(site: Site) -> None:
    node = site.node
    node.start_mps_host()
    site.more.callback(lambda: node.kubelet.unprepare(DRIVER, node.recorded()))
    site.claim(parameters(strategy="MPS"))
    misbehave(node.machine.host_root, **fails_to_start("cannot start"))
    node.stop_mps_host()  # so that one check finds the exit and the failing start
    [file] = node.plugin_dir.glob("mps/*/pipe/*.pid")
    os.kill(int(file.read_text()), signal.SIGKILL)
    node.start_mps_host()


def _hold_a_mig_device(site: Site) -> None:
    node = site.node
    device = next(one["name"] for one in node.devices() if one["name"].endswith("-mig-1g10gb-19-0"))
    ref = site.claim(device=device)
    gpu = next(gpu for gpu in node.machine.current().gpus if gpu.instances)
    node.machine.hold_gpu(gpu.uuid, 4711, "python3", gpu_instance=gpu.instances[0].id)
    node.kubelet.unprepare(DRIVER, [ref])


def _forget_a_claim(site: Site) -> None:
    site.claim()
    site.node.machine.hold_gpu(0, 4711, "python3")
    site.node.delete_claim("train-0")


def _switch_cdi_off(site: Site) -> None:
    file = site.node.machine.host_root / "etc/containerd/config.toml"
    file.write_text(file.read_text().replace("enable_cdi = true", "enable_cdi = false"))


def _stop_the_fabric(site: Site) -> None:
    site.node.machine.set_fabric(state=2)


QUICK = "from dra_driver.claims.reconciler import Rhythm; Rhythm.__init__.__defaults__ = (0.2, 0.3, 0.2, 0.1, 0.1, 5.0)"

READS_OFTEN = "import dra_driver.inventory.discovery as discovery; discovery._RESCAN_EVERY_S = 5.0"

BREAKS: Mapping[str, Break] = {
    "a GPU fell off the bus": Break(_lose_a_gpu, "GPULost"),
    "Xid 95, NVML requests a reset": Break(_xid(95, 1), "GPUUnhealthy"),
    "Xid 79, NVML requests a reboot": Break(_xid(79, 2), "GPUUnhealthy"),
    "every query to a GPU fails": Break(
        lambda site: silence(site.node.machine, 3), "GPUUnhealthy", "gpu-unresponsive", "does not answer"
    ),
    "NVML hangs for a GPU": Break(
        lambda site: site.node.machine.set_fault("nvmlDeviceGet[!HUM]*", delay_s=600, gpu=3),
        "GPUUnhealthy",
        "gpu-unresponsive",
        "does not return",
        check="NVML",
    ),
    "NVML hangs": Break(
        lambda site: site.node.machine.set_fault("nvml*", delay_s=600, blocks_all=True),
        "GPUUnhealthy",
        "gpu-unresponsive",
        "does not return",
        check="NVML",
    ),
    "the NVIDIA driver is not loaded": Break(_unload, "DriverUnavailable", "gpus-unavailable", "not loaded"),
    "`libcuda.so` is missing": Break(
        _take_libraries, "DriverFilesMissing", "driver-files-missing", "libcuda.so", before=READS_OFTEN
    ),
    "the fabric manager does not run": Break(_stop_the_fabric, "GPUUnhealthy"),
    "the CDI directory is read-only": Break(
        _make_cdi_read_only, "DiskNotWritable", "disk-not-writable", "read-only"
    ),
    "the disk is full": Break(_fill_the_disk, "DiskNotWritable", "disk-not-writable", "disk is full"),
    "the kubelet's socket is missing": Break(
        _lose_the_kubelet,
        "PluginNotRegistered",
        "not-registered",
        "not registered",
        is_running=False,
        fails_readiness=True,
    ),
    "the kubelet refuses the plugin": Break(
        _refuse_registration, "PluginNotRegistered", "not-registered", "not supported", fails_readiness=True
    ),
    "another driver has the same name": Break(_foreign, "ForeignDriver", "foreign-driver", "other-reg.sock"),
    "the API server refuses slices": Break(
        _refuse_slices, "SlicesNotPublished", "slices-not-published", "HTTP 403"
    ),
    "the token is missing, the plugin ends": Break(_lose_the_token, is_running=False, check="API server"),
    "the plugin was killed": Break(_kill),
    "CDI is off in containerd": Break(_switch_cdi_off),
    "the MPS host is gone": Break(
        lambda site: site.claim(parameters(strategy="MPS")), "MpsHostMissing", "mps-host-missing", "MPS host"
    ),
    "an MPS daemon ended": Break(
        _end_the_mps_daemon, "MpsDaemonFailed", "mps-daemon-failed", "stopped during its start"
    ),
    "a MIG device cannot be destroyed": Break(
        _hold_a_mig_device, "MigDestroyDelayed", settings={"DYNAMIC_MIG": "true"}, check="cleanup"
    ),
    "a Prepare fails": Break(
        lambda site: site.claim(device="gpu-0"), "PrepareFailed", "claims-failing", "does not exist"
    ),
    "the claim of a running process was deleted": Break(
        _forget_a_claim, "ClaimStillInUse", "claim-in-use", "was deleted", before=QUICK
    ),
}


@pytest.fixture(scope="module")
def broken(_memory_root: Path) -> Iterator[Mapping[str, Site]]:
    """A node for each break, broken just now: in memory, but for MPS daemons, which have a /dev/shm of their own."""
    with ExitStack() as stack:
        sites: dict[str, Site] = {}
        for name, one in BREAKS.items():
            top = "/tmp" if one.do is _end_the_mps_daemon else _memory_root
            sites[name] = Site(Path(stack.enter_context(TemporaryDirectory(prefix="b-", dir=top))))
        pool = ThreadPoolExecutor()
        stack.callback(lambda: [*pool.map(Site.stop, sites.values())])
        running = {sites[name]: one for name, one in BREAKS.items() if one.is_running}
        for site, one in running.items():
            site.start(one.before, **one.settings)
        for site in running:
            site.wait()
        for name, one in BREAKS.items():
            one.do(sites[name])
        yield sites


@pytest.mark.parametrize("name", [name for name, one in BREAKS.items() if one.problem])
def test_broken_node_says_so_everywhere_within_a_minute(name: str, broken: Mapping[str, Site]) -> None:
    site, expected = broken[name], BREAKS[name]

    def problem() -> Any:
        page = site.get("/problems") or '{"problems": []}'
        return next((one for one in json.loads(page)["problems"] if one["problem"] == expected.problem), None)

    found = eventually(problem, WITHIN_S)
    assert expected.says in found["text"]
    ready = site.get("/readyz").splitlines()
    assert any(expected.says in line for line in ready), ready
    assert (ready[0] != "ok") == expected.fails_readiness, ready
    samples = samples_in(site.get("/metrics"))
    labels = (("driver", DRIVER), ("problem", expected.problem))
    assert samples["nvidia_dra_problems", labels] >= 1
    assert samples["nvidia_dra_node_problem", labels[:1]] == 1


def test_broken_nodes_are_shown_as_the_manual_says(
    broken: Mapping[str, Site], is_golden: Callable[[Path, str], None]
) -> None:
    for name, site in broken.items():
        reason = BREAKS[name].event
        if reason is not None:
            eventually(partial(site.node.events, reason), WITHIN_S)
    with ThreadPoolExecutor() as pool:
        rows = [*pool.map(lambda name: _row(broken[name], name), BREAKS)]
    header = ("Fault", "`doctor`", "Also shown by")
    is_golden(GOLDEN, _table((header, ["---"] * 3, *rows)))
    before, mark, rest = PAGE.read_text().partition("<!-- breaks -->\n")
    after = "".join(rest.partition("<!-- end of breaks -->")[1:])
    short: dict[tuple[str, str], list[str]] = {}
    for name, doctor, also in rows:
        key = (f"`{doctor.partition(': ')[0]}`", re.sub(r"(event `\w+`): .*", r"\1", also))
        short.setdefault(key, []).append(name)
    shown = [("; ".join(names), *key) for key, names in short.items()]
    is_golden(PAGE, f"{before}{mark}{_table((header, ['---'] * 3, *shown))}{after}")


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(site: Site, name: str) -> list[str]:
    """The break, what `doctor` says and what to do, the other tools that show it, and the event with its first sentence
    if `doctor` does not say the same."""
    expected = BREAKS[name]

    def checked() -> list[Any] | None:
        """The checks, unless the machine is so busy that NVML takes longer than `doctor` waits."""
        found = [one for one in site.answer("doctor")["checks"] if one["check"] != "nvidia-cdi-hook"]
        is_late = any(one["check"] == "NVML" and "has not answered" in one["seen"] for one in found)
        return None if is_late and expected.check != "NVML" else found

    checks = eventually(checked)
    worst = next(one for status in ("FAIL", "WARN") for one in checks if one["status"] == status)
    assert worst["status"] == "FAIL", (name, worst)
    cause = next(one for one in checks if one["check"] == (expected.check or worst["check"]))
    doctor = f"{cause['status']} {cause['check']}: {cause['seen']} -> {cause['remedy']}"
    top = site.answer("top", "--once")
    seen = sorted(one["text"] for one in (top["problems"] or top["health"])) or top["notes"]
    claims = site.answer("claims")
    of_claims = [
        *(f"{one['ref']['namespace']}/{one['ref']['name']}: {one['error']}" for one in claims["failing"]),
        *(one["text"] for one in claims["cleanups"]),
        *claims["problems"],
    ]
    devices = site.answer("cluster", "--kubeconfig", str(site.node.root / "kubeconfig"))["rows"]
    problems = [one["problem"] for one in devices if one["problem"] != "-"]
    events = sorted(one["message"] for one in site.node.events(expected.event or ""))
    event = f"event `{expected.event}`"
    reported = site.for_manual(doctor)
    also = [
        place for place, texts in (("`top`", seen), ("`claims`", of_claims), ("`cluster`", problems)) if texts
    ]
    if events:
        text = site.for_manual(events[0].partition("; ")[0])
        also.append(event if _prints_the_same(text, reported) else f"{event}: {text}")
    return [name, *map(_breakable, (reported, ", ".join(also)))]


def _breakable(text: str) -> str:
    """With long words as code."""
    parts = text.split("`")
    return "`".join(part if number % 2 else _LONG.sub(r"`\g<0>`", part) for number, part in enumerate(parts))


def _prints_the_same(text: str, doctor: str) -> bool:
    """Whether `doctor` also prints the sentence, or its end."""
    parts = text.split(": ")
    ends = (": ".join(parts[number:]) for number in range(len(parts)))
    return any(len(end) > 20 and end.lower() in doctor.lower() for end in ends)
