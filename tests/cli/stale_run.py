"""A short run with a server under the simulated clock, for commands that compute it once more."""

from pathlib import Path

import firecaffe
from firecaffe import DataConfig, ModelConfig, Recipe, RunConfig, SynchronyConfig, TrainConfig

WORDS = SynchronyConfig("stale", clock="simulated", learners=3, speeds="one_slow", warm_steps=1)


def train_stale(folder: Path) -> Path:
    """Trains three steps, the first of them synchronous, and returns the run's folder."""
    recipe = Recipe(
        model=ModelConfig("lenet"),
        data=DataConfig("generated"),
        train=TrainConfig(32, 8, steps=3, eval_batch_size=1000),
        run=RunConfig(folder=str(folder), tensorboard=False),
        synchrony=WORDS,
    )
    firecaffe.train(recipe)
    return folder
