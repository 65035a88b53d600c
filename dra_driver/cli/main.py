"""`gpu-dra-driver` and its commands. Errors are one line and an exit code, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dra_driver.errors import DraDriverError, InvalidConfigError
from dra_driver.model.ids import printable

EXIT_USAGE = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it."""


def main(arguments: Sequence[str] | None = None, called: str | None = None) -> None:
    """Entry point, of the words on the command line or others. `called` is the name that the help of the command has.
    Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 Ctrl-C."""
    _open_what_is_closed()
    try:
        from dra_driver.cli.commands import call

        sys.exit(call(sys.argv[1:] if arguments is None else arguments, called))
    except DraDriverError as error:
        print(f"gpu-dra-driver: {printable(str(error))}", file=sys.stderr)
        sys.exit(EXIT_USAGE if isinstance(error, InvalidConfigError) else EXIT_FAILED)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        print(f"gpu-dra-driver: {error}; raise the limit of processes, or free memory", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def kubectl_gpus() -> None:
    """Entry point of `kubectl gpus`."""
    main(["cluster", *sys.argv[1:]], "kubectl gpus")


def _open_what_is_closed() -> None:
    """After `>&-` the next file that is opened would be standard output, and Python has None for it."""
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
