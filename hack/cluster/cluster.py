#!/usr/bin/env python3
"""A real Kubernetes on this machine; see README.md in this directory."""

import sys

from localcluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
