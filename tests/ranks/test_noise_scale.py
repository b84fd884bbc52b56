"""The gradient noise scale of a training: the same bits on any workers, or None."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from firecaffe import Recipe, Result
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training import outcome
from tests.kit.worlds import Trained, Training, changed, checkpoint_of, end
from tests.ranks.test_invariance import RECIPE

# Of the 5 steps of an epoch, the last one is short.
LONGER = changed(RECIPE, train={"steps": 14}, checkpoint={"every": 7})
STEPS = [step for step in range(2, 15) if step % 5]


@dataclass(frozen=True)
class Measured(Training):
    """A training that measures each step that it can."""

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        with patch.object(outcome, "EVERY", 1):
            return super().__call__(recipe, folder, resume)


MEASURED = Measured()


def scale_of(trained: Trained, workers: int, recipe: Recipe) -> dict[str, Any] | None:
    return trained(workers, recipe, MEASURED).noise_scale


def test_workers_change_no_bit(trained: Trained) -> None:
    """With nodes of the tree apart and not, with other ranks later on, and with a loss scale."""
    alone = trained(1, LONGER, MEASURED)
    assert end(alone) == end(trained(1, LONGER))
    assert alone.noise_scale is not None
    assert alone.noise_scale["steps"] == STEPS
    assert alone.noise_scale["low"] > 0
    two = trained(2, LONGER, MEASURED)
    goes_on = trained(3, LONGER, MEASURED, checkpoint_of(two, 7))
    assert two.noise_scale == goes_on.noise_scale == alone.noise_scale
    assert read_run_file(alone.folder, "result.json")["noise_scale"] == alone.noise_scale
    last = alone.history[STEPS[-1] - 1]
    assert last["noise_scale_low"] == alone.noise_scale["low"]
    # Gradients were clipped above. Their norms are those before.
    for sections in ({"solver": {"clip_gradients": 1e9}}, {"train": {"autocast": "float16"}}):
        recipe = changed(RECIPE, **sections)
        assert scale_of(trained, 2, recipe) == scale_of(trained, 1, recipe) is not None


def test_none_where_it_cannot_be_had(trained: Trained) -> None:
    sections: list[dict[str, dict[str, Any]]] = [
        {"train": {"micro_batch_size": 24}},
        {"exchange": {"compressor": "bfloat16"}},
        {"exchange": {"update_at": "shards"}},
        {"synchrony": {"mode": "local", "replicas": 2, "local_steps": 2, "warm_steps": 5}},
        {"synchrony": {"mode": "backup", "clock": "simulated", "learners": 3, "warm_steps": 5}},
        {"parallel": {"split": {"head": "neurons"}, "parts": 2}},
        {"prune": {"keep": {"*": 0.5}}},
        {"train": {"steps": 4}},
    ]
    assert scale_of(trained, 1, RECIPE) is not None
    for section in sections:
        assert scale_of(trained, 1, changed(RECIPE, **section)) is None, section
