"""Trainings on worlds of ranks: all ranks of one agree, and none is done twice."""

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

import firecaffe
from firecaffe import Recipe, Result, TensorDataset
from firecaffe.errors import FirecaffeError
from firecaffe.tasks import Loss
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

R = TypeVar("R", bound=Recipe)


def changed(recipe: R, **sections: Any) -> R:
    """With other sections, or with other words of them, where a section is a dict."""
    whole = {
        name: dataclasses.replace(getattr(recipe, name), **words)
        if isinstance(words, dict)
        else words
        for name, words in sections.items()
    }
    return dataclasses.replace(recipe, **whole)


@dataclasses.dataclass(frozen=True)
class Training:
    """A training of a network in Python, on the ranks that call it."""

    network: Callable[[], nn.Module] = Everything
    samples: int = 100
    validation: int = 0
    loss: Loss | None = None
    data: Callable[[int, int], TensorDataset] = small_data
    """Of so many samples, and a seed."""

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        recipe = changed(recipe, run={"folder": str(folder), "tensorboard": False})
        return firecaffe.train(recipe, **self.parts(), resume=resume)

    def parts(self) -> dict[str, Any]:
        """What is given beside the recipe."""
        sets = {"train_set": self.data(self.samples, 0), "test_set": self.data(30, 1)}
        if self.validation:
            sets["validation_set"] = self.data(self.validation, 2)
        return {"model": self.network, "loss": self.loss, **sets}

    def error(self, recipe: Recipe, folder: Path) -> str:
        """The kind of error that ends it, and what it says; nothing if it comes to its end."""
        try:
            self(recipe, folder)
        except FirecaffeError as error:
            return f"{type(error).__name__}: {error}"
        return ""


class Named(Training):
    """A training of what its recipe names."""

    def parts(self) -> dict[str, Any]:
        return {}


EVERYTHING, NAMED = Training(), Named()


class Trained:
    """What trainings on so many ranks come to. The same one is not done again."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._kept: dict[bytes, Result] = {}

    def __call__(
        self,
        workers: int,
        recipe: Recipe,
        training: Training = EVERYTHING,
        resume: Path | None = None,
    ) -> Result:
        """Rank 0's result, which is that of all; its `folder` is the run's."""
        key = pickle.dumps((workers, recipe, training, resume))
        if key not in self._kept:
            folder = self._folder / str(len(self._kept))
            results = self._ranks.shared(workers, training, recipe, folder, resume)
            assert all(end(each) == end(results[0]) for each in results)
            self._kept[key] = results[0]
        return self._kept[key]


def end(result: Result) -> dict[str, Any]:
    """What no number of workers changes."""
    names = "weights_sha256 state_sha256 loss test_loss metrics validation identity_doubts"
    return {name: getattr(result, name) for name in (*names.split(), "drifted_ranks")}


def checkpoint_of(result: Result, step: int) -> Path:
    """Where a run's checkpoint of a step is."""
    return result.folder / f"checkpoints/step-{step:08}"
