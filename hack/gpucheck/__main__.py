"""`python -m gpucheck`, with hack/ and the repository on PYTHONPATH."""

import sys

from gpucheck.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
