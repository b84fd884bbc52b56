"""What the first round begins with: the trained network, or that in lower rank."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from firecaffe.data import Data
from firecaffe.errors import RecipeError
from firecaffe.files import written_aside
from firecaffe.models.low_rank import chosen_ranks, low_rank_weights, rank_of
from firecaffe.models.network import make_network
from firecaffe.models.weights import load_weights
from firecaffe.recipe.sections import Recipe
from firecaffe.shrink.scheme import Scheme
from firecaffe.training.first_weights import find_weights
from firecaffe.training.parts import counts_of

FILE = "0-low_rank.safetensors"
"""The weights in lower rank, in the folder of the rounds."""


def trained_network(recipe: Recipe, data: Data) -> nn.Module:
    """The network as it was trained. Raises: RecipeError if not all of it is there."""
    network = make_network(recipe.model, *counts_of(data.train)).eval()
    found = load_weights(network, find_weights(recipe.model.weights)[0])
    if found.missing or found.reshaped:
        raise RecipeError(f"{found.line}; expected all to fit")
    return network


def ranks_of(scheme: Scheme, network: nn.Module) -> Mapping[str, int]:
    """The rank of each layer that the scheme has in two, by its name. A layer whose two would have
    no fewer weights stays whole.

    Raises: RecipeError if a pattern matches no layer, or a layer cannot be had so.
    """
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
    """The recipe of the network in lower rank. weights: where its own are.

    Raises: RecipeError if the run has layers in lower rank already.
    """
    if not ranks:
        return recipe
    if recipe.model.low_rank:
        raise RecipeError(
            "low_rank: the network has model.low_rank already; leave the scheme's out"
        )
    return replace(recipe, model=replace(recipe.model, low_rank=dict(ranks), weights=weights))


def write_start(network: nn.Module, ranks: Mapping[str, int], folder: Path) -> str:
    """Decomposes a network's layers. Returns the file of the weights."""
    weights = low_rank_weights(network.state_dict(), ranks)
    path = folder / FILE
    with written_aside(path) as aside:
        save_file({name: each.contiguous() for name, each in weights.items()}, aside)
    return str(path)
