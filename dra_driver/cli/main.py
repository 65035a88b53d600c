"""The entry points. Expected errors are one line and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from dra_driver.errors import DraDriverError, InvalidConfigError
from dra_driver.model.ids import printable

EXIT_USAGE = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
"""128 plus the number of SIGINT, as in shells."""


def main(arguments: Sequence[str] | None = None, called: str | None = None) -> None:
    """Run the command in `arguments`, or on the command line. `called` replaces the command's name in its help.

    Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else arguments
    _open_what_is_closed()
    try:
        if called and words[:1] == ["top"]:
            _top_of(words[1:])
        from dra_driver.cli.commands import call

        sys.exit(call(words, called))
    except DraDriverError as error:
        print(f"gpu-dra-driver: {printable(str(error))}", file=sys.stderr)
        sys.exit(EXIT_USAGE if isinstance(error, InvalidConfigError) else EXIT_FAILED)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        print(f"gpu-dra-driver: {error}; raise the process limit, or free memory", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def kubectl_gpus() -> None:
    words = sys.argv[1:]
    main(words if words[:1] == ["top"] else ["cluster", *words], "kubectl gpus")


def _top_of(words: Sequence[str]) -> None:
    """Run `top` in the plugin's pod on a node."""
    if not words or words[0].startswith("-"):
        raise InvalidConfigError("no node is named; use kubectl gpus top NODE [FLAGS of top]")
    node, *flags = words
    kubectl = ["kubectl"]
    for flag in ("--context", "--kubeconfig"):
        while flag in flags[:-1]:
            at = flags.index(flag)
            kubectl += [flag, flags[at + 1]]
            del flags[at : at + 2]
    where = f"spec.nodeName={node},status.phase=Running"
    labels = "app.kubernetes.io/name=gpu-dra-driver,app.kubernetes.io/component=node"
    path = "{range .items[*]}{.metadata.namespace}/{.metadata.name} {end}"
    get = [*kubectl, "get", "pods", "-A", "-l", labels, "--field-selector", where, "-o", f"jsonpath={path}"]
    done = subprocess.run(get, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    if not (pods := done.stdout.split()):
        raise DraDriverError(f"no pod of gpu-dra-driver runs on node {node}")
    namespace, _, pod = pods[-1].partition("/")  # during a rolling update, either of two pods
    terminal = ["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    of_pod = ["-n", namespace, pod, "-c", "driver", "--", "gpu-dra-driver", "top"]
    command = [*kubectl, "exec", "--stdin", *terminal, *of_pod, *flags]
    sys.exit(subprocess.run(command, check=False).returncode)


def _open_what_is_closed() -> None:
    """After `>&-`, sys.stdout is None, and the next opened file would become descriptor 1."""
    for number, name, flags in (
        (0, "stdin", os.O_RDONLY),
        (1, "stdout", os.O_WRONLY),
        (2, "stderr", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


if __name__ == "__main__":
    main()
