"""Good inputs, from which the fuzzer starts."""

from __future__ import annotations

import json
from typing import Any

from dra_driver.kubelet.pb import dra_v1_pb2, registration_pb2

Json = dict[str, Any]

DRIVER = "gpu.nvidia.com"
UID = "6a1b2c3d-0000-4000-8000-000000000001"
GPU = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
DEVICE = "gpu-4cf8db2d-mig-1g10gb-19-2"

_VERSION = {"apiVersion": "resource.nvidia.com/v1beta1"}
_MPS_CONFIG = {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi",
               "defaultPerDevicePinnedMemoryLimit": {"0": "5Gi", GPU: "1Gi"}}  # fmt: skip
PARAMETERS: tuple[Json, ...] = (
    {**_VERSION, "kind": "GpuConfig", "sharing": {"strategy": "MPS", "mpsConfig": _MPS_CONFIG}},
    {
        **_VERSION,
        "kind": "GpuConfig",
        "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}},
    },
    {**_VERSION, "kind": "MigDeviceConfig", "sharing": {"strategy": "MPS"}},
    {**_VERSION, "kind": "VfioDeviceConfig"},
)
_RESULT: Json = {
    "request": "gpu/big", "driver": DRIVER, "pool": "node", "device": "gpu-0", "adminAccess": True, "shareID": UID,
    "consumedCapacity": {"memory": "1Gi"},
}  # fmt: skip
_CONFIG = [
    {"source": "FromClass", "requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": PARAMETERS[0]}},
    {"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": PARAMETERS[1]}},
]
_PROC = (
    "Character devices:\n195 nvidia\n511 nvidia-caps\n\nBlock devices:\n7 loop\n",
    "DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
    "MemTotal:  1024 kB\n",
    "ImexChannelCount: 2048\nIMEX_CMD_ENABLED=1\nIMEX_CMD_UNIX_DOMAIN_PATH=/x\n",
)
MPS_SPEC: Json = {"device": "gpu-0", "uuid": GPU, "kind": "gpu", "gpu_uuid": GPU, "multi_user": True,
                   "default_active_thread_percentage": 50, "default_memory_limit_mib": None}  # fmt: skip
MPS_MESSAGES: tuple[Json, ...] = (
    {"v": 1, "verb": "ensure", "spec": MPS_SPEC, "timeout_s": 10},
    {"v": 1, "verb": "stop", "device": "gpu-0", "timeout_s": 1.5, "gpu_uuid": GPU, "kind": "gpu"},
    {"v": 1, "verb": "ping"},
    {"v": 1, "error": {"kind": "retryable", "text": "busy"}},
    {"v": 1, "statuses": [{"device": "gpu-0", "state": "ready", "spec": MPS_SPEC, "pid": 1, "since": 1.0,
                           "clients": 0, "problem": None}]},
)  # fmt: skip
MPS_RECORD: Json = {"format": 1, "spec": MPS_SPEC, "wanted": "running", "boot_id": "boot",
                     "process": {"pid": 1, "start_time": 1}, "compute_mode_before": 0}  # fmt: skip
