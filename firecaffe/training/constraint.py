"""What a training's weights have to obey: masks, and values that weights share.

A constraint changes the gradients of the weights that this rank updates before an update, and these
weights after it, as a function of weights, sums of gradients and the step. It goes by whole layers,
however they lie on ranks (`Wholes`). So the number of workers decides no bit of it, and nothing
below the training knows of it.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from firecaffe.compression.layers import pruned_weights, shared_weights
from firecaffe.recipe.sections import Recipe
from firecaffe.training.piece import Piece
from firecaffe.training.pruning import Pruning
from firecaffe.training.sharing import Sharing
from firecaffe.training.wholes import AllHere, Wholes


class Constraint(Protocol):
    """Keeps weights to what they have to obey."""

    @property
    def pieces(self) -> dict[str, Piece]:
        """Its state, by the names that the pieces have in a checkpoint."""

    @property
    def line(self) -> str:
        """What it has come to so far, for people."""

    def begin(self) -> None:
        """Makes its state from a new training's first weights, and brings them to it. A resumed
        training loads its pieces instead.

        Raises: RecipeError, on all ranks that have a part of the layer, if the weights cannot be
        brought to it.
        """

    def before_update(self, step: int) -> None:
        """Changes the gradients of step `step`, counted from 0, and weights, before the solver has
        them. Gradients are summed and clipped.
        """

    def after_update(self, step: int) -> None:
        """Brings the updated weights back to what they have to obey."""

    def restrict(self, weights: Mapping[str, Tensor]) -> None:
        """Brings other tensors in the weights' place to it, as their moving average."""


def check_constraints(recipe: Recipe, network: nn.Module) -> None:
    """Raises: RecipeError, with the layer's name, if the network's weights cannot be had so."""
    make_constraints(recipe, dict(network.named_parameters()), {}, AllHere())


def make_constraints(
    recipe: Recipe,
    network: Mapping[str, nn.Parameter],
    own: Mapping[str, nn.Parameter],
    wholes: Wholes,
) -> list[Constraint]:
    """The constraints of a recipe, in the order in which they act.

    Args:
        network: The whole network's parameters, by their names.
        own: Those that this rank updates, or parts of them.
        wholes: How they come together.

    Raises: RecipeError, with the layer's name, if the network's weights cannot be had so.
    """
    found: list[Constraint] = []
    if recipe.prune.is_on:
        keep, threshold = pruned_weights(network, recipe.prune)
        pruned = {n: each for n, each in own.items() if wholes.name(n) in {**keep, **threshold}}
        found.append(Pruning(pruned, keep, threshold, recipe.prune, wholes))
    if recipe.share.is_on:
        bits = shared_weights(network, recipe.share)
        shared = {n: each for n, each in own.items() if wholes.name(n) in bits}
        found.append(Sharing(shared, bits, recipe.share, recipe.train.seed, wholes))
    return found
