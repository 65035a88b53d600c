"""Loads the driver's image into the cluster of hack/cluster, and installs the chart with `values/e2e.yaml`.

It waits until the driver is ready and its slices exist, and prints how to list them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(ROOT / "hack"))

import image  # noqa: E402
import localcluster  # noqa: E402

_READY_S = 600


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    """Run kubectl, and return its output; exit with its error message if it fails."""
    command = [str(localcluster.kubectl()), *arguments]
    environment = {**os.environ, "KUBECONFIG": str(localcluster.kubeconfig())}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def device_count() -> int:
    """Return the number of devices in all slices."""
    slices = json.loads(kubectl("get", "resourceslices", "-o", "json"))["items"]
    return sum(len(entry["spec"].get("devices") or []) for entry in slices)


def main() -> int:
    """Install the driver, and wait for its slices."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"loaded image: {', '.join(localcluster.load_image(image.archive()))}")
    was_there = "gpu-dra-driver" in kubectl("get", "daemonsets", "-A", "-o", "name")
    print(kubectl("apply", "--filename", "-", stdin=localcluster.manifests("e2e")), end="")
    if was_there:
        # A new image has the same name, so the manifest does not change, and `apply` does not restart the pods.
        kubectl("-n", "gpu-dra-driver", "rollout", "restart", "daemonset/gpu-dra-driver")
    kubectl("-n", "gpu-dra-driver", "rollout", "status", "daemonset/gpu-dra-driver", f"--timeout={_READY_S}s")
    deadline = time.monotonic() + _READY_S
    while device_count() == 0:
        if time.monotonic() > deadline:
            sys.exit("no devices were published; see: kubectl -n gpu-dra-driver logs ds/gpu-dra-driver")
        time.sleep(0.2)
    print(f"{device_count()} devices are published. List them, and run a pod with one:\n")
    print(f"  export KUBECONFIG={localcluster.kubeconfig()}")
    print("  kubectl get resourceslices -o yaml")
    print("  kubectl apply -f examples/one-gpu && kubectl wait --for=condition=Ready pod/one-gpu")
    print("  kubectl exec one-gpu -- nvidia-smi -L")
    return 0


if __name__ == "__main__":
    sys.exit(main())
