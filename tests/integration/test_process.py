"""The command line as a process: exit codes, one-line errors, signals, and what remains."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked_commands
import pytest

from dra_driver.cli import commands
from dra_driver.cli import main as main_module
from dra_driver.model.claim import ClaimRef, Failed
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import DRIVER, Node, own_address, page, sliced
from tests.kube.support import raw_server

MEMORY = "/dev/shm"


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "TMPDIR")}
    # The place of machines that commands simulate for themselves: hundreds of files.
    return {**kept, "TMPDIR": MEMORY if os.access(MEMORY, os.W_OK) else tempfile.gettempdir(), **more}


def call(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return forked_commands.run(arguments, env=environment(**env))


def test_run_serves_until_sigterm_and_leaves_no_socket(make_node: Callable[..., Node]) -> None:
    node = make_node()
    process = node.spawn()
    node.kubelet.wait_registered(DRIVER)
    node.wait_devices(8)
    node.ready(node.claim("one"))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert [path for path in (*node.registry.iterdir(), *node.plugin_dir.iterdir()) if path.is_socket()] == []
    assert len(node.slices()) == 1, "slices stay over a restart"


def test_signals_switch_debug_events_and_show_stacks(make_node: Callable[..., Node]) -> None:
    node = make_node()
    process = node.spawn(LOG_LEVEL="info")
    lines = (json.loads(line) for line in process.stderr)

    def next_event(*names: str) -> dict:
        return next(line for line in lines if line["event"] in names)

    assert next_event("driver_started")["pid"] == process.pid, "whom to signal, where it is not number 1"
    process.send_signal(signal.SIGUSR1)
    assert next_event("log_level_changed")["after"] == "debug"
    node.kubelet.wait_registered(DRIVER)
    node.wait_devices(8)
    ref = node.claim("one")
    node.ready(ref)
    received = next(line for line in lines if line.get("method") == "NodePrepareResources")
    assert (received["event"], received["level"]) == ("rpc_received", "debug")
    prepared = next_event("claim_prepared")
    assert prepared["claim_uid"] == ref.uid
    assert prepared["request_id"] == received["request_id"]
    process.send_signal(signal.SIGUSR2)
    stacks = {stack["thread"]: stack["frames"] for stack in next_event("stacks_logged")["stacks"]}
    assert {"MainThread", "signals", "discovery", "publisher"} <= set(stacks)
    assert any("Driver.wait" in frame for frame in stacks["MainThread"])
    process.send_signal(signal.SIGUSR1)
    assert next_event("log_level_changed")["after"] == "info"
    process.send_signal(signal.SIGTERM)
    rest = list(lines)  # every line to the end is one event
    assert process.wait(PATIENCE_S) == 0, rest


def test_grpc_writes_nothing_between_the_events_when_a_port_is_taken(make_node: Callable[..., Node]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        process = make_node().spawn(LOG_LEVEL="info", HEALTHCHECK_PORT=str(port))
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    *events, said = log.decode().splitlines()
    assert said == (
        f"gpu-dra-driver: health service cannot listen on [::]:{port}: another process uses the address, or it is not "
        "an address of this node; choose another --healthcheck-port"
    )
    assert {json.loads(line)["level"] for line in events} <= {"info", "warning"}


def test_http_endpoint_serves_metrics_and_reasons(make_node: Callable[..., Node]) -> None:
    node, address = make_node(), own_address()
    node.spawn(HTTP_ENDPOINT=address, METRICS_PATH="/gpu-metrics")
    node.kubelet.wait_registered(DRIVER)
    node.wait_devices(8)
    for path in ("/readyz", "/healthz", "/startupz"):
        assert page(address, path, "ok\n") == "ok\n"
    page(
        address, "/gpu-metrics", 'nvidia_dra_requests_total{driver="gpu.nvidia.com",operation="prepare"} 0.0'
    )


def test_password_of_the_proxy_leaves_the_daemon_only_to_the_proxy(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy refuses it, and repeats it in its answer. The node's problems are shown without delay."""

    def refuse(send: Callable[[bytes], None], request: bytes) -> None:
        [sent] = [line for line in request.split(b"\r\n") if line.lower().startswith(b"proxy-authorization")]
        pair = base64.b64decode(sent.split()[-1])
        assert pair == b"me:hunter2"
        send(b"HTTP/1.1 407 wrong: " + sent + b" " + pair + b"\r\nContent-Length: 0\r\n\r\n")

    node, address = make_node(), own_address()
    with raw_server(refuse) as port:
        path = node.root / "behind-a-proxy"
        cluster = {"server": "https://api.test", "proxy-url": f"http://me:hunter2@127.0.0.1:{port}"}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        document = {"clusters": [{"name": "c", "cluster": cluster}], "contexts": [context], "users": []}
        path.write_text(json.dumps(document | {"current-context": "x"}))
        quick = "import dra_driver.reporting.node_problems as p, dra_driver.slices.publisher as s; p._TURN_S = 0.1"
        process = node.spawn(
            before=f"{quick}; s._PROBLEM_AFTER_S = 0.0",
            KUBECONFIG=str(path), HTTP_ENDPOINT=address, METRICS_PATH="/metrics", LOG_LEVEL="debug",
        )  # fmt: skip
        node.kubelet.wait_registered(DRIVER)
        ref = ClaimRef("default", "one", "uid-one")
        outcome = node.kubelet.prepare(DRIVER, [ref], timeout_s=10)[ref.uid]
        assert isinstance(outcome, Failed)
        shown = {"prepare": outcome.error, "problems": page(address, "/problems", "407")}
        shown |= {path: page(address, path, part) for path, part in (("/readyz", "407"), ("/metrics", ""))}
        process.send_signal(signal.SIGTERM)
        shown["log"] = process.communicate(timeout=PATIENCE_S)[1].decode()
    for sink, text in shown.items():
        assert "hunter2" not in text, (sink, text)
        assert base64.b64encode(b"me:hunter2").decode() not in text, (sink, text)
        assert sink == "/metrics" or "407 wrong: " in text, (sink, text)


