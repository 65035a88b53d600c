"""A node in one directory: a simulated machine with the playground's API server, scheduler and kubelet.

The daemon is the real one. It runs in this process (`make_driver`) or in a separate one (`start_daemon`). Either way,
it connects to the API server as in a pod; commands use a kubeconfig.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal, Self
from unittest import mock

from dra_driver.app.daemon import Driver
from dra_driver.app.platforms import Platform
from dra_driver.app.settings import Settings
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.mps_host.host_files import MpsHostFiles, MpsLayout, mps_layout
from dra_driver.simulator import create_machine
from playground import PATIENCE_S
from playground.apiserver.server import PlaygroundApiServer
from playground.kubelet import KubeletSettings, PlaygroundKubelet
from playground.scheduler import PlaygroundScheduler

DRIVER = "gpu.nvidia.com"
_AMOUNTS = {"cpu": "64", "memory": "512Gi", "pods": "110"}
_NODE_STATUS = {
    "capacity": _AMOUNTS,
    "allocatable": _AMOUNTS,
    "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
    "nodeInfo": {"kubeletVersion": "v1.36.0-playground"},
}
_NO_LIMIT = 0.0  # no rate limit: only this node uses the API server, and a week of churn passes in minutes
_UNLIMITED = ("--kube-api-qps", str(_NO_LIMIT))
_CONTAINERD = """\
version = 3
[plugins."io.containerd.cri.v1.runtime"]
enable_cdi = true
cdi_spec_dirs = ["{cdi}"]
"""

_STOP_S = 10.0

JsonObject = dict[str, Any]


class PlaygroundNode:
    """A whole node except the daemon. It runs from the constructor until `stop` or the end of `with`.

    `machine` is a name from `gpu-dra-driver simulate list` or a YAML file. `name` is the name of the Node object.
    `cdi` is the directory of CDI specs. `device_nodes` and `cdi_hook` are passed to `create_machine`. The path `root`
    must be short, because the path of a socket can have at most 107 bytes, and that of an MPS daemon 106. Raises:
    InvalidConfigError for an unknown machine.
    """

    def __init__(
        self,
        root: Path,
        machine: str = "dgx-h100",
        *,
        name: str,
        kubelet: KubeletSettings | None = None,
        cdi: Path | None = None,
        device_nodes: Literal["auto", "described"] = "described",
        cdi_hook: bool | None = None,
        server: PlaygroundApiServer | None = None,
    ) -> None:
        self.root = root
        self.name = name
        self.cdi = cdi or root / "cdi"
        self.plugin_dir = root / "plugins" / DRIVER
        self.machine = create_machine(machine, root / "machine", device_nodes=device_nodes, cdi_hook=cdi_hook)
        self.registry = root / "plugins_registry"
        self.registry.mkdir()
        self.settings = Settings(
            node_name=name,
            cdi_root=str(self.cdi),
            kubelet_registrar_directory_path=str(self.registry),
            kubelet_plugins_directory_path=str(root / "plugins"),
            kubeconfig=str(root / "kubeconfig"),
            simulate=machine,
            simulator_dir=str(root / "machine"),
            kube_api_qps=_NO_LIMIT,
        )
        self.options = {
            "--node-name": name, "--kubeconfig": str(root / "kubeconfig"), "--simulate": machine,
            "--simulator-dir": str(root / "machine"), "--cdi-root": str(self.cdi),
            "--kubelet-registrar-directory-path": str(self.registry),
            "--kubelet-plugins-directory-path": str(root / "plugins"),
        }  # fmt: skip
        """The flags with the values of `settings`, by which commands of `gpu-dra-driver` find this node."""
        self.server = server or PlaygroundApiServer()
        self.server.start()
        self.server.add("nodes", {"metadata": {"name": name}, "status": _NODE_STATUS})
        for entry in standard_classes(DRIVER).values():
            self.server.add("deviceclasses", entry, group="resource.k8s.io")
        self.server.write_kubeconfig(root / "kubeconfig")
        self.scheduler = PlaygroundScheduler(self.server)
        self._mps_host: MpsHostProcess | None = None
        self.kubelet = PlaygroundKubelet(self.registry, kubelet, on_start=self.wipe)
        self.kubelet.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the kubelet, the API server and the MPS host. The daemon must have exited before."""
        self.stop_mps_host()
        self.kubelet.stop()
        self.server.stop()

    def flags(self, names: Iterable[str] | None = None) -> list[str]:
        """Return `options` as command line arguments: the options with these names, or all."""
        chosen = self.options if names is None else names
        return [part for name in chosen for part in (name, self.options[name])]

    def environment(self) -> dict[str, str]:
        """Return `options` as environment variables, by name."""
        names = {"--config": "CONFIG_FILE"}
        return {
            names.get(option, option.removeprefix("--").replace("-", "_").upper()): value
            for option, value in self.options.items()
        }

    def service_account(self) -> dict[str, str]:
        """Return the environment variables by which a daemon finds the API server without a kubeconfig, as in a pod."""
        return self.server.write_service_account(self.root / "serviceaccount")

    def make_driver(self, platform: Platform | None = None, **changes: Any) -> Driver:
        """Return a daemon for this process, with these settings changed."""
        with mock.patch.dict(os.environ, self.service_account()):
            return Driver(replace(self.settings, kubeconfig=None, **changes), platform)

    def start_daemon(self, *arguments: str, log: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        """Start `gpu-dra-driver run` for this node with further `arguments`, and write its output to `log` if given."""
        program = Path(sys.executable).parent / "gpu-dra-driver"
        flags = self.flags(name for name in self.options if name != "--kubeconfig")
        variables = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
        return subprocess.Popen(
            [program, "run", *flags, *_UNLIMITED, *arguments],
            env=variables | self.service_account(),
            stdout=log,
            stderr=log,
        )

    def configure_runtime(self) -> None:
        """Write the host's configuration of a containerd that reads this node's CDI specs."""
        file = self.machine.host_root / "etc/containerd/config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_CONTAINERD.format(cdi=self.cdi))

    def start_mps_host(self) -> None:
        """Start the MPS host of this node, as its DaemonSet does in a cluster. Do nothing if it is running."""
        if self._mps_host is None:
            program = Path(sys.executable).parent / "gpu-dra-driver"
            names = ("--simulate", "--simulator-dir", "--kubelet-plugins-directory-path")
            command = [str(program), "mps-host", *self.flags(names), "--allow-plain-shm"]
            self._mps_host = MpsHostProcess(command, mps_layout(self.plugin_dir), self.root / "mps-host.log")

    def stop_mps_host(self) -> None:
        """Stop the MPS host if it is running; its MPS daemons keep running."""
        if self._mps_host is not None:
            self._mps_host.stop()
            self._mps_host = None

    def devices(self) -> list[JsonObject]:
        """Return the published devices in their order."""
        slices = self.server.objects("resourceslices")
        return [device for entry in slices for device in entry["spec"].get("devices", [])]

    def wipe(self) -> None:
        """Delete all slices, as a kubelet does when it starts."""
        resource = self.server.resource("resourceslices")
        for entry in self.server.objects("resourceslices"):
            self.server.operations.delete(resource, ("", entry["metadata"]["name"]), {})


class MpsHostProcess:
    """An MPS host that runs from the constructor until `stop`. Its control daemons keep running afterwards.

    `command` is `gpu-dra-driver mps-host` with the flags for `layout`. The process runs in its own session, so
    Ctrl-C in a terminal does not stop it. Its output goes to the file `log`.
    """

    def __init__(self, command: Sequence[str], layout: MpsLayout, log: Path) -> None:
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        files, deadline = MpsHostFiles(layout), time.monotonic() + PATIENCE_S
        while files.host_problem() is not None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the MPS host did not start: {log.read_text()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the process. Safe to call twice."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
