"""Small trainings: points around corners, images of two classes, recipes, and what runs leave."""

import json
from ast import literal_eval
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_type_hints

import torch
from torch import nn

import firecaffe
from firecaffe import Recipe, Result, TensorDataset
from firecaffe.cluster.world import World
from firecaffe.data import Batch
from firecaffe.data.batches import TrainBatches

ALONE = World(0, 1, torch.device("cpu"))
SECTIONS = get_type_hints(Recipe)


def data(count: int, seed: int) -> TensorDataset:
    """Four classes of points around corners."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    corners = torch.stack([labels % 2 * 2 - 1, labels // 2 * 2 - 1], 1).float()
    return TensorDataset(corners + 0.4 * torch.randn(count, 2, generator=generator), labels)


def images(count: int, seed: int) -> TensorDataset:
    """Two classes of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)
    return TensorDataset(pixels, torch.arange(count) % 2, 2)


def before_each(batches: TrainBatches, act: Callable[[int, int], object]) -> TrainBatches:
    """Batches. act: what is done before one is taken, of its step and its micro-batch."""

    def train_batch(step: int, leaf: int) -> Batch:
        act(step, leaf)
        return batches.train_batch(step, leaf)

    return cast(TrainBatches, SimpleNamespace(order=batches.order, train_batch=train_batch))


def network() -> nn.Module:
    """For points."""
    layers = nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def words_of(text: str) -> dict[str, Any]:
    """{"train.steps": 3, "data.name": "own"} of `train.steps=3 data.name=own`: values as Python
    writes them, without spaces, and all else as text.
    """
    words: dict[str, Any] = {}
    for word, _, value in (pair.partition("=") for pair in text.split()):
        try:
            words[word] = float(value) if value == "nan" else literal_eval(value)
        except (SyntaxError, ValueError):
            words[word] = value
    return words


def recipe_with(words: Mapping[str, Any] | str, recipe: Recipe | None = None) -> Recipe:
    """The recipe, or that of all defaults, with other values: of words, or as `words_of` reads."""
    recipe = recipe or Recipe()
    for word, value in (words_of(words) if isinstance(words, str) else words).items():
        recipe = recipe.replace(word, value)
    return recipe


def recipe_in(folder: Path, words: str = "", **sections: dict[str, Any]) -> Recipe:
    """A recipe of words, as `words_of` reads them or by section, of a run in a folder."""
    run = {"folder": str(folder), "tensorboard": False, **sections.pop("run", {})}
    given = {**sections, "run": run}
    return recipe_with(words, Recipe(**{name: SECTIONS[name](**given[name]) for name in given}))


EVERY_STEP = {"mode": "every_step"}

POINTS = """
train.global_batch_size=32 train.micro_batch_size=4 data.hold_out=0.1 solver.base_lr=0.05
solver.momentum=0.5 solver.weight_decay=1e-4 checkpoint.every=7 checkpoint.keep_last=0
"""


def recipe_of_points(folder: Path, words: dict[str, Any], **train: Any) -> Recipe:
    """words: of [synchrony], and the compressor; by default of five learners of random speeds."""
    served = {"clock": "simulated", "learners": 5, "speeds": "gamma", "spread": 0.5, **words}
    exchange, length = {"compressor": served.pop("compressor", "none")}, {"steps": 40, **train}
    sections = {"exchange": exchange, "synchrony": served, "train": {"seed": 1, **length}}
    return recipe_in(folder, POINTS, **sections)


def fit_points(recipe: Recipe, resume: Path | None = None, **more: Any) -> Result:
    """Trains on 300 points, or on what `more` says."""
    parts = {"model": network, "train_set": data(300, 0), "test_set": data(100, 1), **more}
    return firecaffe.train(recipe, **parts, resume=resume)


def rows_of(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Those of these kinds of metrics.jsonl."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] in kinds]


def record_of(folder: Path) -> dict[str, Any]:
    """The run's result.json."""
    record: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return record
