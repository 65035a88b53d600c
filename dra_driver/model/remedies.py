"""What to do about a bad GPU, for `doctor`, errors and docs/health.md."""

from __future__ import annotations

from typing import Final

RESET_OR_REBOOT: Final = "reset the GPU or reboot the node"
"""In sentences about what is wrong; `doctor` adds the steps."""
NOT_STARTED: Final = "not-started"
"""A GPU that only commands show, because the plugin never saw it."""
FABRIC: Final = (
    "check `nvidia-smi -q | grep -A10 Fabric` on the node, and the fabric manager, which runs on the node (`systemctl "
    "status nvidia-fabricmanager`) or on the NVLink switches of the rack"
)


def reset(gpu: str = "GPU") -> str:
    """Return the steps that reset a GPU, given as in `nvidia-smi -i`.

    nvidia-smi refuses the reset while persistence mode or any program, also the plugin, keeps the GPU open.
    The text has no "; ", because what follows the last "; " of an error is its remedy.
    """
    return (
        f"run `gpu-dra-driver detach {gpu}`, stop DCGM and other programs that use the GPU, run `nvidia-smi -pm 0 -i "
        f"{gpu}`, `nvidia-smi --gpu-reset -i {gpu}` and, if the mode was on, `nvidia-smi -pm 1 -i {gpu}` on the node, "
        "and then `gpu-dra-driver detach --end`, or reboot the node"
    )


def reboot(node: str) -> str:
    return f"`kubectl drain {node} --ignore-daemonsets --delete-emptydir-data`, then reboot the node"


_REPLACE = "have the GPU replaced"
_SERVICED = "{reset}; if the taint stays after the reset, run `gpu-dra-driver serviced {gpu}`"
_TESTED = "if they keep growing, have the GPU tested"
_SLOW = "check the cooling and the power supply: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu}`"
_PCIE = (
    "run `nvidia-smi -q -i {gpu} | grep -A9 'GPU Link Info'` on the node; check that the GPU sits firmly in its slot, "
    "and check the slot's firmware settings"
)
OF_REASONS: Final[tuple[tuple[str, str], ...]] = (
    ("gpu-lost", "{reboot}; `dmesg | grep -i xid` on the node shows why it was lost; if it is lost again, have it "
                 "replaced"),
    (NOT_STARTED, "`dmesg | grep -i nvrm` on the node shows why; if a reboot does not help, update the NVIDIA driver "
                    "or have the GPU tested"),
    ("row-remap failure", _REPLACE),
    ("reboot-xid", "{reboot}"),
    ("mechanical-xid", "drain the node, switch it off, and check the power cables of the GPU"),
    ("recovery-action reboot", "{reboot}"),
    ("recovery-action system-reboot", "{reboot}"),
    ("recovery-action bus-reset", "{reboot}"),
    ("recovery-action drain-p2p", "delete the pods that use the GPU together with other GPUs{pods}"),
    ("recovery-action recover-imex-domain", "repair the IMEX daemons that are not READY in `nvidia-imex-ctl -N`"),
    ("recovery-action", "{reset}"),
    ("row-remap pending", "{reset}"),
    ("page-retirement", "{reset}"),
    ("memory", _REPLACE),
    ("sram", _REPLACE),
    ("bank-remap", "{reset}"),
    ("repair", "{reset}"),
    ("unresponsive no-answer", "`dmesg | grep -i -E 'xid|nvrm'` on the node shows the cause; {reset}"),
    ("unresponsive", "wait, because the taint clears when the GPU responds again; `dmesg | grep -i -E 'xid|nvrm'` on "
                     "the node often shows the cause; if it takes longer than 15 minutes, {reboot}"),
    ("xid", _SERVICED),
    ("ecc", _SERVICED),
    ("confidential-compute", "attest the GPUs, then run `nvidia-smi conf-compute -srs 1` on the node"),
    ("fabric pending", f"wait; if this lasts, {FABRIC}"),
    ("fabric", FABRIC),
    ("nvlink", "`nvidia-smi nvlink -s -i {gpu}` shows the links; {reset}; if links stay down, have the GPU or its "
               "board replaced"),
    ("flapping", "have the GPU tested; the health_changed log events show its history"),
    ("slowdown", _SLOW),
    ("information-nvlink", "`nvidia-smi nvlink -s -i {gpu}` shows the links; a link is also down while the GPU at its "
                           "other end is reset, in MIG mode or used by a virtual machine"),
    ("nvlink-errors", f"`nvidia-smi nvlink -e -i {{gpu}}` shows error counts; {_TESTED}"),
    ("pcie-width", _PCIE),
    ("pcie-generation", _PCIE),
    ("program-xid", "the taint clears by itself in about 30 seconds; if it does not: {reset}"),
    ("unmonitored", "gpu-dra-driver gets no Xids for this GPU; find them with `dmesg | grep -i xid` on the node"),
    ("information-xid", "nothing: this Xid only informs, and disappears 10 minutes after it last occurred"),
)  # fmt: skip
"""By the first words of a reason; the first match in this table applies.

`{pods}` are the commands that delete the GPU's pods; `{reset}` also deletes them. NVIDIA's catalog requires a
reboot after a `reboot-xid`, and a look at the hardware after a `mechanical-xid`; `information-` is the
severity.
"""
