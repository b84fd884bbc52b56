"""The settings that decide bits, the digest of a search's result, and a recipe as a file."""

import dataclasses
import hashlib
import json
from typing import Any

import tomli_w

from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.rate_policy import LENGTH_DEPENDENT
from firecaffe.synchrony.config import EVERY_STEP
from firecaffe.user_code import REFERENCES, without_folder

_FREE_WORDS = (
    "data.path",
    "task.metrics",
    "task.metric",
    "train.device",
    "train.eval_every",
    "train.stop_after",
    "data.decode_threads",
    "data.cache",
    "data.cache_bytes",
    "train.eval_batch_size",
    "train.steps",
    "train.epochs",
    "synchrony.shares",
    "synchrony.shares_every",
    "synchrony.in_flight",
    "synchrony.server",
)


def identity(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Return the settings that decide bits, by dotted name. A run is only resumed with equal ones.

    Workers, exchange, checkpoints and paths are none. A compressor is one, as is the number of
    steps if the rate, the last workers of a server, or the averages of replicas depend on it.
    """
    synchrony = recipe.synchrony
    optional = {
        "prune": recipe.prune.is_on,
        "share": recipe.share.is_on,
        "synchrony": synchrony.mode != EVERY_STEP,
    }
    sections = {"model", "data", "train", "solver", "task"}
    sections |= {section for section, is_on in optional.items() if is_on}
    settings = {
        name: without_folder(value) if name in REFERENCES else value
        for name, value in flatten(recipe).items()
        if name.split(".")[0] in sections and name not in _FREE_WORDS
    }
    settings["exchange.compressor"] = recipe.exchange.compressor
    if recipe.exchange.compressor != NO_COMPRESSOR:
        settings["exchange.compressor_level"] = recipe.exchange.compressor_level
    if recipe.parallel.is_split:
        settings["parallel.split"] = recipe.parallel.split
        settings["parallel.parts"] = recipe.parallel.num_parts
        if not recipe.parallel.split:  # parallel.split names the layers, if set
            settings["parallel.scheme"] = recipe.parallel.scheme
    if recipe.solver.lr_policy in LENGTH_DEPENDENT or synchrony.depends_on_last_step:
        settings["train.steps"] = steps
    return settings


def search_id(recipe: Recipe) -> str:
    """Return the digest of a search's result, without the seed: 12 hexadecimal digits.

    It covers the length, and non-default settings that decide bits: new settings change nothing.
    """
    deciding = {*identity(recipe, recipe.train.steps), "train.steps", "train.epochs"}
    defaults, settings = flatten(Recipe()), flatten(recipe)
    if settings["train.steps"] or settings["train.epochs"] == 1:
        settings["train.epochs"] = 0  # one epoch is the default if neither is set
    changed = {
        word: settings[word]
        for word in deciding - {"train.seed"}
        if settings[word] != defaults[word]
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


def tuned_by(recipe: Recipe) -> str:
    """The search that the learning rate is from; empty if the recipe was changed since."""
    return recipe.run.tuned if recipe.run.tuned.endswith(search_id(recipe)) else ""


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Return all settings of a recipe by dotted name."""
    return {
        f"{section}.{word}": value
        for section, config in vars(recipe).items()
        for word, value in vars(config).items()
    }


def to_toml(recipe: Recipe) -> str:
    return tomli_w.dumps(dataclasses.asdict(recipe))
