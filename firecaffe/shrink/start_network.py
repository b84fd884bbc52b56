"""The start of a compression: its target, and the trained network, possibly in lower rank."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Literal

from safetensors.torch import save_file
from torch import nn

from firecaffe.compression.transfer import BYTES_PER_WEIGHT
from firecaffe.data import Data
from firecaffe.errors import RecipeError, RunError
from firecaffe.files import written_aside
from firecaffe.models.low_rank import chosen_ranks, low_rank_weights, rank_of
from firecaffe.models.network import make_network
from firecaffe.models.weights import load_weights
from firecaffe.recipe.recorded_recipe import RECIPE
from firecaffe.recipe.sections import Recipe
from firecaffe.shrink.scheme import Scheme
from firecaffe.training.checkpoint import BEST
from firecaffe.training.given_parts import counts_of
from firecaffe.training.load import find_weights, run_of

FILE = "0-low_rank.safetensors"


def trained_network(recipe: Recipe, data: Data) -> nn.Module:
    """Load the trained network. Raises RecipeError if a weight is missing or does not fit."""
    network = make_network(recipe.model, *counts_of(data.train)).eval()
    loaded = load_weights(network, find_weights(recipe.model.weights)[0])
    if loaded.missing or loaded.reshaped:
        raise RecipeError(f"{loaded.line}; expected all to fit")
    return network


def ranks_of(scheme: Scheme, network: nn.Module) -> Mapping[str, int]:
    """Return the rank of each layer that shrinks if split in two. Raises RecipeError."""
    if "rank" in scheme.low_rank:
        return chosen_ranks(network, scheme.low_rank["rank"])
    ranks: dict[str, int] = {}
    for pattern, energy in scheme.low_rank.get("energy", {}).items():
        for layer in chosen_ranks(network, {pattern: 1}):
            weight = network.get_parameter(f"{layer}.weight")
            rank = rank_of(weight, energy)
            outputs, inputs = weight.flatten(1).shape
            ranks.pop(layer, None)
            if rank * (outputs + inputs) < outputs * inputs:
                ranks[layer] = rank
    return ranks


def with_ranks(recipe: Recipe, ranks: Mapping[str, int], weights: str) -> Recipe:
    """Return the recipe of the network in lower rank. Raises RecipeError if it has some already."""
    if not ranks:
        return recipe
    if recipe.model.low_rank:
        raise RecipeError(
            "low_rank: the network has model.low_rank already; leave the scheme's out"
        )
    return replace(recipe, model=replace(recipe.model, low_rank=dict(ranks), weights=weights))


def write_start(network: nn.Module, ranks: Mapping[str, int], folder: Path) -> str:
    """Decompose a network's layers, write the weights, and return their file."""
    weights = low_rank_weights(network.state_dict(), ranks)
    path = folder / FILE
    with written_aside(path) as aside:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, aside)
    return str(path)


def recipe_of_run(where: Path, recipe: Recipe, best: bool) -> Recipe:
    """Return a finished run's recipe with its weights. Raises RunError, RecipeError.

    `where` is the run's folder, a checkpoint in it, or a file of weights there.
    """
    folder = run_of(where)
    if folder is None:
        raise RunError(f"{where}: no {RECIPE}; this is no run folder")
    if not (folder / "result.json").is_file():
        raise RunError(
            f"{folder}: has not finished; firecaffe train {folder / RECIPE} --resume {folder}"
        )
    if best and where != folder:
        raise RecipeError(f"--best is asked of a run's folder; {where} is one checkpoint of it")
    weights = folder / "checkpoints" / BEST if best else where
    return replace(recipe, model=replace(recipe.model, weights=str(weights)))


def check_weights(recipe: Recipe, file: Path) -> None:
    if not recipe.model.weights:
        raise RecipeError(
            f"{file}: model.weights is empty; compress takes a finished run, or a recipe whose "
            "model.weights are those of a trained network"
        )


UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

EXPECTED = "expected a ratio (40x), a size (27KB) or the accuracy that may be lost (0.1points)"


@dataclass(frozen=True)
class Target:
    """The target of a compression: a ratio, a size, or the points that may be lost."""

    word: str
    kind: Literal["ratio", "bytes", "points"]
    value: float

    @property
    def is_of_size(self) -> bool:
        return self.kind != "points"

    def most_bytes(self, weights: int) -> float:
        """Return the requested size for a network of so many weights."""
        return self.value if self.kind == "bytes" else weights * BYTES_PER_WEIGHT / self.value


def parse_target(word: str) -> Target:
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]+)\s*", word)
    if match is None:
        raise RecipeError(f"--target is {word!r}; {EXPECTED}")
    value, unit = float(match[1]), match[2].upper()
    if not isfinite(value):
        raise RecipeError(f"--target is {word:.20}…, which is too large a number; {EXPECTED}")
    if unit == "X":
        if value <= 1:
            raise RecipeError(f"--target is {word}; a ratio must be more than 1")
        return Target(word, "ratio", value)
    if unit in ("POINT", "POINTS"):
        return Target(word, "points", value)
    if unit not in UNITS:
        raise RecipeError(f"--target is {word!r}, in an unknown unit; {EXPECTED}")
    if value * UNITS[unit] < 1:
        raise RecipeError(f"--target is {word}; a size must be at least one byte")
    return Target(word, "bytes", value * UNITS[unit])
