"""`make playground`: a node to try out, as a process, and its pods."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from playground.jobs import evicting_taint

from tests.fakes.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@dataclass
class Playground:
    """One that runs. It says to `paste` lines, which export `variables`, and then to type `commands`."""

    process: subprocess.Popen[str]
    said: Path
    paste: str
    variables: dict[str, str]
    commands: list[str]

    @property
    def url(self) -> str:
        config = json.loads(Path(self.variables["KUBECONFIG"]).read_text())
        return str(config["clusters"][0]["cluster"]["server"])

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's document."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
        raise AssertionError(text)

    def apply(self, example: str) -> None:
        self.create(documents(example))

    def create(self, objects: Iterable[dict[str, Any]]) -> None:
        for document in objects:
            self.call("POST", _path(document), document)

    def phase(self, pod: str, namespace: str = "default") -> str:
        return self.call("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}")["status"]["phase"]

    def delete(self, pod: str, namespace: str = "default") -> None:
        self.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{pod}")

    def claims(self) -> list[dict[str, Any]]:
        return self.call("GET", "/apis/resource.k8s.io/v1/resourceclaims")["items"]

    def devices(self) -> list[dict[str, Any]]:
        slices = self.call("GET", "/apis/resource.k8s.io/v1/resourceslices")["items"]
        return [device for entry in slices for device in entry["spec"].get("devices", [])]

    def lines(self, start: str) -> list[str]:
        return [line for line in self.said.read_text().splitlines() if line.startswith(start)]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Not pytest's, whose path is too long for sockets. A space is in it, as in some home directories."""
    with TemporaryDirectory(prefix="p -") as path:
        yield Path(path)


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[Callable[..., Playground]]:
    processes: list[subprocess.Popen[str]] = []

    def started(machine: str, *more: str) -> Playground:
        said = tmp_path / f"said-{len(processes)}"
        with said.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "hack/playground", "run", "--simulate", machine, *more],
                cwd=ROOT, stdout=output, stderr=output, text=True, env=os.environ | {"TMPDIR": str(temporary)},
            )  # fmt: skip
        processes.append(process)
        eventually(lambda: "Press Ctrl-C to stop" in said.read_text() or process.poll() is not None)
        text = said.read_text()
        assert process.poll() is None, text
        [paste] = re.findall(r"^  cd .*\n  \. .*\n", text, re.MULTILINE)
        exported = subprocess.run(
            ["bash", "-c", f"{paste}env -0"], capture_output=True, text=True, check=True
        )
        variables = dict(one.split("=", 1) for one in exported.stdout.split("\0") if one)
        commands = re.findall(r"^  ((?:gpu-dra-driver|kubectl) .*)$", text, re.MULTILINE)
        return Playground(process, said, paste, variables, commands)

    yield started
    for process in processes:
        process.terminate()  # not killed, because it stops its MPS host
        process.wait(PATIENCE_S)


def test_pod_runs_and_ends_and_nothing_is_left_when_the_playground_ends(
    start: Callable[[str], Playground], temporary: Path
) -> None:
    playground = start("dgx-h100")
    eventually(playground.devices)
    playground.apply("one-gpu")
    eventually(lambda: playground.phase("one-gpu") == "Running")
    [claim] = playground.claims()
    [device] = claim["status"]["allocation"]["devices"]["results"]
    cdi = Path(playground.variables["CDI_ROOT"])
    assert list(cdi.glob(f"*{claim['metadata']['uid']}*"))
    playground.delete("one-gpu")
    eventually(lambda: not playground.claims())
    assert list(cdi.glob("*")) == []
    printed = [re.sub(r"\d+ ms", "N ms", line) for line in playground.lines("pod ")]
    assert printed == [
        f"pod default/one-gpu scheduled on playground-node: {device['device']}",
        "pod default/one-gpu prepared in N ms",
        "pod default/one-gpu running",
        "pod default/one-gpu deleted, its claims are unprepared",
    ]
    assert playground.end(signal.SIGINT) == 0
    assert list(temporary.iterdir()) == []


