"""What is said of an error that a script does not catch: on the real stderr, and at a prompt."""

import io
import subprocess
import sys

import pytest

from firecaffe.cluster.last_word import tell_uncaught
from firecaffe.errors import RecipeError
from tests.typed import TIMEOUT_S

MISTAKE = RecipeError("data.name is 'x'")


def test_torchs_hook_around_ours_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`init_process_group` gathers what a hook prints, and prints it when that returns."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    tell_uncaught()
    ours, before = sys.excepthook, sys.stderr
    gathered = sys.stderr = io.StringIO()
    try:
        with pytest.raises(SystemExit) as ended:
            ours(RecipeError, MISTAKE, None)
        assert sys.stderr is gathered
    finally:
        sys.stderr = before
    assert ended.value.code == 2
    assert capfd.readouterr().err == "firecaffe: data.name is 'x'\n"


def typed(words: list[str], lines: str) -> subprocess.CompletedProcess[str]:
    """A Python to which the lines are typed. It loads no torch."""
    return subprocess.run(
        [sys.executable, *words],
        input=lines,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


MISTAKEN = (
    "from firecaffe.cluster.last_word import tell_uncaught\n"
    "from firecaffe.errors import RecipeError\n"
    "tell_uncaught()\n"
    "raise RecipeError('mine')\n"
)
HELD = "print('still here')\n"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["-i"], MISTAKEN + HELD),
        (["-i", "-c", MISTAKEN], HELD),
        (["-c", "import code; code.interact()"], MISTAKEN + HELD),
    ],
    ids=["prompt", "after a script", "code.interact"],
)
def test_a_prompt_stays_with_all_that_it_holds(words: list[str], lines: str) -> None:
    done = typed(words, lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("still here") == 1
    assert done.stderr.count("firecaffe: mine\n") == 1
    assert "Traceback" not in done.stderr


def test_a_script_from_stdin_is_no_prompt() -> None:
    done = typed(["-"], MISTAKEN + HELD)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "firecaffe: mine\n")


def test_ipython_shows_the_line() -> None:
    pytest.importorskip("IPython", reason="needs IPython: pip install -e '.[dev]'")
    words = ["-m", "IPython", "--quick", "--colors=NoColor", "-c", MISTAKEN]
    done = typed(words, "")
    assert "firecaffe: mine" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
