"""Faults on purpose that cannot be made to happen: one line, before any rank is started."""

from pathlib import Path

import pytest

from benchmarks.faults.on_purpose import VARIABLE, environment
from firecaffe.cli import main
from firecaffe.training.plugins import VARIABLE as PLUGINS

RECIPE = Path(__file__).parents[3] / "recipes" / "lenet_fashion.toml"


@pytest.mark.parametrize(
    ("faults", "parts"),
    [
        ([], ["names no fault"]),
        (["nap"], ["no kind 'nap'", "kill, freeze"]),
        (["kill:rank=x"], ["rank is 'x'", "must be a whole number"]),
        (["kill:when=3"], ["no word 'when'", "rank, step"]),
        (["kill:step=0"], ["step and factor from 1"]),
        (["slow:factor=nan"], ["step and factor from 1"]),
        (["kill:rank=3"], ["rank is 3", "ranks 0 to 0"]),
        (["preempt", "kill:rank=3"], ["kill: rank is 3"]),
        (["link_cut:rank=0"], ["emulated cluster"]),
    ],
    ids=" ".join,
)
def test_one_that_cannot_happen_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    faults: list[str],
    parts: list[str],
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("firecaffe.cluster.agent.FaultAgent.run", refuse)
    monkeypatch.setenv(PLUGINS, environment("kill")[PLUGINS])
    monkeypatch.setenv(VARIABLE, " ".join(faults))
    assert main(["train", str(RECIPE)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for part in (VARIABLE, *parts):
        assert part in line
