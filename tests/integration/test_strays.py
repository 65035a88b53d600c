"""Directories lie where the daemon keeps its files, from before its start: it starts, tells of them, and serves."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from dra_driver.model.claim import Prepared
from tests.integration.conftest import DRIVER, Node


def test_directories_in_the_place_of_files_keep_nobody_from_a_gpu(make_node: Callable[..., Node]) -> None:
    node = make_node()
    ref = node.claim("wanted", status={})
    uid = ref.uid
    gpus = [gpu.uuid for gpu in node.machine.current().present]
    at_the_start = [
        node.plugin_dir / "health.json",
        node.plugin_dir / "claims/.boot",
        node.plugin_dir / f"mig/mode-{gpus[0]}.json",
    ]
    with_the_claim = [
        node.plugin_dir / f"claims/{uid}.json",
        node.cdi / f"k8s.{DRIVER}-claim_{uid}.json",
        node.cdi / f"{DRIVER}_metadata_{uid}_gpu.json",
        node.plugin_dir / "dra-device-metadata/default_wanted/gpu/metadata.json",
    ]
    locks = [node.plugin_dir / f"locks/{gpu}.lock" for gpu in gpus]
    locks += [node.plugin_dir / f"locks/claims-{number:02}.lock" for number in range(64)]
    for path in (*at_the_start, *with_the_claim, *locks):
        (path / "somebody's").mkdir(parents=True)
    for directory, name in (("claims", "uid-of-a-link"), ("mig", "gpu-9"), ("mig", "mode-GPU-9")):
        (node.plugin_dir / directory / f"{name}.json").symlink_to(f"{name}.json")
    with structlog.testing.capture_logs() as logs:
        node.start_driver(device_metadata="v1beta1", dynamic_mig=True)
        node.wait_devices(8 * 26)
        node.scheduler.allocate_claim("default", "wanted", pod={"metadata": {"name": "pod", "uid": "pod"}})
        assert isinstance(node.prepare(ref)[uid], Prepared)
        assert node.unprepare(ref) == {uid: None}
    told = [str(line) for line in logs if line["log_level"] in ("warning", "error")]
    named = {path: sum(f"'{path}" in line for line in told) for path in (*at_the_start, *with_the_claim)}
    assert set(named.values()) == {1}, named
    of_link, aside = sorted(node.records(), key=lambda name: name.startswith(uid))
    assert aside.startswith(f"{uid}.json.unreadable-")
    assert of_link.startswith("uid-of-a-link.json.unreadable-")
    for name in ("gpu-9", "mode-GPU-9"):
        assert len(list((node.plugin_dir / "mig").glob(f"{name}.json.unreadable-*"))) == 1
