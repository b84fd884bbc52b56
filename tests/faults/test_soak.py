"""The soak in short: a few kills at random moments, and the run ends in the undisturbed bits."""

from tests.typed import python


def test_a_few_kills() -> None:
    words = ["--kills", 2, "--steps", 60, "--workers", 2, "--seed", 5, "--pause", 2]
    done = python("-m", "benchmarks.soak", *words)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said
    assert all(line.endswith("right") for line in said)