def test_every_command_that_it_prints_works(start: Callable[[str], Playground], tmp_path: Path) -> None:
    playground = start("dgx-h100")
    eventually(lambda: len(playground.devices()) == 8)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}  # where kubectl has its cache
    tainted: list[Any] = []
    printed: list[str] = []
    assert len(playground.commands) == 15
    for command in playground.commands:
        if command.startswith("kubectl") and shutil.which("kubectl") is None:
            continue
        done = subprocess.run(
            ["bash", "-c", playground.paste + command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if "simulate lose" in command:
            tainted = eventually(lambda: [one for one in playground.devices() if one.get("taints")])
            eventually(lambda: "GPULost" in str(playground.call("GET", "/api/v1/namespaces/default/events")))
        if command == "kubectl events":
            assert "GPULost" in done.stdout
        if "describe pod" in command:
            assert re.search(r"^Status: +Running$", done.stdout, re.MULTILINE)
            assert re.search(r"^  Normal +Scheduled .* default-scheduler ", done.stdout, re.MULTILINE)
        if "simulate restore" in command:
            eventually(lambda: not any(one.get("taints") for one in playground.devices()))
        if command.endswith(" cluster"):
            printed.append(done.stdout)
    assert [one["attributes"]["index"] for one in tainted] == [{"int": 0}]
    assert ["gpu-lost" in text for text in printed] == [False, True, False]
    assert playground.end(signal.SIGTERM) == 0


def test_fresh_node_has_nothing_to_warn_of_and_only_classes_of_its_devices(
    start: Callable[[str], Playground],
) -> None:
    playground = start("gb10")
    eventually(playground.devices)
    done = subprocess.run(
        ["bash", "-c", f"{playground.paste}gpu-dra-driver doctor"], capture_output=True, text=True, check=True
    )
    assert " OK, 0 WARN, 0 FAIL, " in done.stdout
    classes = playground.call("GET", "/apis/resource.k8s.io/v1/deviceclasses")["items"]
    names = [entry["metadata"]["name"] for entry in classes]
    assert names == ["gpu.nvidia.com", "mig.nvidia.com", "mps.gpu.nvidia.com", "timeslice.gpu.nvidia.com"]


def test_pod_that_does_not_fit_gets_one_claim_however_often_it_is_tried(
    start: Callable[[str], Playground],
) -> None:
    playground = start("gb10")
    eventually(playground.devices)
    playground.apply("two-claims")
    eventually(lambda: playground.lines("pod default/two-claims is waiting: "))
    pod = "/api/v1/namespaces/default/pods/two-claims"
    status = eventually(
        lambda: (
            playground.call("GET", pod)["status"].get("conditions") and playground.call("GET", pod)["status"]
        )
    )
    made = {entry["resourceClaimName"] for entry in status["resourceClaimStatuses"]}
    assert made == {claim["metadata"]["name"] for claim in playground.claims()}


def test_job_runs_its_pods_and_leaves_no_claim(start: Callable[[str], Playground]) -> None:
    playground = start("gb10")
    eventually(playground.devices)
    jobs = "/apis/batch/v1/namespaces/default/jobs"
    template = [one for one in documents("cuda-job") if one["kind"] != "Job"]
    [job] = [one for one in documents("cuda-job") if one["kind"] == "Job"]
    name, job["spec"] = job["metadata"]["name"], job["spec"] | {"completions": 2, "parallelism": 2}
    playground.create(template)
    playground.call("POST", jobs, job)
    # The machine has one GPU, so the second pod waits for the first one.

    def completed() -> Any:
        found = playground.call("GET", f"{jobs}/{name}").get("status", {})
        return found if "completionTime" in found else None

    status = eventually(completed)
    assert (status["active"], status["succeeded"], status["conditions"][0]["type"]) == (0, 2, "Complete")
    eventually(lambda: not any(claim.get("status") for claim in playground.claims()))
    pods = playground.call("GET", "/api/v1/namespaces/default/pods")["items"]
    assert [pod["status"]["phase"] for pod in pods] == ["Succeeded", "Succeeded"]
    playground.call("DELETE", f"{jobs}/{name}")
    eventually(lambda: not playground.call("GET", "/api/v1/namespaces/default/pods")["items"])


def test_taint_with_the_effect_no_execute_evicts_pods_that_do_not_tolerate_it(
    start: Callable[..., Playground], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("health: {taints: {gpu-lost: NoExecute}}")
    playground = start("gb10", "--config", str(config))
    eventually(playground.devices)
    playground.apply("one-gpu")
    playground.apply("admin-access")
    [namespace, agent] = [
        pod["metadata"][key]
        for pod in documents("admin-access")
        if pod["kind"] == "Pod"
        for key in ("namespace", "name")
    ]
    eventually(lambda: playground.phase("one-gpu") == playground.phase(agent, namespace) == "Running")
    lose = [line for line in playground.commands if " simulate lose " in line]
    subprocess.run(["bash", "-c", playground.paste + lose[0]], capture_output=True, check=True)
    [line] = eventually(lambda: playground.lines("pod default/one-gpu is evicted: "))
    assert line.endswith("has the taint gpu.nvidia.com/gpu-lost=:NoExecute")
    assert playground.phase(agent, namespace) == "Running"


TOLERATED, BARE = {"operator": "Exists", "effect": "NoExecute"}, {"operator": "Exists"}


@pytest.mark.parametrize(
    ("effect", "tolerations", "evicts"),
    [
        ("NoExecute", [], True),
        ("NoSchedule", [], False),
        ("None", [], False),
        ("NoExecute", [TOLERATED], False),
        pytest.param("NoExecute", [BARE], True, id="eviction ignores a toleration without effect"),
        ("NoExecute", [TOLERATED | {"key": "other"}], True),
        ("NoExecute", [TOLERATED | {"tolerationSeconds": 60}], True),
        ("NoExecute", [TOLERATED | {"tolerationSeconds": 6000}], False),
        ("NoExecute", [TOLERATED, TOLERATED | {"tolerationSeconds": 60}], True),
    ],
)
def test_pod_is_evicted_as_by_kubernetes(
    effect: str, tolerations: list[dict[str, Any]], evicts: bool
) -> None:
    """The taint is ten minutes old."""
    added = (datetime.now(UTC) - timedelta(minutes=10)).isoformat()
    taint = {"key": "k", "value": "v", "effect": effect, "timeAdded": added}
    spec = {"driver": "d", "pool": {"name": "p"}, "devices": [{"name": "gpu", "taints": [taint]}]}
    result = {"driver": "d", "pool": "p", "device": "gpu", "tolerations": tolerations}
    claim = {"status": {"allocation": {"devices": {"results": [result]}}}}
    why = evicting_taint([claim, {}], [{"spec": spec}])
    assert why == ("device gpu has the taint k=v:NoExecute" if evicts else None)


def test_two_playgrounds_are_next_to_each_other_and_report_why_a_pod_waits(
    start: Callable[[str], Playground], temporary: Path
) -> None:
    one, other = start("gb10"), start("t4-4")
    assert one.variables["KUBECONFIG"] != other.variables["KUBECONFIG"]
    assert one.url != other.url
    one.apply("shared-claim")
    users = [one["metadata"]["name"] for one in documents("shared-claim") if one["kind"] == "Pod"]
    for name in users:
        eventually(lambda name=name: one.phase(name) == "Running")
    one.apply("one-gpu")
    one.apply("extended-resource")
    eventually(lambda: one.lines("pod default/one-gpu is waiting: "))
    eventually(lambda: one.lines("pod default/extended-resource is waiting: "))
    one.delete(users[0])
    eventually(lambda: one.lines(f"pod default/{users[0]} deleted"))
    assert one.phase(users[1]) == "Running"
    assert [claim["metadata"]["name"] for claim in one.claims() if "status" in claim] == ["shared"]
    assert other.claims() == []
    assert (one.end(signal.SIGTERM), other.end(signal.SIGINT)) == (0, 0)
    assert one.lines(f"pod default/{users[1]} deleted, its claims are unprepared")
    assert list(temporary.iterdir()) == []


def _path(document: dict[str, Any]) -> str:
    group = "api/v1" if document["apiVersion"] == "v1" else f"apis/{document['apiVersion']}"
    kind = document["kind"].lower()
    if kind in ("namespace", "deviceclass", "resourceslice"):
        return f"/{group}/{kind}{'es' if kind.endswith('s') else 's'}"
    return f"/{group}/namespaces/{document['metadata'].get('namespace', 'default')}/{kind}s"


def documents(example: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / example / f"{example}.yaml").read_text()))
