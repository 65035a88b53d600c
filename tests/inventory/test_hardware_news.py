"""News of hardware: what the kernel sends, what is heard, and what happens where nothing is."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dra_driver.host.uevents import Uevents, concerns_gpus
from dra_driver.inventory.hardware_news import HardwareNews
from dra_driver.simulator import create_machine
from dra_driver.simulator.machine_watch import MachineWatch

FUNCTIONS = Path("/sys/bus/pci/devices")


def message(header: str, **fields: str) -> bytes:
    return b"\0".join([header.encode(), *(f"{key}={value}".encode() for key, value in fields.items()), b""])


@pytest.mark.parametrize(
    ("sent", "concerns"),
    [
        (message("remove@/devices/pci0000:00/0000:1b:00.0", SUBSYSTEM="pci", PCI_ID="10DE:2330"), True),
        (message("bind@/devices/pci0000:00/0000:1b:00.0", SUBSYSTEM="pci", PCI_ID="10DE:2330"), True),
        (message("add@/devices/pci0000:00/0000:1c:00.0", SUBSYSTEM="pci", PCI_ID="15B3:1021"), False),
        (message("add@/module/nvidia", SUBSYSTEM="module"), True),
        (message("remove@/module/nvidia", SUBSYSTEM="module"), True),
        (message("add@/module/nvidia_uvm", SUBSYSTEM="module"), False),
        (message("add@/devices/virtual/net/veth1", SUBSYSTEM="net"), False),
        (message("change@/devices/x", SUBSYSTEM="block", NAME="PCI_ID=10DE:2330"), False),
        (b"libudev\0\xfe\xed\xca\xfe", False),
        (b"", False),
    ],
)
def test_uevents_of_gpus_and_of_their_driver_concern_us(sent: bytes, concerns: bool) -> None:
    assert concerns_gpus(sent) is concerns


def test_the_kernel_lets_us_listen_and_other_senders_are_not_believed() -> None:
    heard = Uevents()
    try:
        assert heard.heard() is False
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15) as other:
            other.bind((0, 0))
            with suppress(PermissionError):
                other.sendto(
                    message("add@/module/nvidia", SUBSYSTEM="module"), (heard._socket.getsockname()[0], 0)
                )
        assert heard.heard() is False
    finally:
        heard.close()


def test_the_running_kernel_says_it_in_these_words() -> None:
    """It repeats its word on a PCI function when asked, as `udevadm trigger` does."""
    asked = next((path for path in FUNCTIONS.glob("*/uevent") if os.access(path, os.W_OK)), None)
    if asked is None:
        pytest.skip("needs root and a PCI function")
    vendor = (asked.parent / "vendor").read_text().strip().removeprefix("0x").upper().encode()
    heard = Uevents()
    try:
        asked.write_text("change")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                message, sender = heard._socket.recvfrom(16384)
                if asked.parent.name.encode() in message.partition(b"\0")[0]:
                    break
            time.sleep(0.01)
        else:
            pytest.fail("the kernel was not heard")
        assert sender[0] == 0, "that is how the kernel's messages are told from others"
        assert concerns_gpus(message) is (vendor == b"10DE")
        assert concerns_gpus(message.replace(b"PCI_ID=" + vendor, b"PCI_ID=10DE"))
    finally:
        heard.close()


class Pipe:
    """A source by hand."""

    def __init__(self, heard: Callable[[bytes], bool] = bool) -> None:
        self._read, self.write = os.pipe()
        self._heard = heard
        self.closed = threading.Event()

    def fileno(self) -> int:
        return self._read

    def heard(self) -> bool:
        return self._heard(os.read(self._read, 100))

    def close(self) -> None:
        os.close(self._read)
        self.closed.set()


def test_news_are_passed_on_until_the_end() -> None:
    came = threading.Semaphore(0)
    pipe = Pipe(lambda text: text == b"gpu")
    news = HardwareNews(lambda: pipe, came.release)
    news.start()
    assert news.is_heard
    os.write(pipe.write, b"net")
    time.sleep(0.05)
    os.write(pipe.write, b"gpu")
    assert came.acquire(timeout=10)
    assert not came.acquire(blocking=False)
    news.stop()
    news.stop()
    assert pipe.closed.is_set()


def test_where_nothing_can_be_heard_that_is_known() -> None:
    def refuse() -> Pipe:
        raise PermissionError(1, "Operation not permitted")

    news = HardwareNews(refuse, list)
    news.start()
    assert not news.is_heard
    news.stop()


def test_a_source_that_fails_is_given_up() -> None:
    def fail(_text: bytes) -> bool:
        raise OSError(5, "Input/output error")

    pipe = Pipe(fail)
    news = HardwareNews(lambda: pipe, list)
    news.start()
    os.write(pipe.write, b"x")
    assert pipe.closed.wait(10)
    assert not news.is_heard
    news.stop()


def test_every_change_of_a_machine_is_heard(tmp_path: Path) -> None:
    machine = create_machine("dgx-h100", tmp_path / "machine", device_nodes="described")
    watch = MachineWatch(machine.directory)
    try:
        assert watch.heard() is False
        machine.unload_driver()
        assert watch.heard() is True
        assert watch.heard() is False
    finally:
        watch.close()


def test_a_machine_without_threads_to_spare_runs_without_news(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pipe = Pipe()
    news = HardwareNews(lambda: pipe, list)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    news.start()
    assert not news.is_heard
    assert pipe.closed.is_set()
    news.stop()
