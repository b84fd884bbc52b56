"""What can be known of a training before any rank is started: that it can begin, and its length."""

from pathlib import Path

import torch

from firecaffe.data import Data, SampleOrder, check_data, shard_counts
from firecaffe.errors import RecipeError, RunError
from firecaffe.models import build_model
from firecaffe.plan.of_recipe import cluster_for
from firecaffe.recipe.config import check_batch, check_workers
from firecaffe.recipe.identity import identity
from firecaffe.recipe.sections import Recipe, check_recipe
from firecaffe.solvers.optimizer import groups_of
from firecaffe.training.checkpoint import check_identity, load_newest
from firecaffe.training.checks import check_input, check_rates, check_validation
from firecaffe.training.facts import describe_training


def preflight(
    recipe: Recipe, world_size: int, resume: Path | None = None, is_new: bool = True
) -> None:
    """Finds out what can be known before any rank is started. is_new: whether this host cannot be
    one that comes later to a run which goes on.

    Raises: a FirecaffeError of the kind that the training would have met.
    """
    check_recipe(recipe)
    check_workers(recipe.train, world_size, recipe.exchange.level)
    data = check_data(recipe.data)
    check_validation(recipe, data)
    check_rates(recipe, total_steps(recipe, data))
    with torch.device("meta"):
        model = build_model(recipe.model.name, data.train.num_classes, data.train.sample_CHW[0])
    check_input(model, recipe, data.train)
    groups_of(dict(model.named_parameters()), recipe.solver)
    if recipe.train.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("train.device is cuda; this host shows no GPU (use cpu or auto)")
    if is_new and recipe.run.folder and Path(recipe.run.folder).exists():
        raise RunError(
            f"run.folder {recipe.run.folder} exists already; two runs never write into one folder"
        )
    cluster_for(recipe)
    if resume is not None:
        steps = total_steps(recipe, data)
        words = identity(recipe, steps)
        words["the training data"] = describe_training(recipe, data)
        check_identity(load_newest(resume)[0], words, steps)


def total_steps(recipe: Recipe, data: Data) -> int:
    """The steps of the whole training."""
    order = sample_order(recipe, data)
    return recipe.train.num_steps(order.steps_per_epoch)


def sample_order(recipe: Recipe, data: Data) -> SampleOrder:
    """The order of the training's samples. Raises: RecipeError where it cannot be."""
    config = recipe.train
    check_batch(config, len(data.train))
    counts = shard_counts(data.train, recipe.data)
    return SampleOrder(
        config.seed, len(data.train), config.global_batch_size, config.micro_batch_size, counts
    )