@tabled("arguments", "env", "words")
def test_wrong_configuration_is_one_line_and_exit_code_two(
    arguments: list[str], env: dict[str, str], words: list[str]
) -> None:
    done = call(*arguments, **env)
    assert done.returncode == 2, done
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_boot_without_an_id_ends_the_start_with_the_reason(make_node: Callable[..., Node]) -> None:
    """Without the boot ID the plugin cannot know what a reboot has reset, so it must not use its files at
    all.
    """
    node = make_node()
    (node.machine.host_root / "proc/sys/kernel/random/boot_id").write_text("")
    process = node.spawn(SIMULATOR_DIR=str(node.root / "machine"))
    _, log = process.communicate(timeout=PATIENCE_S)
    last = log.decode().splitlines()[-1]
    assert process.returncode != 0
    assert last.startswith("gpu-dra-driver: cannot read the ID of this boot from ")
    assert last.endswith("mount the node's /proc")


def test_run_reports_every_fault_of_flags_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("logLevel: loud\nhealth: {ignoredXids: [0]}\nsharing: [{mode: memory}]\n")
    flags = (
        "--cdi-root",
        "x",
        "--imex-channel=some",
        "--http-endpoint=here",
        "--consumable-shares=4",
        "--no-such",
    )
    done = call("run", *flags, "--config", str(file), HEALTHCHECK_PORT="99999", KUBE_API_QPS="fast")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    for said in (
        f"configuration file {file}: logLevel: expected 'debug', 'info', 'warning' or 'error'",
        "health.ignoredXids.0: expected 1 or more",
        "--cdi-root 'x': expected an absolute path",
        "--imex-channel 'some': expected off, all or a channel's number from 0 to 1048575",
        "--http-endpoint 'here': 'here' is not an address",
        "there is no flag --no-such",
        "the environment variable HEALTHCHECK_PORT '99999': expected 65535 or less",
        "the environment variable KUBE_API_QPS 'fast': expected a number",
        "--consumable-shares and the section sharing of",
        "the node's name is missing",
    ):
        assert said in line


@pytest.fixture
def endless_import(tmp_path: Path) -> tuple[str, Path]:
    """A PYTHONPATH on which the import of `kubernetes` never returns, and the file that the import creates."""
    imported = tmp_path / "imported"
    (tmp_path / "kubernetes.py").write_text(
        f"import time; open({str(imported)!r}, 'w').close(); time.sleep(600)"
    )
    return str(tmp_path), imported


def test_daemon_in_a_pod_works_without_the_official_client(
    make_node: Callable[..., Node], endless_import: tuple[str, Path]
) -> None:
    node = make_node()
    path, imported = endless_import
    node.spawn(PYTHONPATH=path)
    eventually(node.devices)
    assert not imported.exists()


