"""What a training prints on the way, where its output is no terminal."""

import pytest

from firecaffe.training.outcome import StepResult
from firecaffe.training.records import RunProgress
from firecaffe.training.times import Timings

STEP = StepResult(16, 1.5, {}, Timings(1, 0.0, 0.1, 0.0, 0.0, 0.0, 0.1, 1))


@pytest.mark.parametrize("forced", ["", "1"])
def test_a_pipe_gets_plain_lines(
    forced: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook sets FORCE_COLOR for the processes that it starts."""
    monkeypatch.setenv("FORCE_COLOR", forced)
    with RunProgress("run", 0, 20, shown=True) as progress:
        for step in range(1, 21):
            progress.step(step, 0.1, STEP)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert len(lines) == 10
    assert all("160 samples/s" in line and "s left" in line for line in lines)
