from __future__ import annotations

from collections.abc import Callable

import pytest

from dra_driver.cli.main import main


def test_error_is_one_sentence_when_no_thread_starts(
    threads_that_start: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu-dra-driver", "inspect", "--simulate", "t4-4"])
    threads_that_start("", 0)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, *capsys.readouterr()) == (
        1,
        "",
        "gpu-dra-driver: can't start new thread; raise the process limit, or free memory\n",
    )
