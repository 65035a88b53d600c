# ruff: noqa: PTH101, PTH103, PTH105, PTH108, PTH110, PTH123, S103, S108
"""The MPS control daemon of a simulated machine: servers, limits and clients as the real one keeps them.

A program of its own that does not need this package; its pipes are open to every user, as the real one's are.

Of the commands of the machine's driver branch it knows those that this plugin and the tests use. It answers and logs as
the real program does: in the foreground to standard output; a value that cannot be is not taken, and the answer does
not say so.

How it is to misbehave stands in a file of the machine, looked up by "*" and by the device's UUID.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

NAME = "nvidia-cuda-mps-control"
PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
LOG = os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")
END = "\0\n"
COMMANDS_SINCE = {
    495: ("set_default_device_pinned_mem_limit", "get_default_device_pinned_mem_limit"),
    550: ("get_server_status",),
}
PID_FILE_SINCE = 550
CUDA_SINCE = 580
NO_DEVICE, NO_LIBRARY = 100, 500
LONGEST_SOCKET = 106


class Refusal(Exception):  # noqa: N818
    """A reason in place of an answer."""


class Server:
    """One nvidia-cuda-mps-server: a process, the limits that it took over, its clients."""

    def __init__(
        self, program: str, uid: int, percentage: float, memory: dict[str, str], linger: bool
    ) -> None:
        self.uid = uid
        self.percentage = percentage
        self.memory = memory
        self.clients: dict[str, int] = {}
        self.process = subprocess.Popen([program, *(["linger"] if linger else [])], stdin=subprocess.PIPE)
        self.pid = str(self.process.pid)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.forget()

    def forget(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()


class Daemon:
    """Commands and clients; one at a time, as they come."""

    def __init__(self, facts: dict[str, Any], root: str, multi_user: bool, foreground: bool) -> None:
        self.facts = facts
        self.foreground = foreground
        self.root = root
        self.multi_user = multi_user
        self.visible = [item for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item]
        self.percentage = 100.0
        self.memory: dict[str, str] = {}
        self.servers: dict[str, Server] = {}
        self.quit_at: float | None = None
        self.commands: dict[str, Callable[..., str]] = {
            "get_server_list": lambda: "\n".join(self.servers),
            "get_server_status": self.get_server_status,
            "start_server": self.start_server,
            "get_client_list": self.get_client_list,
            "quit": self.quit,
            "set_default_active_thread_percentage": self.set_default_percentage,
            "get_default_active_thread_percentage": lambda: f"{self.percentage:.1f}",
            "set_default_device_pinned_mem_limit": self.set_default_memory,
            "get_default_device_pinned_mem_limit": lambda device: shown(self.memory.get(device, "0M")),
        }
        for first_branch, names in COMMANDS_SINCE.items():
            if facts["branch"] < first_branch:
                self.commands = {name: one for name, one in self.commands.items() if name not in names}

    def rules(self) -> dict[str, Any]:
        """How it is to misbehave now."""
        try:
            with open(f"{self.root}/var/lib/nvidia-simulator/mps.json") as file:
                rules = json.load(file)
        except (OSError, ValueError):
            return {}
        return {**rules.get("*", {}), **rules.get(self.visible[0] if self.visible else "*", {})}

    def log(self, name: str, text: str) -> None:
        if name == "control.log" and self.foreground:
            print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')} Control {os.getpid()}] {text}", flush=True)
            return
        with contextlib.suppress(OSError), open(f"{LOG}/{name}", "a") as file:
            file.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')} {os.getpid()}] {text}\n")

    # --- devices and servers ---

    def devices(self) -> list[dict[str, Any]]:
        """The facts of the visible devices in their order. Before R580, MPS looks at them only when it starts a server.
        CUDA finds no MIG device whose capability nodes are missing, and never joins MIG devices."""
        known = {item["uuid"]: item for item in self.facts["devices"]}
        for uuid in self.visible:
            if uuid not in known:
                raise Refusal(f"CUDA_VISIBLE_DEVICES names {uuid}, which this machine does not have")
        devices = [known[uuid] for uuid in self.visible or known]
        if not devices:
            raise Refusal("no CUDA-capable device is detected")
        nodes = [node for item in devices for node in item["nodes"]]
        if nodes and len(devices) > 1:
            raise Refusal("no CUDA-capable device is detected: a server serves one MIG device")
        for node in nodes:
            if not os.path.lexists(f"{self.root}/{node}"):
                raise Refusal(f"no CUDA-capable device is detected: /{node} is missing")
        return devices

    def cuda_error(self) -> int:
        """The error with which CUDA fails to start; 0 for none."""
        error = self.rules().get("cuda_error")
        if error is not None:
            return int(error)
        if not os.path.exists(f"{self.root}/{self.facts['libcuda']}"):
            return NO_LIBRARY
        try:
            self.devices()
        except Refusal:
            return NO_DEVICE
        return 0 if self.facts["driver_loaded"] else NO_DEVICE

    def server(self, pid: str) -> Server:
        if pid not in self.servers:
            raise Refusal(f"Server {pid} not found")
        return self.servers[pid]

    def serving(self, uid: int) -> Server:
        """The server for a user, started if there is none. One user at a time unless multi-user."""
        for server in list(self.servers.values()):
            if self.multi_user or server.uid == uid:
                return server
            if server.clients:
                raise Refusal(f"the server is used by user {server.uid}; wait until its clients have ended")
            self.end_server(server)
        try:
            self.devices()
        except Refusal as error:
            self.log("server.log", f"Failed to start: {error}")
            raise
        linger = bool(self.rules().get("server_lingers"))
        program = f"{self.root}/usr/bin/nvidia-cuda-mps-server"
        server = Server(program, 0 if self.multi_user else uid, self.percentage, dict(self.memory), linger)
        self.servers[server.pid] = server
        self.log("control.log", f"Starting new server {server.pid} for user {server.uid}")
        return server

    def end_server(self, server: Server) -> None:
        server.stop()
        del self.servers[server.pid]
        self.log("control.log", f"Server {server.pid} exited")

    def reap(self) -> None:
        for server in list(self.servers.values()):
            if server.process.poll() is not None:
                server.forget()
                del self.servers[server.pid]
                self.log("control.log", f"Server {server.pid} exited with status {server.process.returncode}")

    # --- commands ---

    def answer(self, line: str) -> str:
        self.reap()
        words = line.split()
        if not words:
            return ""
        command = self.commands.get(words[0])
        if command is None:
            return f'Unknown command "{words[0]}"'
        try:
            return command(*words[1:])
        except (Refusal, TypeError, ValueError) as error:
            return str(error) if isinstance(error, Refusal) else f"Invalid arguments: {line.strip()}"

    def get_server_status(self, pid: str) -> str:
        self.server(pid)
        return str(self.rules().get("server_state", "ACTIVE"))

    def start_server(self, flag: str, uid: str, *_: str) -> str:
        if flag != "-uid":
            raise ValueError(flag)
        self.serving(int(uid))
        return ""

    def get_client_list(self, pid: str) -> str:
        return "\n".join(map(str, self.server(pid).clients.values()))

    def quit(self, *arguments: str) -> str:
        wait = float(arguments[1]) if arguments[:1] == ("-t",) else 0.0
        self.quit_at = time.monotonic() + wait
        return ""

    def set_default_percentage(self, value: str) -> str:
        with contextlib.suppress(Refusal):
            self.percentage = self.percentage if self.rules().get("ignore_limits") else percentage(value)
        return f"{self.percentage:.1f}"

    def set_default_memory(self, device: str, size: str) -> str:
        with contextlib.suppress(Refusal):
            mebibytes(size)
            if not self.rules().get("ignore_limits"):
                self.memory[device] = size
        return ""

    # --- clients ---

    def greet(self, line: str) -> None:
        """A line of the FIFO: `connect NAME PID UID PERCENTAGE|- MEMORY|-` or `disconnect NAME`."""
        words = line.split()
        if words[:1] == ["disconnect"]:
            for server in self.servers.values():
                server.clients.pop(words[-1], None)
            return
        if words[:1] != ["connect"] or len(words) != 6 or "/" in words[1]:
            return
        try:
            text = self.connect(words[1], int(words[2]), int(words[3]), words[4], words[5])
        except (Refusal, ValueError) as error:
            text = f"mps=refused\nreason={error}"
        path = f"{PIPE}/simulated/reply-{words[1]}"
        with open(f"{path}.new", "w") as file:
            file.write(f"{text}\n")
        os.chmod(f"{path}.new", 0o666)
        os.replace(f"{path}.new", path)

    def connect(self, name: str, pid: int, uid: int, wanted_percentage: str, wanted_memory: str) -> str:
        """What the client gets: the tighter of the server's limits and its own."""
        self.reap()
        if self.rules().get("selinux_enforcing"):
            for path in (PIPE, "/dev/shm"):
                if b":container_file_t:" not in label(path):
                    raise Refusal(f"{path}: Permission denied")
        if self.servers and self.rules().get("server_state") == "FAULT":
            raise Refusal("CUDA_ERROR_MPS_SERVER_NOT_READY")
        server, devices = self.serving(uid), self.devices()
        most = min(device["most_clients"] for device in devices)
        if sum(len(one.clients) for one in self.servers.values()) >= most:
            raise Refusal("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED")
        threads = [server.percentage, *([] if wanted_percentage == "-" else [percentage(wanted_percentage)])]
        wanted = dict(part.partition("=")[::2] for part in wanted_memory.split(",") if part != "-")
        limits: list[int | None] = []
        for ordinal, device in enumerate(devices):
            keys = (str(ordinal), device["uuid"])
            sizes = [mebibytes(wanted.pop(key)) for key in keys if key in wanted]
            own = [mebibytes(size) for key, size in server.memory.items() if key in keys]
            sizes += own[-1:]
            limits.append(min([*sizes, device["memory_mib"]]) if sizes else None)
        uuids = ",".join(device["uuid"] for device in devices)
        server.clients[name] = pid
        shown = ",".join("none" if limit is None else str(limit) for limit in limits)
        return "\n".join(
            [
                "mps=connected",
                f"device={uuids}",
                f"active_thread_percentage={min(threads):g}",
                f"pinned_device_mem_limit_mib={shown}",
                *(f"ignored_mem_limit={key}" for key in wanted),
            ]
        )

    # --- serving ---

    def serve(self, listener: socket.socket, fifo: int) -> None:
        rest = b""
        sources: list[Any] = [listener, fifo]
        while not self.is_done():
            ready, _, _ = select.select(sources, [], [], None if self.quit_at is None else 0.05)
            if listener in ready:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    self.talk(connection, listener)
            if fifo in ready:
                *lines, rest = (rest + os.read(fifo, 65536)).split(b"\n")
                for line in lines:
                    self.greet(line.decode(errors="replace"))
        for server in list(self.servers.values()):
            self.end_server(server)

    def is_done(self) -> bool:
        if self.quit_at is None:
            return False
        return time.monotonic() >= self.quit_at or not any(item.clients for item in self.servers.values())

    def end(self, fifo: int) -> None:
        """Quit; the write wakes `serve` up."""
        self.quit()
        os.write(fifo, b"\n")

    def talk(self, connection: socket.socket, listener: socket.socket) -> None:
        """Answer one program. Whoever comes meanwhile is let go without an answer, as the real one does."""
        connection.settimeout(5)
        self.log("control.log", "Accepting connection...")
        self.log("control.log", "NEW UI")
        rest = b""
        while True:
            ready, _, _ = select.select([connection, listener], [], [], 5)
            if listener in ready:
                listener.accept()[0].close()
            if connection not in ready:
                continue
            received = connection.recv(65536)
            if not received:
                self.log("control.log", "UI closed")
                return
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                self.log("control.log", f"Cmd:{line.decode(errors='replace')}")
                if self.rules().get("silent"):
                    time.sleep(3600)
                answer = self.answer(line.decode(errors="replace"))
                if answer:
                    self.log("control.log", answer)
                connection.sendall((f"{answer}\n{END}" if answer else END).encode())


