#!/usr/bin/env -S python3 -IS
# ruff: noqa: PTH100, PTH101, PTH103, PTH105, PTH107, PTH108, PTH110, PTH120, PTH123, S103, S108
"""The MPS control program of a simulated machine: the daemon (-f), and the command line to it (no option).

It enforces no limits. A file of the machine overrides its behaviour, for "*" or a device's UUID: it can `say` lines,
sleep for `sleep_s`, `exit` with a code instead of serving, give `answers` by command, or be `silent`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

MYPY = False
if MYPY:  # importing typing takes as long as all other modules together
    from typing import Any

BRANCH = int("#@BRANCH@")
NAME = "nvidia-cuda-mps-control"
NO_DAEMON = "Cannot find MPS control daemon process"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", "")
END = "\0\n"
LONGEST_SOCKET = 106


def command_line() -> int:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"{PIPE}/control")
    except OSError:
        print(NO_DAEMON)
        return 1
    try:
        with connection, connection.makefile("rw") as stream:
            for line in sys.stdin:
                stream.write(line if line.endswith("\n") else f"{line}\n")
                stream.flush()
                for answer in iter(stream.readline, END):
                    if not answer:
                        return 0
                    sys.stdout.write(answer)
    except OSError:
        print("Cannot send command to MPS control daemon process")
        return 1
    return 0


def rules() -> dict[str, Any]:
    try:
        with open(f"{ROOT}/var/lib/nvidia-simulator/mps.json") as file:
            known = json.load(file)
    except (OSError, ValueError):
        return {}
    return {**known.get("*", {}), **known.get(VISIBLE.split(",")[0], {})}


def log(text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')} Control {os.getpid()}] {text}", flush=True)


class Daemon:
    def __init__(self) -> None:
        self.percentage = 100.0
        self.memory: dict[str, int] = {}
        self.server: Any = None
        self.clients: dict[str, str] = {}
        self.has_quit = False

    def answer(self, line: str) -> str:
        words = [*line.split(), "", "", ""]
        instead = rules().get("answers", {}).get(words[0])
        if instead is not None:
            return str(instead)
        if words[0] == "quit":
            self.has_quit = True
        elif words[0] == "start_server":
            self.start_server()
        elif words[0] == "get_server_list":
            return str(self.server.pid) if self.server and self.server.poll() is None else ""
        elif words[0] == "get_server_status":
            return "ACTIVE"
        elif words[0] == "get_client_list":
            return "\n".join(self.clients.values())
        elif words[0] in ("set_default_active_thread_percentage", "get_default_active_thread_percentage"):
            self.percentage = float(words[1] or self.percentage)
            return f"{self.percentage:.1f}"
        elif words[0] == "set_default_device_pinned_mem_limit" and BRANCH >= 495:
            self.memory[words[1]] = int(words[2].removesuffix("M"))
        elif words[0] == "get_default_device_pinned_mem_limit" and BRANCH >= 495:
            size = self.memory.get(words[1], 0)
            return f"{size // 1024}G" if size >= 1024 else f"{size}M" if size else ""
        elif words[0]:
            return f'Unknown command "{words[0]}"'
        return ""

    def start_server(self) -> None:
        import subprocess

        if self.server is None or self.server.poll() is not None:
            program = f"{ROOT}/usr/bin/nvidia-cuda-mps-server"
            self.server = subprocess.Popen([program], stdin=subprocess.PIPE)

    def greet(self, line: str) -> None:
        """Handle a line of the FIFO: `connect NAME PID` or `disconnect NAME`."""
        words = [*line.split(), "", ""]
        self.clients.pop(words[1], None)
        if words[0] == "connect" and "/" not in words[1]:
            self.start_server()
            self.clients[words[1]] = words[2]
            path = f"{PIPE}/simulated/reply-{words[1]}"
            with open(f"{path}.new", "w") as file:
                file.write(f"mps=connected\ndevice={VISIBLE}\n")
            os.chmod(f"{path}.new", 0o666)
            os.replace(f"{path}.new", path)

    def talk(self, connection: socket.socket) -> bool:
        """Return False if the program has left."""
        try:
            lines = connection.recv(65536).decode(errors="replace").splitlines()
            if rules().get("silent"):
                time.sleep(3600)
            for line in lines:
                said = self.answer(line)
                connection.sendall((f"{said}\n{END}" if said else END).encode())
        except OSError:
            return False
        return bool(lines)

    def serve(self, listener: socket.socket, fifo: int) -> None:
        """Serve one program at a time, until `quit`. Other programs get no answer, as with the real daemon."""
        import select

        talk: Any = None
        sources: list[Any] = [listener, fifo]
        while not self.has_quit:
            for source in select.select(sources + [talk] * (talk is not None), [], [])[0]:
                if source is fifo:
                    for line in os.read(fifo, 65536).decode(errors="replace").splitlines():
                        self.greet(line)
                elif source is listener and talk is None:
                    talk = listener.accept()[0]
                elif source is listener:
                    listener.accept()[0].close()
                elif not self.talk(source):
                    source.close()
                    talk = None


def listen(name: str) -> socket.socket:
    """Replace an old socket, because the real program leaves its sockets behind."""
    if os.path.lexists(f"{PIPE}/{name}"):
        os.unlink(f"{PIPE}/{name}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{PIPE}/{name}")
    os.chmod(f"{PIPE}/{name}", 0o666)
    listener.listen(16)
    return listener


def daemon() -> int:
    """Run the daemon; return its exit code."""
    import signal

    known = rules()
    for line in known.get("say", ()):
        log(line)
    time.sleep(known.get("sleep_s", 0))
    if "exit" in known or len(os.fsencode(f"{PIPE}/control_privileged")) > LONGEST_SOCKET:
        return int(known.get("exit", 1))
    log("Starting control daemon")
    fifo = f"{PIPE}/simulated/connect"  # for clients without Python
    os.makedirs(os.path.dirname(fifo), exist_ok=True)
    os.chmod(os.path.dirname(fifo), 0o777)
    if not os.path.exists(fifo):
        os.mkfifo(fifo)
    os.chmod(fifo, 0o666)
    listen("control_privileged").close()  # unused, but it has the longest path
    me = Daemon()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        listener = listen("control")
        if BRANCH >= 550:
            with open(f"{PIPE}/{NAME}.pid", "w") as file:
                file.write(str(os.getpid()))
        me.serve(listener, os.open(fifo, os.O_RDWR | os.O_NONBLOCK))
    finally:
        if me.server is not None:
            me.server.terminate()
            me.server.wait()
        if os.path.exists(f"{PIPE}/{NAME}.pid"):
            os.remove(f"{PIPE}/{NAME}.pid")
    return 0


def main(options: list[str]) -> int:
    """Accept only one option before R555, like the real program, which otherwise searches for a daemon and exits."""
    if options == ["-f"] or (options == ["-f", "-multiuser-server"] and BRANCH >= 555):
        return daemon()
    if not options:
        return command_line()
    print(NO_DAEMON)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
