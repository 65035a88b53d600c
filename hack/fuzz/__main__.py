"""`make fuzz`: every parser of untrusted bytes, for a bounded time.

    python hack/fuzz                      all targets, 10 s each
    python hack/fuzz --seconds 600 claim  one of them for ten minutes

A finding is printed after hypothesis has made it smaller, and makes the exit code 1; the next run begins with it.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "hack"))

import structlog  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis.database import DirectoryBasedExampleDatabase  # noqa: E402

from fuzz.inputs import inputs  # noqa: E402
from fuzz.targets import OF_BYTES, OF_FILES, check  # noqa: E402

KNOWN = ROOT / "build" / "fuzz"
_BATCH = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, print a line a target; 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="[default: all]")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target [default: 10]")
    options = parser.parse_args(arguments)
    known = [*OF_BYTES, *OF_FILES]
    if unknown := set(options.targets).difference(known):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    structlog.configure(processors=[_drop])
    held = [_holds(target, options.seconds) for target in options.targets or known]
    return 0 if all(held) else 1


def _holds(target: str, seconds: float) -> bool:
    until, runs, failed = time.monotonic() + seconds, 0, False

    @settings(
        max_examples=_BATCH,
        deadline=None,
        database=DirectoryBasedExampleDatabase(KNOWN / target),
        suppress_health_check=list(HealthCheck),
        phases=[Phase.reuse, Phase.generate, Phase.shrink],  # to explain it would trace every line
    )
    @given(inputs(target))
    def batch(content: bytes) -> None:
        nonlocal runs, failed
        if time.monotonic() > until and not failed:
            return
        runs += 1
        try:
            check(target, content)
        except BaseException:
            failed = True  # from now on hypothesis looks for a smaller input, as long as it takes
            raise

    while not failed and time.monotonic() < until:
        try:
            batch()
        except Exception:
            traceback.print_exc(limit=-3)
    print(f"{target:16} {runs:8} runs{', and a finding' if failed else ''}", flush=True)
    return not failed


def _drop(*_: object) -> str:
    raise structlog.DropEvent


if __name__ == "__main__":
    sys.exit(main())
