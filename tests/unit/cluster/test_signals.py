"""Signals come back to whoever handled them, and who is not to hear one does not."""

import signal
import threading
from pathlib import Path

import pytest

from firecaffe.cluster.signals import handlers_kept, heard
from tests.typed import python

OF_C = """
import faulthandler, signal, sys
from firecaffe.cluster.signals import handlers_kept
with open(sys.argv[1], "w") as file:
    faulthandler.register(signal.SIGUSR1, file)
    for _ in range(2):
        heard = []
        with handlers_kept([signal.SIGUSR1]) as numbers:
            for number in numbers:
                signal.signal(number, lambda *_: heard.append(1))
            signal.raise_signal(signal.SIGUSR1)
        assert heard == [1]
        signal.raise_signal(signal.SIGUSR1)
"""


def test_a_handler_of_c_comes_back(tmp_path: Path) -> None:
    done = python("-c", OF_C, tmp_path / "told")  # where it does not, the signal ends the process
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told").read_text().count("Current thread") == 2


def test_a_handler_of_python_comes_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def fails() -> None:
        with handlers_kept([signal.SIGUSR1]):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        fails()
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(
    ("number", "handler", "is_heard"),
    [
        (signal.SIGHUP, signal.SIG_IGN, False),
        (signal.SIGHUP, signal.SIG_DFL, True),
        (signal.SIGINT, signal.SIG_IGN, True),
        (signal.SIGTERM, None, False),
    ],
)
def test_who_hears(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, handler: object, is_heard: bool
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _: handler)
    assert heard([number]) == ([number] if is_heard else [])


def test_no_other_thread_handles_signals() -> None:
    found: list[object] = []

    def ask() -> None:
        with handlers_kept([signal.SIGTERM]) as numbers:
            found.extend(numbers)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == []
