"""A training's data and network: what the recipe names, or what a user brings instead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from firecaffe.comm.world import World
from firecaffe.data import Data, Dataset, check_words, divide, open_data
from firecaffe.data import Parts as DataParts
from firecaffe.errors import DataError
from firecaffe.gradients.combine import Hook
from firecaffe.models import build_model, classification_loss
from firecaffe.recipe import Recipe
from firecaffe.training.arithmetic import seed_random
from firecaffe.training.inject import Injection
from firecaffe.training.step import Loss


@dataclass(frozen=True)
class Parts:
    """What a user may bring instead of what the recipe names."""

    model: Callable[[], nn.Module] | None = None
    loss: Loss = classification_loss
    train: Dataset | None = None
    test: Dataset | None = None
    validation: Dataset | None = None
    comm_hook: tuple[object, Hook] | None = None
    injections: Sequence[Injection] = ()


def open_parts(recipe: Recipe, parts: Parts) -> Data:
    """The data of a training. Raises: DataError."""
    if parts.train is None and parts.test is None and parts.validation is None:
        return open_data(recipe.data)
    if parts.train is None or parts.test is None:
        raise DataError("train_set and test_set come together; one of them is missing")
    for name, dataset in (("train_set", parts.train), ("test_set", parts.test)):
        if len(dataset) == 0:
            raise DataError(f"{name} holds no sample")
    check_words(recipe.data)
    return divide(DataParts(parts.train, parts.test, parts.validation), recipe.data)


def build_network(recipe: Recipe, parts: Parts, data: Data, world: World) -> nn.Module:
    """The network with its first weights, on this rank's device."""
    seed_random(recipe.train.seed, "weights")
    if parts.model is None:
        shape = data.train.sample_CHW
        model = build_model(recipe.model.name, data.train.num_classes, shape[0])
    else:
        model = parts.model()
    model.to(world.device)
    if recipe.train.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model
