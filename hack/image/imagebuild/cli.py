"""The command line: ``build.py`` and ``build.py context``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from localcluster import progress
from localcluster.errors import ClusterError

from imagebuild import image


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the path of the archive, or of the context, that was made."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command == "context":
            print(image.context(parsed.folder, parsed.python_version))
        else:
            print(image.archive())
    except ClusterError as error:
        progress.say(f"image: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="build.py", description="Build the driver's image.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("archive", help="build the image as an archive (the default)")
    context = commands.add_parser("context", help="only make a build context for another builder")
    context.add_argument("folder", type=Path)
    here = "{}.{}".format(*sys.version_info)
    context.add_argument("--python-version", default=here, help="of the base image you will use")
    return parser
