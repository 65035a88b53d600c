#!/usr/bin/env -S python3 -IS
# ruff: noqa: PTH100, PTH110, PTH120, S108
"""The MPS control program of a simulated machine: daemon (-f, -d) and command line to it (no flag).

It takes the options that the real program of the machine's driver branch takes. Before R555 that is one of -f, -d, -h
and --help, alone; whatever else is given, the real program looks for a daemon, finds none, and ends. From R555 on it
also takes -multiuser-server, and answers what it does not know with its help.
It needs nothing but Python's standard library. What it knows of the machine stands in FACTS; the daemon is in
a module of the machine's host root: every command to it is a process of this, which must start fast.
"""

import json
import os
import socket
import sys
import time

FACTS = r"""#@FACTS@"""

NAME = "nvidia-cuda-mps-control"
NO_DAEMON = "Cannot find MPS control daemon process"
HELP = "CUDA MPS Control for Linux/Unix (simulated).\n\n  See the nvidia-cuda-mps-control manual page.\n"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
END = "\0\n"


def command_line() -> int:
    """Pass the lines of standard input on, one answer each."""
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


def daemon(multi_user: bool, foreground: bool) -> int:
    """Be the daemon; returns when it has quit."""
    sys.path.insert(0, f"{ROOT}/usr/share/nvidia-simulator")
    import nvidia_mps_daemon  # type: ignore[import-not-found]

    return int(nvidia_mps_daemon.run(FACTS, ROOT, multi_user, foreground))


def background(multi_user: bool) -> int:
    """Return when the daemon answers."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(daemon(multi_user, foreground=False))
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if os.path.exists(f"{PIPE}/control"):
            return 0
        time.sleep(0.01)


def main(arguments: list[str]) -> int:
    """The exit code."""
    if arguments in (["-h"], ["--help"]):
        print(HELP)
        return 0
    if json.loads(FACTS)["branch"] < 555:
        if len(arguments) > 1 or not {*arguments} <= {"-f", "-d"}:
            print(NO_DAEMON)
            return 1
    elif not {*arguments} <= {"-f", "-d", "-multiuser-server"}:
        print(HELP)
        return 1
    multi_user = "-multiuser-server" in arguments
    if multi_user and os.geteuid() != 0:
        print(f"{HELP}\nOnly root user may enable -multiuser-server!")
        return 1
    if "-f" in arguments:
        return daemon(multi_user, foreground=True)
    if "-d" in arguments:
        return background(multi_user)
    return command_line()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
