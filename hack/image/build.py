#!/usr/bin/env python3
"""Build the driver's image; see daemonset/README.md."""

import sys
from pathlib import Path

# The cluster beside us has the pieces both need: steps, packages, locks.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cluster"))

from imagebuild.cli import main

if __name__ == "__main__":
    sys.exit(main())
