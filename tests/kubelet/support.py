"""A scripted claim service, raw gRPC clients and waiting, for tests at the socket."""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from playground.kubelet import KubeletSettings, PlaygroundKubelet

from dra_driver.kubelet.grpc_server import GrpcServer, Methods, unary, unix_target
from dra_driver.kubelet.pb import dra_v1_pb2, registration_pb2
from dra_driver.kubelet.plugin import KubeletPlugin, PluginSettings
from dra_driver.model.claim import ClaimRef, Prepared, PreparedDevice
from tests.fakes.waiting import PATIENCE_S

DRIVER = "gpu.example.com"
V1 = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/"
V1BETA1 = "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/"
REGISTRATION = "/pluginregistration.Registration/"


def claim(uid="uid-1", name="claim-1", namespace="default") -> ClaimRef:
    return ClaimRef(namespace, name, uid)


def device(uid="uid-1", **changes) -> PreparedDevice:
    fields = {
        "requests": ("gpu",),
        "pool": "node-1",
        "device": "gpu-4cf8db2d",
        "cdi_ids": (f"k8s.gpu.example.com/claim={uid}",),
    }
    return PreparedDevice(**(fields | changes))


class FakeClaims:
    """Records its calls; `on_prepare` and `on_unprepare` may be replaced."""

    def __init__(self, label="driver") -> None:
        self.label = label
        self.is_cancelled: Callable | None = None
        self.requested: list[tuple[str, tuple[ClaimRef, ...], float | None]] = []
        self.on_prepare: Callable = lambda claims: {ref.uid: Prepared((device(ref.uid),)) for ref in claims}
        self.on_unprepare: Callable = lambda claims: {ref.uid: None for ref in claims}

    def prepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None, is_cancelled: Callable
    ) -> Mapping:
        self.is_cancelled = is_cancelled
        self.requested.append(("prepare", tuple(claims), deadline_s))
        return self.on_prepare(claims)

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None, is_cancelled: Callable
    ) -> Mapping:
        self.is_cancelled = is_cancelled
        self.requested.append(("unprepare", tuple(claims), deadline_s))
        return self.on_unprepare(claims)


class Gate:
    """A Prepare that waits until it is released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, claims):
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        return {ref.uid: Prepared((device(ref.uid),)) for ref in claims}


class Owner:
    """The owner of the plugin; tests replace methods."""

    def __init__(self, **callbacks: Any) -> None:
        self.is_ready = lambda: True
        self.registration_changed = self.plugin_died = lambda _news: None
        vars(self).update(callbacks)


class Node:
    """The kubelet's two directories, and plugins started in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.registry = root / "registry"
        self.plugins = root / "plugins"
        self.registry.mkdir()
        self.started: list[KubeletPlugin] = []

    def plugin(self, claims=None, *, start=True, settings=None, **callbacks) -> KubeletPlugin:
        options = {
            "driver": DRIVER,
            "registry_dir": self.registry,
            "plugins_dir": self.plugins,
            "grace_s": 5.0,
            "guard_s": 0.02,
        } | (settings or {})
        watch = callbacks.pop("watch_device_health", None)
        plugin = KubeletPlugin(PluginSettings(**options), claims or FakeClaims(), Owner(**callbacks), watch)
        self.started.append(plugin)
        if start:
            plugin.start()
        return plugin

    def files(self) -> list[str]:
        """Everything that is not a directory, relative to the root."""
        found = (path for path in self.root.rglob("*") if not path.is_dir())
        return sorted(str(path.relative_to(self.root)) for path in found)


@contextmanager
def channel(path: Path | str, *options: tuple[str, object]) -> Iterator[grpc.Channel]:
    target = f"unix:{path}" if isinstance(path, Path) else path
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1), *options]) as opened:
        yield opened


def call_method(path: Path | str, method: str, request, response, *, timeout=PATIENCE_S, options=()):
    with channel(path, *options) as opened:
        call = opened.unary_unary(method, type(request).SerializeToString, response.FromString)
        return call(request, timeout=timeout)


def get_info(path: Path, **options) -> registration_pb2.PluginInfo:
    info = registration_pb2.PluginInfo
    return call_method(path, REGISTRATION + "GetInfo", registration_pb2.InfoRequest(), info, **options)


def notify(path: Path, registered: bool, error: str = "") -> None:
    request = registration_pb2.RegistrationStatus(plugin_registered=registered, error=error)
    response = registration_pb2.RegistrationStatusResponse
    call_method(path, REGISTRATION + "NotifyRegistrationStatus", request, response)


def prepare(path: Path, *claims: ClaimRef, api=dra_v1_pb2, **options):
    wire = [api.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in claims]
    prefix = V1 if api is dra_v1_pb2 else V1BETA1
    request = api.NodePrepareResourcesRequest(claims=wire)
    return call_method(
        path, prefix + "NodePrepareResources", request, api.NodePrepareResourcesResponse, **options
    )


def unprepare(path: Path, *claims: ClaimRef, api=dra_v1_pb2, **options):
    wire = [api.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in claims]
    prefix = V1 if api is dra_v1_pb2 else V1BETA1
    request = api.NodeUnprepareResourcesRequest(claims=wire)
    return call_method(
        path, prefix + "NodeUnprepareResources", request, api.NodeUnprepareResourcesResponse, **options
    )


class OtherDriver:
    """A DRA driver of someone else, with the sockets and answers of the upstream helper."""

    def __init__(self, registrar: Path, endpoint: Path, name: str = DRIVER) -> None:
        self.requested = 0
        info = registration_pb2.PluginInfo(
            type="DRAPlugin",
            name=name,
            endpoint=str(endpoint),
            supported_versions=("v1.DRAPlugin", "v1beta1.DRAPlugin"),
        )

        def answer(_request, _context):
            self.requested += 1
            return info

        get_info = unary("GetInfo", answer, registration_pb2.InfoRequest)
        prepare = unary(
            "NodePrepareResources",
            lambda _request, _context: dra_v1_pb2.NodePrepareResourcesResponse(),
            dra_v1_pb2.NodePrepareResourcesRequest,
        )
        self._servers = [
            serve(endpoint, {V1 + "NodePrepareResources": prepare}),
            serve(registrar, {REGISTRATION + "GetInfo": get_info}),
        ]

    def stop(self) -> None:
        for each in self._servers:
            each.stop(0)


def serve(path: Path, methods: Methods) -> GrpcServer:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = GrpcServer("other", methods, calls=8, request_bytes=1 << 20)
    made.bind(unix_target(path))
    made.start()
    return made


FAST = KubeletSettings(retry_s=0.02, poll_s=0.005)


@contextmanager
def made_node() -> Iterator[Node]:
    """A node in a directory with a path short enough for sockets; its plugins are stopped after the test."""
    root = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
    node = Node(root)
    yield node
    for plugin in node.started:
        plugin.stop(0)
    shutil.rmtree(root)


@contextmanager
def made_kubelets(node: Node) -> Iterator[Callable[..., PlaygroundKubelet]]:
    """Start kubelets of the playground, with changes to FAST, and stop them after the test."""
    started = []

    def make(**changes):
        kubelet = PlaygroundKubelet(node.registry, replace(FAST, **changes))
        kubelet.start()
        started.append(kubelet)
        return kubelet

    yield make
    for kubelet in started:
        kubelet.stop()
