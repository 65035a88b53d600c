"""Valid and invalid parameters (parameter_table.yaml) for everything that checks them: the decoder, which
Prepare uses, `gpu-dra-driver validate`, and the admission policy `gpu-dra-driver-parameters` on a real API
server (tests/e2e/test_parameters_policy.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra_driver.api.config import GROUP_VERSION
from tests.fakes.tables import read_yaml

Json = dict[str, Any]


@dataclass(frozen=True)
class Parameters:
    """`faults` are those of the decoder, `validate` and the policy, each with the path before it.

    `policy` says why the policy accepts invalid ones; `refused_by_server` is Kubernetes' own error.
    """

    name: str
    value: Any
    faults: tuple[str, ...] = ()
    policy: str = ""
    refused_by_server: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim's `devices` whose parameters are valid on their own.

    `faults` are those of `validate` and the policy, with the path below `devices`. `device` is (request,
    type) of a device that the scheduler might allocate for it, `admin_access` how, and `prepare` the error of
    a Prepare; None if it succeeds.
    """

    name: str
    devices: Json
    device: tuple[str, str]
    faults: tuple[str, ...] = ()
    prepare: str | None = None
    why_later: str = ""
    admin_access: bool = False


def parameters(kind: Any = "GpuConfig", **fields: Any) -> Json:
    return {"apiVersion": GROUP_VERSION, "kind": kind, **fields}


def mps(kind: str = "GpuConfig", **fields: Any) -> Json:
    return parameters(kind, sharing={"strategy": "MPS", "mpsConfig": fields})


def _parameters(entry: Json) -> Parameters:
    made = parameters(entry.get("kind", "GpuConfig"), **entry.get("fields", {}))
    return Parameters(
        entry["name"],
        entry.get("value", made),
        tuple(entry.get("faults", ())),
        entry.get("policy", ""),
        entry.get("refused_by_server", ""),
    )


def _claim(entry: Json) -> Claim:
    config = [
        {
            "requests": one["requests"],
            "opaque": {
                "driver": "gpu.nvidia.com",
                "parameters": parameters(one["kind"], **one.get("fields", {})),
            },
        }
        for one in entry["config"]
    ]
    request, kind = entry["device"]
    return Claim(
        entry["name"],
        {"requests": entry["requests"], "config": config},
        (request, kind),
        tuple(entry.get("faults", ())),
        entry.get("prepare"),
        entry.get("why_later", ""),
        entry.get("admin_access", False),
    )


_TABLE = read_yaml(Path(__file__).with_suffix(".yaml"))
PARAMETERS = (
    *map(_parameters, _TABLE["parameters"]),
    Parameters(
        "too large",
        parameters(x="a" * 11000),
        ("the parameters are 11070 bytes long; at most 10240 bytes are allowed",),
        refused_by_server="Too long: may not be more than 10240 bytes",
    ),
)
CLAIMS = tuple(map(_claim, _TABLE["claims"]))
