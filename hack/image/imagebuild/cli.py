"""The command line: ``build.py`` and ``build.py context``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from localcluster import progress
from localcluster.errors import ClusterError

from imagebuild import image
from imagebuild.architectures import ARCHITECTURES


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the path of the archive, or of the context, that was made."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command == "context":
            wanted = parsed.architecture or list(ARCHITECTURES)
            print(
                image.context(parsed.folder, parsed.python_version, [ARCHITECTURES[name] for name in wanted])
            )
        else:
            print(image.archive(getattr(parsed, "architecture", None)))
    except ClusterError as error:
        progress.say(f"image: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="build.py", description="Build the driver's image.")
    commands = parser.add_subparsers(dest="command")
    archive = commands.add_parser("archive", help="build the image as an OCI archive (the default)")
    archive.add_argument("--architecture", choices=ARCHITECTURES, help="default: this machine's")
    context = commands.add_parser("context", help="only make a build context for another builder")
    context.add_argument("folder", type=Path)
    context.add_argument("--python-version", required=True, help="that of the base image you will use: 3.13")
    context.add_argument(
        "--architecture", choices=ARCHITECTURES, action="append", help="may be repeated; default: all of them"
    )
    return parser
