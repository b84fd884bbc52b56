"""The soak in short: a few kills at random moments, and the run ends in the undisturbed bits."""

import sys

import pytest

from benchmarks import soak


def test_a_few_kills(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["soak", "--kills", "3", "--steps", "150", "--workers", "2", "--seed", "5"]
    monkeypatch.setattr(sys, "argv", words)
    assert soak.main() == 0, capfd.readouterr().err
    said = capfd.readouterr().out.splitlines()
    assert said
    assert all(line.endswith("right") for line in said)
