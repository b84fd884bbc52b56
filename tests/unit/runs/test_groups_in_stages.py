"""Runs in stages, in `compare`: how long each stage idles."""

from pathlib import Path

from tests.unit.runs.test_compare import planted
from tests.unit.runs.test_groups import over_seeds, shown


def test_stages_that_idle(tmp_path: Path) -> None:
    """The mean of all runs, beside what stages of equal work would come to."""
    stages = {"result__parallel": {"stages": ["b"], "idle_if_equal": 0.25}}
    plain = over_seeds(tmp_path / "plain", [0.7, 0.7])
    idle = [
        planted(folder, **{"recipe__train__seed": seed, "result__idle_by_stage": each, **stages})
        for seed, (folder, each) in enumerate(
            [(tmp_path / "0", [0.2, 0.4]), (tmp_path / "1", [0.4, 0.6])], 5
        )
    ]
    assert "stages idle" not in shown(plain)
    assert "stages idle for 30%, 50%; equal ones for 25%" in shown(idle)