_PLACEMENT = {"start": 2, "size": 1}
RECORD: Json = {
    "version": 1,
    "claim": {"namespace": "default", "name": "claim", "uid": UID, "podClaimName": "gpu",
              "pods": [{"name": "pod-0", "uid": UID}],
              "results": [{"request": "gpu", "driver": DRIVER, "pool": "node", "device": "gpu-0"}],
              "configs": [{"source": "FromClass", "requests": ["gpu"], "driver": DRIVER,
                           "parameters": PARAMETERS[0]}]},
    "phase": "prepared",
    "bootID": "boot",
    "devices": [{"device": "gpu-0", "kind": "gpu", "uuid": GPU, "gpuUUID": GPU, "adminAccess": True, "shareID": UID,
                 "placement": _PLACEMENT}],
    "steps": [
        {"kind": "create_mig", "device": DEVICE, "gpuUUID": GPU, "pciBusID": "0000:1b:00.0", "profileID": 19,
         "profile": "1g.10gb", "placement": _PLACEMENT},
        {"kind": "leave_mig_mode", "gpuUUID": GPU, "pciBusID": None},
        {"kind": "set_time_slice", "gpuUUID": GPU, "interval": "Long"},
        {"kind": "run_mps", "spec": {"device": "gpu-0", "uuid": GPU, "kind": "gpu", "gpuUUID": GPU, "multiUser": True}},
        {"kind": "write_device_metadata", "versions": ["v1beta1"]},
        {"kind": "write_cdi_spec"},
        {"kind": "of_a_newer_release", "more": 1},
    ],
    "preparedAt": "2026-08-07T12:00:00.000+00:00",
    "later": {"field": [1]},
}  # fmt: skip
LEDGER_ENTRY: Json = {
    "version": 1, "device": DEVICE, "gpuUUID": GPU, "pciBusID": None, "profileID": 19, "profile": "1g.10gb",
    "placement": _PLACEMENT, "bootID": "boot", "phase": "created", "gpuInstanceID": 1, "computeInstanceID": 0,
    "uuid": "MIG-1", "gpuMinor": 0,
}  # fmt: skip
LEDGER_MODE: Json = {"version": 1, "gpuUUID": GPU, "pciBusID": None, "bootID": "boot"}
HEALTH: Json = {"version": 1, "bootID": "boot", "driverVersion": "580.1", "states": []}
SPEC: Json = {
    "cdiVersion": "0.5.0", "kind": f"k8s.{DRIVER}/claim",
    "containerEdits": {"env": ["A=b"], "hooks": [{"hookName": "createContainer", "path": "/x", "args": ["x"]}]},
    "devices": [{"name": f"{UID}-gpu-0", "containerEdits": {
        "deviceNodes": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}],
        "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["ro"]}]}}],
}  # fmt: skip
METADATA: Json = {"kind": "DeviceMetadata", "metadata": {"uid": UID, "generation": 1}, "requests": []}
CONTAINERD = """version = 2
imports = ["/etc/containerd/conf.d/*.toml", "more.toml"]
[plugins."io.containerd.grpc.v1.cri"]
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
[crio.runtime]
cdi_spec_dirs = ["/etc/cdi"]
"""


def seeds(target: str) -> tuple[bytes, ...]:
    """The good inputs of a target."""
    return tuple(_bytes(seed) for seed in _seeds()[target])


def _seeds() -> dict[str, tuple[bytes | str | Json | list[Any], ...]]:
    claim = {"results": [_RESULT], "config": _CONFIG}
    return {
        "kubelet-message": (_message(), registration_pb2.PluginInfo(type="DRAPlugin").SerializeToString()),
        "claim-names": (f"default\nclaim\n{UID}\ngpu", "a\na.b-c\nA_1\nr/s\npod-claim", "..\n..\n..\n.."),
        "claim": (claim, {}),
        "parameters": PARAMETERS,
        "record": (RECORD,),
        "record-file": (RECORD,),
        "ledger-file": (LEDGER_ENTRY, LEDGER_MODE),
        "health-file": (HEALTH,),
        "lock-file": ([[UID, 1]],),
        "cdi-file": (SPEC,),
        "metadata-file": (METADATA,),
        "mps-record": (MPS_RECORD,),
        "mps-message": MPS_MESSAGES,
        "mps-answer": ("25.0", "4G", "Device 0: 4096M"),
        "nvidia-smi": ("\1Timeslice is Not Supported", "\1GPU is lost", "\1GPU GPU-1 was not found"),
        "proc": _PROC,
        "runtime-config": (CONTAINERD, 'version = 3\nimports = ["*.toml", "../x"]\n'),
        "config-file": (
            "nodeName: a\nsharing: [{mode: shares, shares: 4}]\n",
            "healthcheckPort: 1\ndynamicMig: {enabled: true, adopt: keep}\n",
            "imex: {channel: 0}\nhostDevices: [gds]\n",
        ),
        "selector": (
            'device.driver == "a" && device.attributes["a"].type in ["gpu", 1.5]',
            "a.b(c)[0] ? 1 : {1: 2}",
        ),
        "api-refusal": (
            '503 7\n{"kind": "Status", "message": "busy", "reason": "a", "details": {"retryAfterSeconds": 3}}',
            "429 Wed, 21 Oct 2026 07:28:00 GMT\n<html>maintenance</html>",
            '404 \n{"kind": "Status", "details": {"name": "claim"}}',
        ),
        "api-claim": (
            {
                "metadata": {"uid": UID, "deletionTimestamp": "2026-08-07T12:00:00Z"},
                "status": {
                    "reservedFor": [{"resource": "pods", "name": "pod-0", "uid": UID}],
                    "allocation": {"devices": claim},
                },
            },
        ),
        "api-watch": (
            '{"type": "ADDED", "object": {"apiVersion": "resource.k8s.io/v1beta1", "kind": "ResourceSlice", '
            '"metadata": {"resourceVersion": "7"}, "spec": {"devices": [{"name": "a", "basic": {}}]}}}\n',
            '{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}}\n'
            '{"type": "ERROR", "object": {"code": 410, "message": "too old"}}\n',
        ),
        "documents": (
            "kind: List\nitems: [{kind: Pod, metadata: {name: x, namespace: y}}, 3]\n---\na: &a {b: [1]}\nc: *a\n",
        ),
        "log-text": (
            "Bearer abcdefghijk\npassword=abcdefgh",
            "https://me:secret@host/ eyJhbGciOiJSUzI1.aaaa.bbbb",
        ),
        "quantity": ("81559Mi", "-1.5e3", "500m", "00000000:1B:00.0", "1000000:1b:00.f"),
    }


def _bytes(seed: bytes | str | Json | list[Any]) -> bytes:
    match seed:
        case bytes():
            return seed
        case str():
            return seed.encode()
    return json.dumps(seed).encode()


def _message() -> bytes:
    claims = [dra_v1_pb2.Claim(namespace="default", name=f"claim-{n}", uid=f"{UID}{n}") for n in range(3)]
    return bytes(dra_v1_pb2.NodePrepareResourcesRequest(claims=claims).SerializeToString())
