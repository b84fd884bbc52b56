"""A whole run as data: the Configs of all parts, composed, and what of them decides bits."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from firecaffe.data import DataConfig
from firecaffe.errors import RecipeError
from firecaffe.exchange.leaves import num_nodes
from firecaffe.gradients.config import NO_COMPRESSOR, ExchangeConfig, check_exchange, level_of
from firecaffe.models.config import ModelConfig
from firecaffe.runs.folder import RunConfig
from firecaffe.training.config import (
    CheckpointConfig,
    SolverConfig,
    TrainConfig,
    check_checkpoint,
    check_train,
)
from firecaffe.training.learning_rate import check_policy
from firecaffe.words import check_kinds


@dataclass(frozen=True)
class Recipe:
    """One training, in sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)


def check_recipe(recipe: Recipe) -> None:
    """Checks what can be known from the words alone.

    Raises: RecipeError with the dotted name of the word, what was found, and what would be right.
    """
    # Optimizers load torch, which the meaning of a recipe's words does not need.
    from firecaffe.training.solver import check_solver

    check_kinds(recipe)
    check_train(recipe.train)
    check_solver(recipe.solver)
    check_policy(recipe.solver)
    check_exchange(recipe.exchange)
    if recipe.exchange.compressor != NO_COMPRESSOR and recipe.train.autocast == "float16":
        raise RecipeError(
            f"exchange.compressor {recipe.exchange.compressor} with train.autocast float16: the "
            "loss scale changes between steps, what a codec has kept back would not; use bfloat16"
        )
    level, leaves = level_of(recipe.exchange), recipe.train.num_micro_batches
    if level and num_nodes(leaves, level - 1) == 1:
        raise RecipeError(
            f"exchange.compressor_level is {level}, but the tree over {leaves} micro-batches "
            f"ends at level {(leaves - 1).bit_length()}"
        )
    check_checkpoint(recipe.checkpoint)


_FREE_WORDS = (
    "data.path",
    "train.device",
    "train.eval_every",
    "data.decode_threads",
    "data.cache",
    "data.cache_bytes",
    "train.eval_batch_size",
    "train.steps",
    "train.epochs",
)


def identity(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The words that decide bits, by dotted name: a run may only be resumed with the same.

    Workers, buckets, exchange, checkpoints and paths are not among them. A compressor is, and the
    planned number of steps, where the learning rate depends on it.
    """
    sections = ("model", "data", "train", "solver")
    words = {
        name: value
        for name, value in flatten(recipe).items()
        if name.split(".")[0] in sections and name not in _FREE_WORDS
    }
    words["exchange.compressor"] = recipe.exchange.compressor
    if recipe.exchange.compressor != NO_COMPRESSOR:
        words["exchange.compressor_level"] = recipe.exchange.compressor_level
    if recipe.solver.lr_policy in ("poly", "cosine"):
        words["train.steps"] = steps
    return words


def search_id(recipe: Recipe) -> str:
    """Of a recipe that a search has ended in: 12 hexadecimal digits for all words that decide bits
    but the seed, and for the training's length. Words that have their default do not count, so that
    a later version's new ones make no other recipe of it.
    """
    deciding = {*identity(recipe, recipe.train.steps), "train.steps", "train.epochs"}
    defaults, found = flatten(Recipe()), flatten(recipe)
    if found["train.steps"] or found["train.epochs"] == 1:
        found["train.epochs"] = 0  # one epoch is what is meant where nothing is said
    words = {
        word: found[word] for word in deciding - {"train.seed"} if found[word] != defaults[word]
    }
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:12]


def tuned_by(recipe: Recipe) -> str:
    """The search that the learning rate is from; empty where the recipe was changed since."""
    return recipe.run.tuned if recipe.run.tuned.endswith(search_id(recipe)) else ""


def flatten(recipe: Recipe) -> dict[str, Any]:
    """All words of a recipe by dotted name."""
    return {
        f"{section}.{word}": value
        for section, words in dataclasses.asdict(recipe).items()
        for word, value in words.items()
    }


def to_toml(recipe: Recipe) -> str:
    """The recipe as a file that `firecaffe train` reads."""
    return tomli_w.dumps(dataclasses.asdict(recipe))
