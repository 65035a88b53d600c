"""Every command runs where the package is installed with its own requirements and nothing else.

The commands run in processes that cannot import any other package, nor the rest of this repository.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

from tests.integration.conftest import DRIVER, Node, eventually
from tests.integration.test_process import environment

ROOT = Path(__file__).parents[2]
_AT_ONCE = 2
_START = """\
import sys

sys.argv = ["gpu-dra-driver", *sys.argv[1:]]
blocked = frozenset({blocked!r})


class NotInstalled:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}}: it is not a requirement of the package", name=name)


sys.meta_path.insert(0, NotInstalled)
from dra_driver.cli.main import main

main()
"""


def plain(name: str) -> str:
    """The name of a distribution, without version and extras, in the spelling in which names are compared."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;(]", name, maxsplit=1)[0]).lower()


def required() -> set[str]:
    """The distributions that come with the package, directly or through others."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        waiting = [plain(line) for line in tomllib.load(file)["project"]["dependencies"]]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or ()
        except PackageNotFoundError:
            continue
        waiting += [plain(line) for line in lines if "extra ==" not in line]
    return found


def blocked() -> list[str]:
    """The modules of all other distributions in this environment, and the folders of this repository."""
    allowed = required() | {"gpu-dra-driver"}
    other = {
        module
        for module, distributions in packages_distributions().items()
        if not allowed & {plain(name) for name in distributions}
    }
    folders = {path.name for top in (ROOT, ROOT / "hack") for path in top.iterdir() if path.is_dir()}
    return sorted((other | folders) - {"dra_driver"} - sys.stdlib_module_names)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The start of a command line; the package is the only thing on the path beside what is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "dra_driver").symlink_to(ROOT / "dra_driver")
    start = site / "start.py"
    start.write_text(_START.format(blocked=blocked()))
    return [sys.executable, str(start)]


def call(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment(), timeout=60, check=False
    )


def test_development_tools_are_out_of_reach() -> None:
    names = set(blocked())
    assert {
        "pytest",
        "hypothesis",
        "jsonschema",
        "grpc_tools",
        "mypy",
        "piptools",
        "playground",
    } <= names
    assert not names & {
        "grpc",
        "grpc_health",
        "google",
        "pynvml",
        "kubernetes",
        "cel_expr_python",
        "structlog",
        "shtab",
        "yaml",
    }


def test_a_blocked_module_is_really_blocked(command: list[str], tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    start = Path(command[1]).read_text()
    probe.write_text(start.replace("from dra_driver.cli.main import main\n\nmain()\n", "import pytest\n"))
    done = call([sys.executable, str(probe)])
    assert done.returncode == 1
    assert "it is not a requirement of the package" in done.stderr


def names_of(listing: str) -> Iterator[str]:
    """The commands in the text of --help."""
    yield from re.findall(r"^  ([a-z][-a-z]+)(?: {2,}|$)", listing.partition("Commands:\n")[2], re.MULTILINE)


def test_every_command_explains_itself(command: list[str]) -> None:
    names = list(names_of(call(command, "--help").stdout))
    assert {
        "run",
        "mps-host",
        "inspect",
        "device-classes",
        "doctor",
        "claims",
        "top",
        "validate",
        "simulate",
    } <= {*names}
    # The list above has loaded the modules of all commands; those that no other test here calls explain themselves.
    for line in (["run", "--help"], ["mps-host", "--help"], ["simulate", "--help"]):
        done = call(command, *line)
        assert (done.returncode, done.stderr) == (0, ""), line


def test_commands_work(command: list[str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("sharing: [{mode: shares, shares: 4}]\ndynamicMig: {enabled: true}\n")
    machine = ["--simulate", "dgx-h100"]
    files = [
        "--kubelet-plugins-directory-path",
        str(tmp_path / "plugins"),
        "--cdi-root",
        str(tmp_path / "cdi"),
    ]
    simulated = ["--simulator-dir", str(tmp_path / "machine")]
    alone = tmp_path / "alone"
    (alone / DRIVER).mkdir(parents=True)
    lines = [
        (["inspect", *machine, "--config", str(config)], "room for"),
        (["device-classes", *machine], "kind: DeviceClass"),
        (["validate", *machine, str(ROOT / "examples/nvlink-domain"), str(config)], " 0 with faults"),
        (["top", "--once", *machine, *files], "NVLINK DOMAIN "),
        (["claims", "-o", "yaml", *files], "claims: []"),
        (["debts", *files], "nothing is owed"),
        (
            ["detach", "--for", "10m", "--kubelet-plugins-directory-path", str(alone)],
            "no instance of the driver",
        ),
        (["simulate", "list"], "dgx-h100"),
        (["simulate", "create", "dgx-h100", "--device-nodes", "described", *simulated], "dgx-h100"),
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        done = list(pool.map(lambda line: call(command, *line[0]), lines))
    for (arguments, said), ended in zip(lines, done, strict=True):
        assert (ended.returncode, ended.stderr) == (0, ""), arguments
        assert said in ended.stdout, arguments


def test_run_and_doctor_work(node: Node, command: list[str]) -> None:
    settings = node.settings
    node.driver.stop()
    node.driver = None
    shared = [
        "--node-name", settings.node_name, "--kubeconfig", str(settings.kubeconfig), "--cdi-root", settings.cdi_root,
        "--kubelet-plugins-directory-path", settings.kubelet_plugins_directory_path,
        "--kubelet-registrar-directory-path", settings.kubelet_registrar_directory_path,
        "--simulate", str(settings.simulate), "--simulator-dir", str(settings.simulator_dir),
    ]  # fmt: skip
    features = ["--http-endpoint", "127.0.0.1:0", "--healthcheck-port", "0", "--mps-host", "child"]
    with subprocess.Popen(
        [*command, "run", *shared, *features], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            eventually(lambda: node.kubelet.instances(DRIVER))
            node.wait_devices(8)
            ref = node.claim("one")
            assert eventually(lambda: node.records() if node.prepare(ref)[ref.uid] else None)
            checks = json.loads(call(command, "doctor", "-o", "json", *shared).stdout)["checks"]
            assert len(checks) > 20
            assert [check for check in checks if "the check itself failed" in check["seen"]] == []
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, log
    assert "not a requirement of the package" not in log


def test_mps_host_works(command: list[str], memory_path: Path) -> None:
    arguments = [
        "--kubelet-plugins-directory-path",
        str(memory_path),
        "--simulate",
        "dgx-h100",
        "--allow-plain-shm",
    ]
    arguments += ["--simulator-dir", str(memory_path / "machine")]
    with subprocess.Popen(
        [*command, "mps-host", *arguments], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert any("mps_host_started" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, log