def test_daemon_with_a_kubeconfig_registers_before_it_imports_the_official_client(
    make_node: Callable[..., Node], endless_import: tuple[str, Path]
) -> None:
    node = make_node()
    path, imported = endless_import
    node.spawn(PYTHONPATH=path, KUBECONFIG=str(node.settings.kubeconfig))
    eventually(imported.exists)
    node.kubelet.wait_registered(DRIVER)


def test_inspect_prints_json_yaml_and_a_table() -> None:
    import yaml

    as_json = json.loads(call("inspect", "--simulate", "l40s-8", "-o", "json", "--node-name", "n").stdout)[
        "items"
    ]
    as_yaml = list(
        yaml.safe_load_all(call("inspect", "--simulate", "l40s-8", "-o", "yaml", "--node-name", "n").stdout)
    )
    assert as_json == as_yaml
    table = call("inspect", "--simulate", "l40s-8").stdout
    assert table.count("NVIDIA L40S") == 8


def test_inspect_fails_where_the_library_cannot_be_loaded(tmp_path: Path) -> None:
    """Whether or not sysfs shows a GPU: an empty list would say that the node has none."""
    library = tmp_path / "usr/lib64/libnvidia-ml.so.580.95.05"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF damaged")
    library.with_name("libnvidia-ml.so.1").symlink_to(library.name)
    where = ("--nvidia-driver-root", str(tmp_path), "--container-driver-root", str(tmp_path))
    done = call("inspect", *where)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot load the NVML library {tmp_path}" in done.stderr
    checks = {
        check["check"]: check for check in json.loads(call("doctor", "-o", "json", *where).stdout)["checks"]
    }
    assert checks["NVML"]["status"] == "FAIL"


@pytest.mark.parametrize(
    "arguments", [["--version"], ["simulate", "list"], ["validate", "/nowhere"], ["top", "--once"]]
)
def test_closed_standard_files_cause_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    said = tmp_path / "said"
    where = ["--simulator-dir", str(tmp_path / "s"), "--simulate", "t4-4"] if arguments[0] == "top" else []
    line = f"{sys.executable} -m dra_driver.cli.main {' '.join([*arguments, *where])} <&- >&- 2>{said}"
    done = subprocess.run(["sh", "-c", line], check=False, timeout=PATIENCE_S, env=environment())
    expected = "gpu-dra-driver: cannot read /nowhere: No such file or directory\n"
    wrong = arguments[0] == "validate"
    assert (done.returncode, said.read_text()) == ((2, expected) if wrong else (0, ""))


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dra_driver.cli.main", "simulate", "list"],
            check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, env=environment(),
        )  # fmt: skip
    said = "gpu-dra-driver: standard output cannot be used: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("arguments", [["inspect"], ["run"], ["mps-host"]])
def test_ctrl_c_while_a_command_is_loaded_is_not_a_traceback(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["gpu-dra-driver", *arguments])
    monkeypatch.setattr(commands, "call", interrupted)
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert caught.value.code == 130


def test_nvidia_smi_of_a_killed_daemon_is_undone_when_it_has_taken_effect(
    make_node: Callable[..., Node], tmp_path: Path
) -> None:
    """The program survives and sets the time slice after the claim has ended. The next daemon serves the
    other GPUs, and changes this one only after that.
    """
    node = make_node()
    begun, continues, ended = tmp_path / "begun", tmp_path / "goes-on", tmp_path / "ended"
    os.mkfifo(continues)
    program = node.machine.host_root / "usr/bin/nvidia-smi"
    real = program.rename(tmp_path / "nvidia-smi")
    once = f'mv {real} "$0"; echo >{begun}; read line <{continues}; "$0" "$@"; echo >{ended}'
    program.write_text(f"#!/bin/sh\n{once}\n")
    program.chmod(0o755)
    process = node.spawn()
    first, *_, other = (device["name"] for device in node.wait_devices(8))
    slow = node.allocated_by_hand("slow", first, config=sliced("Long"))
    with ThreadPoolExecutor() as threads:
        call = threads.submit(node.prepare, slow)
        eventually(begun.exists)
        process.kill()
        process.wait()
        assert call.exception() is not None
    dead = node.kubelet.instances(DRIVER)
    node.spawn()
    eventually(lambda: any(entry.connected for entry in node.kubelet.instances(DRIVER) if entry not in dead))
    node.must_unprepare(slow)
    node.ready(node.allocated_by_hand("other", other, config=sliced("Long")))
    continues.write_text("\n")
    eventually(ended.exists)
    eventually(lambda: node.machine.timeslice(0) == 0)
    assert node.machine.timeslice(7) == 3
