"""The words of a recipe that decide bits, the digest that a search ends in, and a recipe's file."""

import dataclasses
import hashlib
import json
from typing import Any

import tomli_w

from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import REFERENCES, without_folder
from firecaffe.solvers.policy import OVER_THE_TRAINING
from firecaffe.synchrony.config import EVERY_STEP, LOCAL

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
    """The words that decide bits, by dotted name: a run may only be resumed with the same.

    Workers, buckets, exchange, checkpoints and paths are not among them. A compressor is, and the
    planned number of steps, if the learning rate depends on it, or, with a server, who waits at the
    end, or, with replicas, when they are averaged.
    """
    sections = ("model", "data", "train", "solver", "task")
    words = {
        name: without_folder(value) if name in REFERENCES else value
        for name, value in flatten(recipe).items()
        if name.split(".")[0] in sections and name not in _FREE_WORDS
    }
    words["exchange.compressor"] = recipe.exchange.compressor
    if recipe.exchange.compressor != NO_COMPRESSOR:
        words["exchange.compressor_level"] = recipe.exchange.compressor_level
    if recipe.parallel.is_split:
        words["parallel.split"] = recipe.parallel.split
        words["parallel.parts"] = recipe.parallel.num_parts
        if not recipe.parallel.split:  # it says which layers are
            words["parallel.scheme"] = recipe.parallel.scheme
    for section, is_on in (("prune", recipe.prune.is_on), ("share", recipe.share.is_on)):
        if is_on:
            words |= _words_of(recipe, section)
    synchrony = recipe.synchrony
    ends_matter = synchrony.is_served or (
        synchrony.mode == LOCAL
        and (synchrony.overlap_steps or synchrony.growth_coefficient or synchrony.fragments > 1)
    )
    if recipe.solver.lr_policy in OVER_THE_TRAINING or ends_matter:
        words["train.steps"] = steps
    if synchrony.mode != EVERY_STEP:
        words |= _words_of(recipe, "synchrony")
    return words


def _words_of(recipe: Recipe, section: str) -> dict[str, Any]:
    """A section's words that decide bits."""
    return {
        name: value
        for name, value in flatten(recipe).items()
        if name.startswith(f"{section}.") and name not in _FREE_WORDS
    }


def search_id(recipe: Recipe) -> str:
    """The digest of a recipe that a search has ended in: 12 hexadecimal digits for all words that
    decide bits but the seed, and for the training's length. Words that have their default do not
    count, so that a later version's new ones make no other recipe of it.
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
    """The search that the learning rate is from; empty if the recipe was changed since."""
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
