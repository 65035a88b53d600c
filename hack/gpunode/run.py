"""Makes this machine a Kubernetes node, and tries gpu-dra-driver on it with pods. Leaves nothing behind.

Needs root and Python, and no network. Uses the machine's GPUs, or a simulated machine. Without --change-settings, no
setting of a GPU changes: a guard refuses each call of NVML and nvidia-smi that would change one.

Prints a table of what was tried, and writes all logs and answers to an archive. The exit code is the number of results
that differ from what is expected, at most 100.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[2]
PACKAGES = BUNDLE / "packages" / f"{sys.version_info.major}.{sys.version_info.minor}"
sys.path[:0] = [str(BUNDLE / "hack" / "cluster"), str(BUNDLE), str(PACKAGES)]

_ARCHIVE = "gpu-node-results.tar.xz"
_SETTINGS = [
    "uuid",
    "persistence_mode",
    "compute_mode",
    "mig.mode.current",
    "power.limit",
    "ecc.mode.current",
]
_OVERLAY = (
    "mount -t tmpfs tmpfs /tmp && mkdir /tmp/l /tmp/u /tmp/w /tmp/m && "
    "mount -t overlay overlay -o lowerdir=/tmp/l,upperdir=/tmp/u,workdir=/tmp/w /tmp/m"
)


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the table. `verdict` is ok, differs or skipped."""

    what: str
    expected: str
    seen: str
    verdict: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, and return the number of results that differ."""
    parsed = _parser().parse_args(arguments)
    if os.geteuid() != 0:
        print("run: this needs root: it starts containers. Try: sudo ./run", file=sys.stderr)
        return 101
    if not PACKAGES.is_dir():
        has = ", ".join(sorted(path.name for path in PACKAGES.parent.iterdir()))
        print(f"run: the bundle has packages for Python {has}, but {sys.executable} is {PACKAGES.name}: "
              "set PYTHON to another interpreter, or build the bundle with --python", file=sys.stderr)  # fmt: skip
        return 101
    if parsed.inside is not None:
        from checks import check_node

        results = check_node(parsed.inside, parsed.simulate, parsed.change_settings, parsed.snapshotter)
        (parsed.inside / "results.json").write_text(json.dumps([asdict(row) for row in results]))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-node-") as name:
        results = _run_apart(Path(name), parsed)
        text = table(results)
        (Path(name) / "table.txt").write_text(text)
        with tarfile.open(parsed.output, "w:xz", preset=1) as archive:
            archive.add(name, "gpu-node-results")
    print(text)
    differing = sum(row.verdict == "differs" for row in results)
    print(f"{differing} of {len(results)} results differ; logs and answers: {parsed.output}")
    return min(differing, 100)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--simulate", metavar="MACHINE", help="a simulated machine, such as dgx-h100, not the real GPUs"
    )
    parser.add_argument(
        "--change-settings",
        action="store_true",
        help="also try what changes settings of GPUs: only on a machine whose owner allows it",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(_ARCHIVE), help=f"the archive; {_ARCHIVE} by default"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--snapshotter", default="overlayfs", help=argparse.SUPPRESS)
    return parser


def _run_apart(logs: Path, parsed: argparse.Namespace) -> list[Result]:
    """Ask what the machine allows, run the checks in namespaces of their own, and compare before and after."""
    settings = _settings(parsed.simulate)
    absent = [path for path in (Path("/etc/cdi"), Path("/var/log/containers")) if not path.exists()]
    # Variables of tests would change the simulated machine, and no proxy reaches the cluster.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SIMULATE") and not name.lower().endswith("_proxy")
    }
    environment = inherited | {
        "XDG_CACHE_HOME": str(BUNDLE / "cache"),
        "PATH": f"{os.environ['PATH']}:{BUNDLE / 'bin'}",
        "PYTHONPATH": f"{BUNDLE}:{PACKAGES}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    apart = [sys.executable, "-B", str(BUNDLE / "hack/cluster/cluster.py"), "apart"]
    started = time.monotonic()
    allowed = _probe(logs, apart, environment)
    rows = [
        Result("probe", "root may make namespaces, mounts and control groups", allowed["answer"],
               "ok" if allowed["containers"] else "differs", time.monotonic() - started)
    ]  # fmt: skip
    print(f"probe: {allowed['answer']}", flush=True)
    if not allowed["containers"]:
        return [*rows, *_without_containers(logs)]
    flags = ["--inside", str(logs), "--snapshotter", allowed["snapshotter"]]
    flags += ["--simulate", parsed.simulate] if parsed.simulate else []
    flags += ["--change-settings"] if parsed.change_settings else []
    with (logs / "run.log").open("w") as log:
        # A copy of the program's lines goes to the terminal.
        process = subprocess.Popen(
            [*apart, sys.executable, "-B", __file__, *flags],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            print(line, end="", flush=True)
    status = process.wait()
    try:
        rows += [Result(**row) for row in json.loads((logs / "results.json").read_text())]
    except (OSError, ValueError):
        said = (logs / "run.log").read_text().strip().splitlines()[-1:]
        rows.append(Result("checks", "results", f"exit code {status}: {' '.join(said)}", "differs", 0))
    left = [f"process {name}" for name in _processes()]
    left += [
        f"control group {path}" for path in Path("/sys/fs/cgroup").glob(f"**/gpu-dra-apart-{process.pid}")
    ]
    left += [f"directory {path}" for path in absent if path.exists()]
    rows.append(
        Result("left behind", "nothing", ", ".join(left) or "nothing", "differs" if left else "ok", 0)
    )
    if settings:
        after = _settings(parsed.simulate)
        is_same = after == settings and not settings.startswith("unknown")
        seen = "the same" if is_same else f"before: {settings}; after: {after}"
        expected = "the same before and after"
        rows.append(Result("settings", expected, seen, "ok" if is_same else "differs", 0))
    return rows


def _without_containers(logs: Path) -> list[Result]:
    """Run the plugin's commands as processes of the host, where no pod can run."""
    rows = [Result("pods", "pods with GPUs run", "containers cannot run on this machine", "skipped", 0)]
    environment = os.environ | {"PYTHONPATH": f"{BUNDLE / 'hack'}:{BUNDLE}:{PACKAGES}"}
    for name, words in (
        ("inspect", ("dra_driver.cli.main", "inspect", "-o", "yaml")),
        ("gpu-check", ("gpucheck",)),
    ):
        started = time.monotonic()
        command = [sys.executable, "-B", "-m", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        (logs / f"{name}.txt").write_text(done.stdout + done.stderr)
        said = (done.stdout + done.stderr).strip().splitlines()[-1:]
        verdict = "differs" if done.returncode else "ok"
        rows.append(
            Result(f"{name} on the host", "exit code 0", " ".join(said), verdict, time.monotonic() - started)
        )
    return rows


def _probe(logs: Path, apart: Sequence[str], environment: dict[str, str]) -> dict[str, str]:
    """Return what the machine allows: `containers` is empty if none can run; `snapshotter` is containerd's."""
    asked = {
        "kernel": ["uname", "-a"],
        "devices": ["sh", "-c", "ls -l /dev/nvidia* 2>&1"],
        "namespaces": [*apart, "true"],
        "overlayfs": [*apart, "sh", "-c", _OVERLAY],
    }
    done = {
        name: subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        for name, command in asked.items()
    }
    text = "".join(f"{name}: {one.returncode}\n{one.stdout}{one.stderr}" for name, one in done.items())
    (logs / "probe.txt").write_text(text)
    if done["namespaces"].returncode:
        said = done["namespaces"].stderr.strip().splitlines()[-1:] or ["it says nothing"]
        return {"containers": "", "snapshotter": "", "answer": f"not allowed: {said[0]}"}
    overlay = done["overlayfs"].returncode == 0
    answer = "allowed" if overlay else "allowed, but not overlayfs"
    return {"containers": "yes", "snapshotter": "overlayfs" if overlay else "native", "answer": answer}


def _settings(simulated: str | None) -> str:
    """Return the settings of all real GPUs, or why they are unknown; empty for a simulated machine."""
    if simulated:
        return ""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "unknown: nvidia-smi is not on PATH"
    command = [smi, f"--query-gpu={','.join(_SETTINGS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"unknown: {done.stdout}{done.stderr}".strip() if done.returncode else done.stdout.strip()


def _processes() -> list[str]:
    """Return the programs that run from the bundle, except this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            program = entry.joinpath("exe").readlink()
        except OSError:
            continue
        if program.is_relative_to(BUNDLE):
            found.append(program.name)
    return sorted(found)


def table(rows: Sequence[Result]) -> str:
    """Return the rows as a table for a terminal."""
    lines = [f"{'RESULT':<8} {'SECONDS':>7}  {'WHAT':<34} SEEN"]
    for row in rows:
        lines.append(f"{row.verdict:<8} {row.seconds:7.1f}  {row.what:<34} {row.seen}")
        if row.verdict == "differs":
            lines.append(f"{'':<52} expected: {row.expected}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
