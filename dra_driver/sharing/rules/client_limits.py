"""How many clients and users an MPS daemon serves, and what follows for sharing rules. An unknown GPU or driver counts
as new.

A client is a CUDA context. NVIDIA's MPS manual says 16 on a GPU before Volta, 48 from Volta on, and 60 from CUDA 13.1
(driver R590) on. A MIG device allows fewer, but without a documented number the GPU's is used.

A second user's clients wait until the first's have exited, except from R555 on (`nvidia-cuda-mps-control
-multiuser-server`) on Volta and newer; older programs reject this option and exit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DriverVersions, OfferedDevice
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.problems import ProblemCode
from dra_driver.model.sharing import MAX_MPS_SHARES, SharingPolicy, SharingRule

_VOLTA = (7, 0)
_BEFORE_VOLTA, _BEFORE_CUDA_13_1 = 16, 48
_CUDA_13_1_BRANCH, _MULTI_USER_BRANCH = 590, 555
_BRANCH = re.compile(r"[0-9]{1,6}(?=\.|\Z)")


def is_before_volta(gpu: Gpu) -> bool:
    return gpu.cuda_compute_capability is not None and gpu.cuda_compute_capability < _VOLTA


def max_clients(gpu: Gpu, versions: DriverVersions) -> int:
    if is_before_volta(gpu):
        return _BEFORE_VOLTA
    return _BEFORE_CUDA_13_1 if _is_before(_CUDA_13_1_BRANCH, versions) else MAX_MPS_SHARES


def why_one_user(gpu: Gpu, versions: DriverVersions) -> str | None:
    """Return why MPS serves only one user at a time, and the remedy; None if it can serve several."""
    if is_before_volta(gpu):
        return f"{gpu.product_name} is older than Volta; select a newer GPU"
    if _is_before(_MULTI_USER_BRANCH, versions):
        return f"the node has NVIDIA driver {versions.driver}; update it to R555 or newer"
    return None


def _is_before(branch: int, versions: DriverVersions) -> bool:
    found = _BRANCH.match(versions.driver or "")
    return found is not None and int(found[0]) < branch


@dataclass(frozen=True, slots=True)
class BoundedRule:
    """If MPS enforces the rule, it has at most `max_clients` shares. `note` says so if more are configured."""

    rule: SharingRule
    max_clients: int
    note: str | None = None


def bounded_rule(
    policy: SharingPolicy, device: OfferedDevice, versions: DriverVersions
) -> BoundedRule | None:
    """Return None if the device has no rule."""
    rule = policy.rule_for(device)
    if rule is None:
        return None
    most = max_clients(device.gpu, versions)
    if rule.enforce != "mps" or rule.shares is None or rule.shares <= most:
        return BoundedRule(rule, most)
    cause = "before Volta" if is_before_volta(device.gpu) else f"with driver {versions.driver}, before R590"
    note = (
        f"device {device.name}: it has {most} shares instead of {rule.shares}, because MPS serves at most "
        f"{most} clients on a GPU {cause}; set shares to {most} or fewer, or set enforce to none"
    )
    return BoundedRule(replace(rule, shares=most), most, note)


def notes_of(status: MpsDaemonStatus) -> Iterator[tuple[ProblemCode, str]]:
    """Yield what users of the daemon should know."""
    devices = ", ".join(status.spec.devices)
    if status.not_exclusive:
        yield (
            "mps-not-exclusive",
            f"the compute mode EXCLUSIVE_PROCESS is not available on GPU {' and GPU '.join(status.not_exclusive)}: a "
            f"program that does not reach the MPS daemon of {devices} runs there without the limits of its claim; use "
            "another GPU if the limits must be enforced",
        )
    if len(status.users) > 1 and not status.spec.multi_user:
        users = ", ".join(map(str, status.users))
        yield (
            "mps-users-wait",
            f"processes of the users {users} use the MPS daemon of {devices}, which serves one user at a time: CUDA "
            "calls of one user wait until all CUDA programs of the other user have stopped; run the pods as one user "
            "(runAsUser), or use multiUser, which needs NVIDIA driver R555 or newer",
        )
