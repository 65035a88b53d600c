"""Commands in processes that start afresh: other tests fork them from a process that has imported every module.

That no import is missing from the package's requirements, tests/deploy/test_image.py finds in the source.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fakes.waiting import PATIENCE_S
from tests.integration.conftest import DRIVER, Node
from tests.integration.test_process import environment

_AT_ONCE = 2


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dra_driver.cli.main", *arguments],
        capture_output=True, text=True, env=environment(), timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def test_commands_work(tmp_path: Path) -> None:
    """Commands that no other test starts in a new process."""
    machine = ["--simulate", "dgx-h100"]
    plugins = ["--kubelet-plugins-directory-path", str(tmp_path / "plugins")]
    files = [*plugins, "--cdi-root", str(tmp_path / "cdi")]
    (tmp_path / "plugins" / DRIVER).mkdir(parents=True)
    lines = [
        (["device-classes", *machine], "kind: DeviceClass"),
        (["claims", "-o", "yaml", *files], "claims: []"),
        (["cleanup", *files], "no pending cleanup found"),
        (["detach", "--for", "10m", *plugins], "gpu-dra-driver has closed NVML"),
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        done = list(pool.map(lambda line: call(*line[0]), lines))
    for (arguments, said), ended in zip(lines, done, strict=True):
        assert (ended.returncode, ended.stderr) == (0, ""), arguments
        assert said in ended.stdout, arguments
    top = call("top", "--once", *machine)
    assert (top.returncode, "PROBLEM" in top.stdout) == (0, False), (
        "no plugin is missing on a machine of this command"
    )


def test_no_check_of_doctor_fails_itself(node: Node) -> None:
    node.ready(node.claim("one"))
    checks = json.loads(call("doctor", "-o", "json", *node.flags()).stdout)["checks"]
    assert len(checks) > 20
    assert [check for check in checks if "the check crashed" in check["seen"]] == []
