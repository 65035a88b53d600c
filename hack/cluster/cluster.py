#!/usr/bin/env python3
"""A real Kubernetes on this machine; see README.md beside this file."""

import sys

from localcluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
