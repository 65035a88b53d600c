"""The command line of the cluster: ``cluster.py up``, ``down`` and other commands."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import localcluster
from localcluster import apart, lifecycle, shell
from localcluster.components import NAMES, Options
from localcluster.layout import ADDRESSES
from localcluster.shell import ClusterError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code: 130 after Ctrl-C."""
    parsed = _parser().parse_args(arguments)
    try:
        return _run(parsed)
    except ClusterError as error:
        shell.say(f"cluster: {error}")
        return 1
    except KeyboardInterrupt:
        shell.say("cluster: interrupted; 'up' continues, 'down' cleans up.")
        return 130


def _run(parsed: argparse.Namespace) -> int:
    match parsed.command:
        case "build":
            print(localcluster.build())
        case "fetch":
            localcluster.fetch()
        case "up":
            names = [field.name for field in fields(Options)]
            localcluster.up(Options(**{name: getattr(parsed, name) for name in names}))
            print(lifecycle.table(localcluster.state()))
            print(_environment())
        case "down":
            localcluster.down()
        case "status":
            print(lifecycle.table(localcluster.state()))
            return 0 if localcluster.is_up() else 3
        case "env":
            print(_environment())
        case "load":
            print("\n".join(localcluster.load_image(parsed.archive)))
        case "apart":
            return apart.run(parsed.words)
        case "begin-apart":
            apart.begin(parsed.words)
        case "start" | "stop" | "restart":
            getattr(localcluster, parsed.command)(parsed.component)
    return 0


def _environment() -> str:
    """Return shell commands that configure kubectl for this cluster."""
    programs = shlex.quote(str(localcluster.kubectl().parent))
    return f"export KUBECONFIG={shlex.quote(str(localcluster.kubeconfig()))}\nexport PATH={programs}:$PATH"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster.py", description=localcluster.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the programs, as any user")
    commands.add_parser("fetch", help="build and download everything that a cluster and its tests need")
    up = commands.add_parser("up", help="start the cluster, or complete it")
    up.add_argument(
        "--kubelet-as-node", action="store_true", help="run the kubelet as a node instead of as administrator"
    )
    up.add_argument(
        "--sync-frequency", default=Options().sync_frequency, help="the kubelet's syncFrequency, such as 10s"
    )
    up.add_argument(
        "--snapshotter", default=Options().snapshotter, help="containerd's snapshotter, such as native"
    )
    up.add_argument(
        "--ip-family", choices=tuple(ADDRESSES), default="ipv4", help="the IP family of all addresses"
    )
    commands.add_parser("down", help="remove the cluster and everything it created")
    commands.add_parser("status", help="show the components; the exit code is 3 if one is not healthy")
    commands.add_parser("env", help="print KUBECONFIG and PATH for eval")
    load = commands.add_parser("load", help="load an image archive into the node")
    load.add_argument("archive", type=Path)
    for name, about in (
        ("apart", "run a command isolated from this cluster, so that it can start its own cluster"),
        ("begin-apart", argparse.SUPPRESS),
    ):
        one = commands.add_parser(name, help=about)
        one.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    for name in ("start", "stop", "restart"):
        one = commands.add_parser(name, help=f"{name} one component")
        one.add_argument("component", choices=NAMES)
    return parser
