#!/usr/bin/env -S python3 -IS
# ruff: noqa: PTH100, PTH110, PTH120, S108
"""The MPS control program of a simulated machine: daemon (-f, -d) and command line to it (no flag).

It needs nothing but Python's standard library. What it knows of the machine stands in FACTS; the daemon is in
a module of the machine's host root: every command to it is a process of this, which must start fast.
"""

import os
import socket
import sys
import time

FACTS = r"""#@FACTS@"""

NAME = "nvidia-cuda-mps-control"
NO_DAEMON = "Cannot find MPS control daemon process"
USAGE = f"Usage: {NAME} [-d|-f] [-M|-multiuser-server] | -v"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
END = "\0\n"


def command_line() -> int:
    """Pass the lines of standard input on, one answer each."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        directory = os.open(PIPE, os.O_PATH | os.O_DIRECTORY)
        connection.connect(f"/proc/self/fd/{directory}/control")  # a socket's own path may be too long
    except OSError:
        print(NO_DAEMON)
        return 1
    with connection, connection.makefile("rw") as stream:
        try:
            for line in sys.stdin:
                stream.write(line if line.endswith("\n") else f"{line}\n")
                stream.flush()
                for answer in iter(stream.readline, END):
                    if not answer:
                        return 0
                    sys.stdout.write(answer)
        except OSError:  # it ended meanwhile
            return 0
    return 0


def daemon(multi_user: bool) -> int:
    """Be the daemon; returns when it has quit."""
    sys.path.insert(0, f"{ROOT}/usr/share/nvidia-simulator")
    import nvidia_mps_daemon  # type: ignore[import-not-found]

    return int(nvidia_mps_daemon.run(FACTS, ROOT, multi_user))


def background(multi_user: bool) -> int:
    """Return when the daemon answers."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(daemon(multi_user))
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if os.path.exists(f"{PIPE}/{NAME}.pid"):
            return 0
        time.sleep(0.01)


def main(arguments: list[str]) -> int:
    """The exit code."""
    if arguments == ["-v"]:
        print(f"{NAME} (simulated)")
        return 0
    multi_user = "-M" in arguments or "-multiuser-server" in arguments
    rest = [item for item in arguments if item not in ("-M", "-multiuser-server")]
    if rest == ["-f"]:
        return daemon(multi_user)
    if rest == ["-d"]:
        return background(multi_user)
    if rest or multi_user:
        print(USAGE)
        return 1
    return command_line()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
