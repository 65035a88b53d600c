"""Python imports this at the start of the daemon that `cpu` measures: it profiles the threads that serve claims.

Each thread counts its own processor time. SIGPROF, which the daemon does not use, has all of it written to the file
that the environment names.
"""

import cProfile
import os
import pstats
import signal
import sys
import threading
import time

_TARGET = os.environ.get("BENCH_PROFILE", "")
_THREADS = ("dra", "announcer")


def _begin() -> None:
    profiles: list[cProfile.Profile] = []
    run = threading.Thread.run

    def profiled(self: threading.Thread) -> None:
        if not (self.name in _THREADS or self.name.endswith("(_serve)")):  # gRPC's own
            run(self)
            return
        profile = cProfile.Profile(time.thread_time)
        profiles.append(profile)
        profile.enable()
        try:
            run(self)
        finally:
            profile.disable()

    def write() -> None:
        signal.sigwait({signal.SIGPROF})
        stats: pstats.Stats | None = None
        for profile in list(profiles):
            stats = pstats.Stats(profile) if stats is None else stats.add(profile)
        if stats is not None:
            stats.dump_stats(f"{_TARGET}.unfinished")
            os.rename(f"{_TARGET}.unfinished", _TARGET)  # noqa: PTH104  pathlib is not loaded yet

    threading.Thread.run = profiled  # type: ignore[method-assign]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    threading.Thread(target=write, name="profile-writer", daemon=True).start()


if _TARGET and "run" in sys.argv + sys.orig_argv:
    _begin()