def label(path: str) -> bytes:
    try:
        return os.getxattr(path, "security.selinux")
    except OSError:
        return b""


def percentage(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100:
        raise Refusal(f"Invalid active thread percentage: {text}")
    return value


def mebibytes(text: str) -> int:
    number, unit = text[:-1], text[-1:]
    if unit not in ("G", "M") or not number.isdigit():
        raise Refusal(f"Invalid memory limit: {text}; it must be a whole number with G or M")
    return int(number) * (1024 if unit == "G" else 1)


def shown(limit: str) -> str:
    """Rounded down, as NVIDIA's program does; nothing for no limit."""
    size = mebibytes(limit)
    return f"{size // 1024}G" if size >= 1024 else f"{size}M" if size else ""


def is_taken(lock: int) -> bool:
    """Whether another daemon serves the pipe directory; a pid file of a running process is enough."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    try:
        with open(f"{PIPE}/{NAME}.pid") as file:
            os.kill(int(file.read()), 0)
    except (OSError, ValueError):
        return False
    return True


def listen(name: str) -> socket.socket:
    """A socket in the pipe directory. The real one leaves them behind."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{PIPE}/{name}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{PIPE}/{name}")
    os.chmod(f"{PIPE}/{name}", 0o666)
    listener.listen(16)
    return listener


