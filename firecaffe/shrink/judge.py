"""What a network is worth: the task's metric on held-out training samples, and on test samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from firecaffe.cluster.world import World
from firecaffe.data import Data, Dataset, open_data
from firecaffe.data.hold_out import SomeOfDataset
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.measure import LOSS, Measure
from firecaffe.tasks import Task
from firecaffe.training.arithmetic import arithmetic
from firecaffe.training.data_workers import data_workers
from firecaffe.training.evaluate import evaluate
from firecaffe.training.given_task import task_for

MOST_TRIED = 2000
"""Held-out samples that layers are tried on, one by one and at many levels."""


@dataclass(frozen=True)
class Worth:
    """A network's metric, as records have it: shares are fractions of 1."""

    test: float
    held_out: float | None
    """None if no training samples are held out."""

    def less(self, after: "Worth", measure: Measure) -> "Worth":
        """What is lost from this to another, in the unit that people read: points of a share. Below
        0 it has gained.
        """

        def lost(one: float, other: float) -> float:
            return measure.scale * (measure.gain(one) - measure.gain(other))

        held_out = None
        if self.held_out is not None and after.held_out is not None:
            held_out = lost(self.held_out, after.held_out)
        return Worth(lost(self.test, after.test), held_out)


@dataclass(frozen=True)
class Judge:
    """Evaluates networks of one recipe, in this process."""

    recipe: Recipe
    world: World
    data: Data
    task: Task

    @property
    def measure(self) -> Measure:
        """The metric that networks are judged by."""
        return self.task.measure

    def worth(self, network: nn.Module) -> Worth:
        """What it is worth. Raises: DataError."""
        held_out = self.data.validation
        return Worth(
            self._value(network, self.data.test),
            None if held_out is None else self._value(network, held_out),
        )

    def tried(self, network: nn.Module) -> float:
        """The same on some of the held-out samples, which must be there, in the unit that people
        read; more is better.
        """
        held_out = self.data.validation
        assert held_out is not None
        if len(held_out) > MOST_TRIED:
            places = torch.linspace(0, len(held_out) - 1, MOST_TRIED).long()
            held_out = SomeOfDataset(held_out, places)
        return self.measure.scale * self.measure.gain(self._value(network, held_out))

    def _value(self, network: nn.Module, part: Dataset) -> float:
        network = network.to(self.world.device)
        words = self.recipe
        found = evaluate(network, self.task, part, words.data, words.train, self.world)
        name = self.measure.name
        return found.loss if name == LOSS.name else found.metrics[name]


@contextmanager
def judging(recipe: Recipe, world: World) -> Iterator[Judge]:
    """The recipe's data, opened for evaluations. Raises: DataError, RecipeError."""
    data = open_data(recipe.data)
    with arithmetic(recipe.train, world.device), data_workers(data):
        yield Judge(recipe, world, data, task_for(recipe, None, None, data.train))
