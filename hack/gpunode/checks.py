"""Tries the plugin with pods on the node that hack/cluster starts. Runs in namespaces of its own, see run.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_image
import localcluster
import yaml
from localcluster import images, processes
from localcluster.layout import API_PORT, NODE_NAME, Layout
from run import BUNDLE, Result

_LIMIT_S = 300.0
_NAMESPACE = "gpu-dra-driver"
_DAEMONSET = "daemonset/gpu-dra-driver"
_SIMULATOR = Path("/var/lib/gpu-dra-simulator")
_GUARD = r"""#!/bin/sh
# gpunode/checks.py: this machine's settings shall stay as they are.
refused=
case " $* " in
    *" -c "*|*" -pm "*|*" -e "*|*" -pl "*|*" -r "*|*gpu-reset*|*" -lgc "*|*" -ac "*|*set-timeslice*) refused=yes ;;
    *" -mig "*|*" mig -c"*|*" mig -d"*) refused=yes ;;
    *query-gpu=compute_mode*) echo "[N/A]"; exit 0 ;;
esac
[ -z "$refused" ] || { echo "refused: Not Supported"; exit 3; }
exec /guarded/nvidia-smi "$@"
"""
_LAYOUT_LABEL = "nvidia.com/mig.config"
_CUT, _WHOLE = "gpunode-cut", "gpunode-whole"
_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-f-]{36}")
Json = dict[str, Any]


class SkippedError(Exception):
    """A check cannot run on this machine; the text says why."""


class DiffersError(Exception):
    """A result is not the expected one; the text is what was seen."""


def check_node(logs: Path, simulated: str | None, changes: bool, snapshotter: str) -> list[Result]:
    """Start the cluster and the plugin, run every check, save all answers in `logs`, and return the results."""
    node = Node(logs, simulated, changes, snapshotter)
    rows = []
    for check in CHECKS:
        expected, _, _ = (check.__doc__ or "").strip().partition("\n")
        row = Result(check.__name__.replace("_", " "), expected, "", "ok", 0)
        started = time.monotonic()
        try:
            row = replace(row, seen=check(node))
        except SkippedError as error:
            row = replace(row, seen=str(error), verdict="skipped")
        except Exception as error:
            (logs / f"{check.__name__}.txt").write_text(traceback.format_exc() + node.describe())
            row = replace(row, seen=f"{error}", verdict="differs")
        rows.append(replace(row, seconds=time.monotonic() - started))
        print(f"{row.verdict:<8} {rows[-1].seconds:6.1f}  {row.what}: {row.seen}", flush=True)
        if row.verdict == "differs" and check in NEEDED:
            break
        node.clear()
    node.save("end")
    _save_logs(logs)
    return rows


class Node:
    """kubectl, the host's nvidia-smi, and what the checks have in common."""

    def __init__(self, logs: Path, simulated: str | None, changes: bool, snapshotter: str) -> None:
        self.logs = logs
        self.simulated = simulated
        self.changes = changes
        self.options = localcluster.Options(sync_frequency="10s", snapshotter=snapshotter)
        self.layout = Layout.from_environment()

    @property
    def smi(self) -> list[str]:
        """The host's nvidia-smi."""
        if self.simulated:
            return [str(next(_SIMULATOR.glob("root/usr/bin/nvidia-smi")))]
        found = shutil.which("nvidia-smi")
        if found is None:
            raise DiffersError("nvidia-smi is not on PATH")
        return [found]

    def listed(self) -> set[str]:
        """Return the UUIDs that the host's nvidia-smi lists."""
        return set(_UUID.findall(self._ask_smi("-L")))

    def setting(self, field: str) -> dict[str, str]:
        """Return a field of the host's nvidia-smi by the UUID of the GPU, for example `mig.mode.current`."""
        text = self._ask_smi(f"--query-gpu=uuid,{field}", "--format=csv,noheader")
        return {uuid: value for uuid, _, value in (line.partition(", ") for line in text.splitlines())}

    def _ask_smi(self, *words: str) -> str:
        environment = os.environ | ({"GPU_DRA_SIMULATOR": str(_SIMULATOR)} if self.simulated else {})
        done = subprocess.run(
            [*self.smi, *words], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode or not _UUID.search(done.stdout):
            said = (done.stdout + done.stderr).strip() or "no output"
            raise DiffersError(f"the host's nvidia-smi {' '.join(words)}: {said}")
        return done.stdout

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        done = subprocess.run(
            [str(localcluster.kubectl()), "--kubeconfig", str(self.layout.kubeconfig), *words],
            input=stdin, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise DiffersError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *words: str) -> Any:
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def apply(self, objects: list[Json]) -> None:
        self.kubectl(
            "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )

    def example(self, name: str) -> list[Json]:
        """Return the objects of an example."""
        files = sorted((BUNDLE / "examples" / name).glob("*.yaml"))
        return [one for file in files for one in yaml.safe_load_all(file.read_text()) if one]

    def run(self, objects: list[Json]) -> dict[str, str]:
        """Apply the objects, wait until each pod runs or has ended, and return what each one printed."""
        self.apply(objects)
        pods = [one["metadata"] for one in objects if one["kind"] == "Pod"]
        return {meta["name"]: self.output(meta["name"], meta.get("namespace", "default")) for meta in pods}

    def output(self, pod: str, namespace: str = "default") -> str:
        """Return what a pod has printed, once it has printed something."""

        def printed() -> str:
            phase = self.get("pod", pod, "-n", namespace)["status"].get("phase")
            text = self.kubectl("logs", pod, "-n", namespace, check=False) if phase != "Pending" else ""
            if phase == "Failed" and not text:
                raise DiffersError(f"pod {pod} failed without output")
            return text

        return str(self.wait(f"pod {pod} printed nothing", printed))

    def wait(self, complaint: str, check: Callable[[], Any], limit_s: float = _LIMIT_S) -> Any:
        until = time.monotonic() + limit_s
        while not (value := check()):
            if time.monotonic() > until:
                raise DiffersError(f"{complaint} within {limit_s:.0f} s")
            time.sleep(0.2)
        return value

    def driver_pod(self) -> str:
        """Return the name of the plugin's newest pod that runs."""
        found = self.get("pods", "-n", _NAMESPACE, "-l", "app.kubernetes.io/component=node")["items"]
        running = [one["metadata"] for one in found if "deletionTimestamp" not in one["metadata"]]
        newest = max(running, key=lambda meta: str(meta["creationTimestamp"]))
        return str(newest["name"])

    def in_driver(self, *words: str, check: bool = True) -> str:
        return self.kubectl("exec", "-n", _NAMESPACE, self.driver_pod(), "--", *words, check=check)

    def rolled_out(self) -> None:
        self.kubectl("rollout", "status", _DAEMONSET, "-n", _NAMESPACE, f"--timeout={_LIMIT_S:.0f}s")

    def devices(self) -> list[Json]:
        specs = [entry["spec"] for entry in self.get("resourceslices")["items"]]
        return [device for spec in specs for device in spec.get("devices", [])]

    def published(self) -> set[str]:
        """Return the UUIDs of the devices in the slices."""
        found = (device["attributes"].get("uuid", {}).get("string") for device in self.devices())
        return {uuid for uuid in found if uuid}

    def clear(self) -> None:
        """Delete all pods and claims of the checks, and wait until the plugin has undone their claims."""
        for kind in ("pods", "resourceclaims", "resourceclaimtemplates"):
            for namespace in ("default", "admin-access"):
                self.kubectl("delete", kind, "--all", "-n", namespace, "--wait", check=False)

    def describe(self) -> str:
        """Return what the cluster says, for a check that failed."""
        asked = (("get", "pods", "-A", "-o", "wide"), ("get", "resourceclaims", "-A", "-o", "yaml"),
                 ("get", "events", "-A", "--sort-by=.lastTimestamp"))  # fmt: skip
        return "\n".join(self.kubectl(*words, check=False) for words in asked)

    def save(self, phase: str) -> None:
        """Save what the plugin's commands and pages say now."""
        folder = self.logs / phase
        folder.mkdir(exist_ok=True)
        for name, words in (
            ("doctor", ("gpu-dra-driver", "doctor")),
            ("top", ("gpu-dra-driver", "top", "--once")),
            ("inspect", ("gpu-dra-driver", "inspect", "-o", "yaml")),
        ):
            (folder / f"{name}.txt").write_text(self.in_driver(*words, check=False))
        (folder / "cluster.txt").write_text(self.cluster())
        (folder / "metrics.txt").write_text(self.metrics())
        (folder / "slices.yaml").write_text(self.kubectl("get", "resourceslices", "-o", "yaml", check=False))
        (folder / "driver.log").write_text(
            self.kubectl("logs", "-n", _NAMESPACE, self.driver_pod(), check=False)
        )

    def cluster(self) -> str:
        """Return what `gpu-dra-driver cluster --usage` prints.

        The bundle does not have the official client, which reads kubeconfigs. So the command gets a token of a
        ServiceAccount, as in a pod.
        """
        account, name = self.layout.state / "account", "gpunode"
        if not account.exists():
            self.kubectl("create", "serviceaccount", name, "--namespace=kube-system")
            rights = ("--clusterrole=cluster-admin", f"--serviceaccount=kube-system:{name}")
            self.kubectl("create", "clusterrolebinding", name, *rights)
            account.mkdir()
            shutil.copy(self.layout.certificate("ca"), account / "ca.crt")
        (account / "token").write_text(self.kubectl("create", "token", name, "--namespace=kube-system"))
        # Not all variables: a kubeconfig of this machine's user would take precedence.
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")} | {
            "HOME": str(account), "SERVICE_ACCOUNT_DIRECTORY": str(account),
            "KUBERNETES_SERVICE_HOST": self.options.addresses.service, "KUBERNETES_SERVICE_PORT": str(API_PORT),
        }  # fmt: skip
        command = [sys.executable, "-m", "dra_driver.cli.main", "cluster", "--usage"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.stdout + done.stderr

    def metrics(self) -> str:
        path = f"/api/v1/namespaces/{_NAMESPACE}/pods/{self.driver_pod()}:8080/proxy/metrics"
        return self.kubectl("get", "--raw", path, check=False)


def one_uuid(text: str) -> str:
    """Return the only UUID in the output of `nvidia-smi -L`."""
    found = set(_UUID.findall(text))
    if len(found) != 1:
        raise DiffersError(f"the pod sees {len(found)} devices: {text.strip()}")
    return str(found.pop())


# --- the checks, in order. The first line of a docstring is what is expected ---------------------------------------


def control_plane_and_kubelet(node: Node) -> str:
    """etcd, API server, scheduler, containerd and kubelet are ready"""
    node.layout.state.mkdir(parents=True, exist_ok=True)
    shutil.copytree(BUNDLE / "pki", node.layout.pki)
    localcluster.up(node.options)
    return str(node.get("node", NODE_NAME)["status"]["nodeInfo"]["containerRuntimeVersion"])


def image(node: Node) -> str:
    """the plugin's image, made of this machine's Python, is in containerd"""
    archive = node.layout.state / "driver.tar"
    host_image.archive(archive, BUNDLE, node.layout.from_debian, guarded=not node.changes)
    loaded = localcluster.load_image(archive)
    size = archive.stat().st_size >> 20
    archive.unlink()
    return f"{', '.join(loaded)}, {size} MiB"


def plugin(node: Node) -> str:
    """the DaemonSet is ready, and a slice exists"""
    if node.simulated:
        command = [
            sys.executable,
            "-m",
            "dra_driver.cli.main",
            "simulate",
            "create",
            node.simulated,
            "--cdi-hook",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    _install(node, "simulated" if node.simulated else "real")
    node.wait("no device was published", node.devices)
    return f"{len(node.devices())} devices"


def devices_of_the_slices(node: Node) -> str:
    """each GPU that nvidia-smi lists is a device"""
    published = node.published()
    node.save("start")
    if not published >= node.listed() or not published:
        raise DiffersError(f"published {sorted(published)}, nvidia-smi lists {sorted(node.listed())}")
    return f"{len(published)} of {len(node.listed())}"


def one_gpu(node: Node) -> str:
    """nvidia-smi in the pod lists exactly one GPU of the host"""
    uuid = one_uuid(node.run(node.example("one-gpu"))["one-gpu"])
    if uuid not in node.listed():
        raise DiffersError(f"{uuid} is not a GPU of the host")
    return uuid


def no_claim(node: Node) -> str:
    """a pod without a claim has no device file of a GPU"""
    objects = [pod("no-claim", "ls /dev/nvidia* 2>/dev/null | grep -q . && echo found || echo none")]
    seen = node.run(objects)["no-claim"].strip()
    if seen != "none":
        raise DiffersError(seen)
    return seen


def cuda_program(node: Node) -> str:
    """a program of the CUDA driver API computes the right result"""
    return _cuda(node, "compute")


def shared_claim(node: Node) -> str:
    """two pods with one claim see the same GPU"""
    seen = {one_uuid(text) for text in node.run(node.example("shared-claim")).values()}
    if len(seen) != 1:
        raise DiffersError(f"{sorted(seen)}")
    return seen.pop()


def mps(node: Node) -> str:
    """two pods with one claim see the same GPU, and have the same MPS daemon"""
    _need_mps(node)
    outputs = node.run(node.example("mps-shared-claim"))
    seen = {one_uuid(text) for text in outputs.values()}
    pipes = {line for text in outputs.values() for line in text.splitlines() if "PIPE_DIRECTORY" in line}
    if len(seen) != 1 or len(pipes) != 1:
        raise DiffersError(f"{sorted(seen)}, {sorted(pipes)}")
    node.save("mps")
    return f"{seen.pop()}, {pipes.pop()}"


def compute_mode(node: Node) -> str:
    """MPS makes the claim's GPU exclusive to one process while a pod runs; afterwards it has its former compute mode"""
    if not node.changes:
        raise SkippedError("sets the GPU's compute mode, which needs --change-settings")
    _need_mps(node)
    before = node.setting("compute_mode")
    uuid = one_uuid(node.run(node.example("mps-shared-claim"))["mps-a"])
    if before[uuid] == "[N/A]":
        raise SkippedError(f"{uuid} has no compute mode")
    during = node.setting("compute_mode")
    if during != before | {uuid: "Exclusive_Process"}:
        raise DiffersError(f"the claim's GPU is {uuid}; before: {before}; while the pod runs: {during}")
    node.clear()
    node.wait(f"{uuid} is not {before[uuid]} again", lambda: node.setting("compute_mode") == before)
    return f"{uuid}: {before[uuid]}, then {during[uuid]}, then {before[uuid]}"


def mps_limits(node: Node) -> str:
    """a program sees a quarter of the multiprocessors, and gets no more memory than its limit"""
    if node.simulated or shutil.which("nvidia-cuda-mps-control") is None:
        raise SkippedError("needs a real GPU and nvidia-cuda-mps-control")
    objects = node.example("mps-shared-claim")
    limits = {"defaultActiveThreadPercentage": 25, "defaultPinnedDeviceMemoryLimit": "4Gi"}
    objects[0]["spec"]["devices"]["config"][0]["opaque"]["parameters"]["sharing"]["mpsConfig"] = limits
    whole = int(_cuda(node, "processors"))
    node.clear()
    _put_program(objects[1], "processors")
    _put_program(objects[2], "hold", "8192")
    quarter, held = (text.strip() for text in node.run(objects).values())
    found = re.fullmatch(r"out of memory after (\d+) MiB", held)
    seen = f"{quarter} of {whole} multiprocessors, {held}"
    if not (0.2 < int(quarter) / whole <= 0.25 and found and 2048 < int(found[1]) <= 4096):
        raise DiffersError(seen)
    return seen


def usage_by_pod(node: Node) -> str:
    """the memory of a pod on /metrics is that of nvidia-smi"""
    _cuda(node, "hold", "1024")
    command = [*node.smi, "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    expected = sum(map(int, listed))

    def reported() -> int:
        found = re.findall(
            r'^nvidia_dra_pod_memory_used_bytes\{.*pod="cuda".*\} (\S+)$', node.metrics(), re.M
        )
        return int(sum(map(float, found))) >> 20

    node.wait(f"/metrics did not report {expected} MiB", lambda: reported() == expected, 30)
    return f"{expected} MiB"


def time_slices(node: Node) -> str:
    """two pods with a long interval see the same GPU, and doctor has no complaint"""
    if not node.changes:
        raise SkippedError("sets the GPU's time slice, which needs --change-settings")
    seen = {one_uuid(text) for text in node.run(node.example("time-slicing")).values()}
    if len(seen) != 1:
        raise DiffersError(f"{sorted(seen)}")
    return f"{seen.pop()}; {doctor(node)}"


def mig_layout(node: Node) -> str:
    """a layout partitions one GPU, a pod gets a MIG device, and another layout makes the GPU whole again"""
    if not node.changes:
        raise SkippedError("sets MIG mode, which needs --change-settings")
    before, modes = node.listed(), node.setting("mig.mode.current")
    places = node.setting("pci.bus_id")
    first = min(places, key=places.__getitem__)
    if modes[first] != "Disabled":
        raise SkippedError(f"the MIG mode of {first} is {modes[first]}; only Disabled can be restored")
    if node.setting("compute_cap")[first].startswith("8."):
        raise SkippedError(f"{first} changes its MIG mode only with a reset")
    profile = _smallest_profile(node)
    _install(node, "simulated-layout" if node.simulated else "real-layout", layouts=_layouts(profile))
    try:
        _set_layout(node, _CUT)
        _wait_for_layout(
            node, f"no two devices {profile} on {first}", lambda: len(_static(node, profile)) == 2
        )
        uuid = _run_mig(
            node, "static-mig", selector=f'device.attributes["gpu.nvidia.com"].profile == "{profile}"'
        )
        node.save("layout")
        if uuid not in _static(node, profile) or uuid not in node.listed():
            raise DiffersError(f"the pod has {uuid}, the slices have {sorted(_static(node, profile))}")
        if (during := node.setting("mig.mode.current")) != modes | {first: "Enabled"}:
            raise DiffersError(f"MIG mode before: {modes}; with the layout: {during}")
    finally:
        node.clear()
        _set_layout(node, _WHOLE)
        _wait_for_layout(
            node, f"{first} is not whole again",
            lambda: (node.setting("mig.mode.current"), node.listed(), node.published()) == (modes, before, before),
        )  # fmt: skip
        node.kubectl("label", "node", NODE_NAME, f"{_LAYOUT_LABEL}-")
    return f"2 x {profile} on {first}: {uuid}"


def mig_on_demand(node: Node) -> str:
    """a pod gets a MIG device, which is gone after the pod"""
    if not node.changes:
        raise SkippedError("sets MIG mode, which needs --change-settings")
    _install(node, "simulated-mig" if node.simulated else "real-mig")
    profiles = node.wait("no MIG device was published", lambda: sorted(_profiles(node)))
    uuid = _run_mig(node, "mig-on-demand", device_class=f"mig-{profiles[0]}.nvidia.com")
    node.clear()
    node.wait(f"MIG device {uuid} is still there", lambda: uuid not in node.listed())
    return f"{profiles[0]}: {uuid}"


def admin_access(node: Node) -> str:
    """while another pod has a GPU, a monitoring pod sees all GPUs"""
    node.run(node.example("one-gpu"))
    seen = set(_UUID.findall(node.run(node.example("admin-access"))["gpu-monitor"]))
    if seen != node.listed():
        raise DiffersError(f"{len(seen)} of {len(node.listed())} GPUs")
    return f"{len(seen)} GPUs"


def extended_resource(node: Node) -> str:
    """a pod with the limit nvidia.com/gpu: 1 sees one GPU"""
    return one_uuid(node.run(node.example("extended-resource"))["extended-resource"])


def user_namespace(node: Node) -> str:
    """a pod with hostUsers: false sees one GPU"""
    if node.simulated:
        raise SkippedError(
            "runc binds device nodes from /dev there, and a simulated machine's nodes are elsewhere"
        )
    objects = node.example("one-gpu")
    for one in objects:
        if one["kind"] == "Pod":
            one["spec"]["hostUsers"] = False
    return one_uuid(node.run(objects)["one-gpu"])


def eight_replacements(node: Node) -> str:
    """a deleted pod's successor runs, eight times"""
    objects = node.example("one-gpu")
    node.run(objects)
    took = []
    for _ in range(8):
        started = time.monotonic()
        node.kubectl("delete", "pod", "one-gpu", "--grace-period=1")
        node.run(objects)
        took.append(time.monotonic() - started)
    text = node.kubectl("get", "--raw", f"/api/v1/nodes/{NODE_NAME}/proxy/metrics")
    (node.logs / "kubelet-metrics.txt").write_text(text)
    sums = {
        (operation, kind): float(value)
        for kind, operation, value in re.findall(
            r'^dra_operations_duration_seconds_(sum|count)\{.*?operation_name="(\w+)".*?\} (\S+)$', text, re.M
        )
    }
    means = [
        f"{name} {1000 * sums[name, 'sum'] / sums[name, 'count']:.0f} ms"
        for name in ("PrepareResources", "UnprepareResources")
        if sums.get((name, "count"))
    ]
    return f"median {sorted(took)[4]:.1f} s; {', '.join(means)}"


def plugin_killed(node: Node) -> str:
    """a pod that starts while the plugin is killed runs"""
    node.apply(node.example("one-gpu"))
    words = "dra_driver.cli.main run"
    running = [pid for pid in processes.all_pids() if words in " ".join(processes.command_line(pid))]
    if not running:
        raise DiffersError("no process of the plugin was found")
    for pid in running:
        os.kill(pid, 9)
    uuid = one_uuid(node.output("one-gpu"))
    node.rolled_out()
    return uuid


def rolling_update(node: Node) -> str:
    """the program in a running pod does not notice an update of the plugin, and the next pod runs"""
    objects = node.example("one-gpu")
    one_uuid(node.run(objects)["one-gpu"])
    before = node.get("pod", "one-gpu")["status"]["containerStatuses"]
    node.kubectl("rollout", "restart", _DAEMONSET, "-n", _NAMESPACE)
    node.rolled_out()
    after = node.get("pod", "one-gpu")["status"]["containerStatuses"]
    if [one["containerID"] for one in before] != [one["containerID"] for one in after]:
        raise DiffersError("the container was restarted")
    node.clear()
    return one_uuid(node.run(objects)["one-gpu"])


def kubelet_restarted(node: Node) -> str:
    """a pod runs after the kubelet has deleted the slices"""
    localcluster.restart("kubelet")
    started = time.monotonic()
    node.wait("no device was published", node.devices)
    published = time.monotonic() - started
    return f"{one_uuid(node.run(node.example('one-gpu'))['one-gpu'])}, slices after {published:.1f} s"


def invalid_address(node: Node) -> str:
    """Xid 31 is counted, the GPU gets no taint, and the next program works"""
    _cuda(node, "fault")
    node.wait(
        "no Xid 31 was counted", lambda: re.search(r'xids_total\{.*xid="31".*\} [1-9]', node.metrics()), 30
    )
    node.clear()
    if any(device.get("taints") for device in node.devices()):
        raise DiffersError("the GPU has a taint")
    return _cuda(node, "compute")


def doctor(node: Node) -> str:
    """doctor finds no failure"""
    text = node.in_driver("gpu-dra-driver", "doctor", check=False)
    failed = [line for line in text.splitlines() if line.startswith("FAIL")]
    if failed or "OK" not in text:
        raise DiffersError("; ".join(failed) or text.strip()[:200])
    return f"{len(re.findall('^OK', text, re.M))} OK, {len(re.findall('^WARN', text, re.M))} warnings"


def gpu_check(node: Node) -> str:
    """what the plugin publishes agrees with nvidia-smi"""
    if node.simulated:
        raise SkippedError("compares with a real nvidia-smi")
    command = [sys.executable, "-m", "gpucheck"]
    environment = os.environ | {"PYTHONPATH": f"{BUNDLE}/hack:{os.environ['PYTHONPATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    (node.logs / "gpu-check.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise DiffersError(done.stdout.strip()[-300:])
    return done.stdout.strip().splitlines()[-1]


def restricted_profile(node: Node) -> str:
    """without privileges the plugin prepares a claim"""
    if node.simulated:
        raise SkippedError("a simulated machine's device nodes need privileges; make e2e tries this")
    _install(node, "restricted")
    return one_uuid(node.run(node.example("one-gpu"))["one-gpu"])


CHECKS: tuple[Callable[[Node], str], ...] = (
    control_plane_and_kubelet, image, plugin, devices_of_the_slices, one_gpu, no_claim, cuda_program,
    shared_claim, mps, compute_mode, mps_limits, usage_by_pod, time_slices, admin_access, extended_resource,
    user_namespace, eight_replacements, plugin_killed, rolling_update, kubelet_restarted, invalid_address, doctor,
    gpu_check, restricted_profile, mig_layout, mig_on_demand,
)  # fmt: skip
NEEDED = (control_plane_and_kubelet, image, plugin)
"""Without these, no other check can run."""


# --- parts of the checks --------------------------------------------------------------------------------------------


def pod(name: str, script: str) -> Json:
    """Return a pod without a claim."""
    main = {"name": "main", "image": images.WORKLOAD_IMAGE, "command": ["sh", "-c", script]}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [main]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _install(node: Node, objects: str, layouts: Json | None = None) -> None:
    """Apply the chart's objects, with the guard over the plugin's nvidia-smi unless settings may change.

    `layouts` is the section migLayouts of the plugin's configuration file.
    """
    found = [one for one in yaml.safe_load_all((BUNDLE / f"objects/{objects}.yaml").read_text()) if one]
    for one in found:
        if one["kind"] == "ConfigMap" and layouts is not None:
            one["data"]["config.yaml"] = yaml.safe_dump({"migLayouts": layouts})
    if not node.changes:
        guard = node.layout.state / "guard"
        guard.write_text(_GUARD)
        guard.chmod(0o755)
        for one in found:
            if one["kind"] == "DaemonSet":
                _put_guard(one["spec"]["template"]["spec"], guard, Path(node.smi[0]), bool(node.simulated))
    node.apply(found)
    node.rolled_out()


def _put_guard(spec: Json, guard: Path, smi: Path, simulated: bool) -> None:
    inside = str(smi) if simulated else f"/driver-root{smi}"
    for name, path, place in (("guard", guard, inside), ("guarded", smi, "/guarded/nvidia-smi")):
        spec["volumes"].append({"name": name, "hostPath": {"path": str(path), "type": "File"}})
        for container in spec["containers"]:
            container["volumeMounts"].append({"name": name, "mountPath": place, "readOnly": True})


def _need_mps(node: Node) -> None:
    if not node.simulated and shutil.which("nvidia-cuda-mps-control") is None:
        raise SkippedError("this machine has no nvidia-cuda-mps-control")


def _cuda(node: Node, *arguments: str) -> str:
    """Run cuda.py in a pod with one GPU, and return what it printed."""
    if node.simulated:
        raise SkippedError("only a real GPU runs CUDA programs")
    objects = node.example("one-gpu")
    objects[-1]["metadata"]["name"] = "cuda"
    _put_program(objects[-1], *arguments)
    text = node.run(objects)["cuda"].strip()
    if arguments[0] in ("compute", "fault") and not text.endswith("as expected"):
        raise DiffersError(text)
    return text


def _put_program(one: Json, *arguments: str) -> None:
    """Make a pod run cuda.py, in the plugin's image, which has Python."""
    program = (BUNDLE / "hack/gpunode/cuda.py").read_text()
    [main] = one["spec"]["containers"]
    main |= {"image": host_image.NAME, "imagePullPolicy": "Never",
             "command": [str(host_image.PYTHON), "-c", program, *arguments]}  # fmt: skip


def _layouts(profile: str) -> Json:
    """Return two layouts for the first GPU, of which the node's label names one: two MIG devices, or none."""
    cut = {"devices": [0], "mig-enabled": True, "mig-devices": {profile: 2}}
    configuration = {
        "version": "v1",
        "mig-configs": {_CUT: [cut], _WHOLE: [{"devices": [0], "mig-enabled": False}]},
    }
    return {"fromLabel": True, "configuration": configuration}


def _set_layout(node: Node, name: str) -> None:
    node.kubectl("label", "--overwrite", "node", NODE_NAME, f"{_LAYOUT_LABEL}={name}")


def _wait_for_layout(node: Node, complaint: str, check: Callable[[], bool]) -> None:
    """Wait for what a layout brings. If it does not come, add what the plugin last reported about layouts."""
    try:
        node.wait(complaint, check)
    except DiffersError as error:
        events = node.get("events", "-A", "--sort-by=.lastTimestamp")["items"]
        said = [one["message"] for one in events if one["reason"].startswith("MigLayout")]
        raise DiffersError(f"{error}; {said[-1] if said else 'the plugin reported no event'}") from error


def _static(node: Node, profile: str) -> set[str]:
    """Return the UUIDs of the devices in the slices with this MIG profile."""
    found = (device["attributes"] for device in node.devices())
    return {one["uuid"]["string"] for one in found if one.get("profile", {}).get("string") == profile}


def _run_mig(node: Node, example: str, *, device_class: str = "", selector: str = "") -> str:
    """Run an example with another DeviceClass or selector, and return the UUID of the pod's MIG device."""
    objects = node.example(example)
    request = objects[0]["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    if device_class:
        request["deviceClassName"] = device_class
    if selector:
        request["selectors"] = [{"cel": {"expression": selector}}]
    return one_uuid(node.run(objects)[example].partition("MIG ")[2])


def _smallest_profile(node: Node) -> str:
    """Return the first of the MIG profiles for which the plugin has a DeviceClass, such as `1g.10gb`."""
    text = node.in_driver("gpu-dra-driver", "device-classes")
    found = re.search(r"^ +name: mig-(\d+g\.\d+gb)\.nvidia\.com$", text, re.M)
    if not found:
        raise SkippedError("no GPU of this machine has a MIG profile")
    return found[1]


def _profiles(node: Node) -> set[str]:
    """Return the MIG profiles of all devices."""
    found = (device["attributes"].get("profile", {}).get("string") for device in node.devices())
    return {one.replace("+", ".") for one in found if one}


def _save_logs(logs: Path) -> None:
    """Add the logs of all components and pods."""
    with tarfile.open(logs / "cluster-logs.tar", "w") as archive:
        archive.add(Layout.from_environment().logs, "log")