def open_pipes() -> tuple[socket.socket, int]:
    """The socket for commands, and a FIFO through which clients without Python connect."""
    os.makedirs(f"{PIPE}/simulated", exist_ok=True)
    os.chmod(f"{PIPE}/simulated", 0o777)
    fifo = f"{PIPE}/simulated/connect"
    with contextlib.suppress(FileExistsError):
        os.mkfifo(fifo)
    os.chmod(fifo, 0o666)
    listen("control_privileged").close()  # nothing here uses it, but it has the longest path
    return listen("control"), os.open(fifo, os.O_RDWR | os.O_NONBLOCK)


def refusal(me: Daemon) -> str | None:
    """Why the daemon does not start."""
    old = any(item["uuid"] in me.visible and not item["volta"] for item in me.facts["devices"])
    if me.multi_user and old:
        return "Multi-user mode needs GPUs of Volta or newer"
    reason: str | None = me.rules().get("fail_to_start")
    return reason


def run(facts: str, root: str, multi_user: bool, foreground: bool) -> int:
    """Run the daemon until `quit`; returns its exit code. From R580 on it initialises CUDA first, and prints nothing if
    that fails. No release prints anything if its socket paths are too long."""
    me = Daemon(json.loads(facts), root, multi_user, foreground)
    rules = me.rules()
    if me.facts["branch"] >= CUDA_SINCE:
        time.sleep(rules.get("cuda_delay_ms", 0) / 1000)
        error = me.cuda_error()
        if error:
            return error % 256
    lock = os.open(f"{PIPE}/control_lock", os.O_RDWR | os.O_CREAT, 0o644)
    if len(os.fsencode(f"{PIPE}/control_privileged")) > LONGEST_SOCKET:
        return 1
    if is_taken(lock):
        print("An instance of this daemon is already running", flush=True)
        return 1
    me.log("control.log", "Starting control daemon")
    reason = refusal(me)
    if reason is not None:
        me.log("control.log", reason)
        return 1
    time.sleep(rules.get("start_delay_ms", me.facts["start_delay_ms"]) / 1000)
    while rules.get("never_ready"):
        time.sleep(3600)
    if "die_after_s" in rules:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.setitimer(signal.ITIMER_REAL, rules["die_after_s"])
    listener, fifo = open_pipes()
    signal.signal(signal.SIGTERM, lambda *_: me.end(fifo))
    if me.facts["branch"] >= PID_FILE_SINCE:
        with open(f"{PIPE}/{NAME}.pid", "w") as file:
            file.write(str(os.getpid()))
    me.serve(listener, fifo)
    me.log("control.log", "Exit")
    with contextlib.suppress(OSError):
        os.unlink(f"{PIPE}/{NAME}.pid")  # the real one leaves its sockets
    return 0
