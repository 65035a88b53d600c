"""`make fuzz`: every parser of untrusted bytes, guided by coverage, for a bounded time.

    python hack/fuzz                         all targets, 10 s each
    python hack/fuzz --seconds 600 claim     one of them for ten minutes
    python hack/fuzz --engine atheris claim  the same target under libFuzzer, if atheris is installed

Inputs that reached new lines are kept in build/fuzz/corpus and start the next run. A finding is written to
build/fuzz/findings, made as small as it will go, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "hack"))

import structlog  # noqa: E402

from fuzz.loop import Finding, Report, Target, Trace, fuzz, smaller  # noqa: E402

KEPT = ROOT / "build" / "fuzz"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, print a line a target; 1 if there was a finding."""
    options = _options(arguments)
    structlog.configure(processors=[_drop])
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_memory()) as scratch:
        from fuzz.parsers import targets

        known = {target.name: target for target in targets(Path(scratch))}
        if unknown := set(options.targets) - known.keys():
            print(f"no target {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
            return 2
        chosen = [known[name] for name in options.targets or known]
        if options.engine == "atheris":
            return _atheris(chosen[0], options.seconds)
        rng = random.Random(options.seed)
        reports = [_run(target, rng, options) for target in chosen]
    return 1 if any(report.findings for report in reports) else 0


def _run(target: Target, rng: random.Random, options: argparse.Namespace) -> Report:
    until = time.monotonic() + options.seconds
    kept = [path.read_bytes() for path in sorted((KEPT / "corpus" / target.name).glob("*"))]
    limit = options.runs or sys.maxsize
    report = fuzz(target, rng, lambda runs: runs < limit and time.monotonic() < until, kept)
    print(
        f"{target.name:16} {report.runs:8} runs  {len(report.corpus):5} inputs  {report.places:6} places",
        flush=True,
    )
    _keep("corpus", target.name, report.corpus[len(target.seeds) :])
    for finding in report.findings:
        content = smaller(finding, partial(_fails_alike, target, finding))
        [path] = _keep("findings", target.name, [content])
        print(f"  {finding.fault}\n  {path.relative_to(ROOT)}: {content[:200]!r}", flush=True)
    return report


def _fails_alike(target: Target, finding: Finding, content: bytes) -> bool:
    try:
        Trace().run(target.run, content)
    except BaseException as error:
        return type(error).__name__ == finding.fault.partition(":")[0]
    return False


def _keep(kind: str, name: str, contents: Sequence[bytes]) -> list[Path]:
    directory = KEPT / kind / name
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / hashlib.sha256(content).hexdigest()[:16] for content in contents]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def _atheris(target: Target, seconds: float) -> int:
    """Hand the target to libFuzzer, which ends the process; its findings lie in the working directory."""
    try:
        import atheris  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        print("atheris is not installed: pip install atheris (CPython on x86-64 Linux)", file=sys.stderr)
        return 2
    corpus = KEPT / "corpus" / target.name
    corpus.mkdir(parents=True, exist_ok=True)
    _keep("corpus", target.name, target.seeds)
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}", str(corpus)], target.run)
    atheris.Fuzz()
    return 0


def _memory() -> str | None:
    """Files are what most targets wait for."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _drop(*_: object) -> str:
    raise structlog.DropEvent


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="[default: all]")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target [default: 10]")
    parser.add_argument("--runs", type=int, default=0, help="at most, for each target")
    parser.add_argument(
        "--seed", type=int, default=None, help="repeats a run that started with the same corpus"
    )
    parser.add_argument("--engine", choices=("own", "atheris"), default="own")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
