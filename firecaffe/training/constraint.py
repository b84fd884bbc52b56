"""What a training's weights have to obey: masks, and values that weights share.

A constraint changes gradients before an update and weights after it, as a function of what all
workers have alike: the weights, the sums of gradients and the step. So the number of workers
decides no bit of it, and nothing below the training knows of it.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from firecaffe.compression.layers import pruned_weights, shared_weights
from firecaffe.recipe.sections import Recipe
from firecaffe.training.piece import Piece
from firecaffe.training.pruning import Pruning
from firecaffe.training.sharing import Sharing


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

        Raises: RecipeError, on all ranks, if the weights cannot be brought to it.
        """

    def before_update(self, step: int) -> None:
        """Changes the gradients of step `step`, counted from 0, and weights, before the solver has
        them. Gradients are summed and clipped.
        """

    def after_update(self, step: int) -> None:
        """Brings the updated weights back to what they have to obey."""

    def restrict(self, weights: Mapping[str, Tensor]) -> None:
        """Brings other tensors in the weights' place to it, as their moving average."""


def make_constraints(recipe: Recipe, network: nn.Module) -> list[Constraint]:
    """The constraints of a recipe, in the order in which they act.

    Raises: RecipeError, with the layer's name, if the network's weights cannot be had so.
    """
    named = dict(network.named_parameters())
    found: list[Constraint] = []
    if recipe.prune.is_on:
        keep, threshold = pruned_weights(network, recipe.prune)
        weights = {name: named[name] for name in named if name in {**keep, **threshold}}
        found.append(Pruning(weights, keep, threshold, recipe.prune))
    if recipe.share.is_on:
        bits = shared_weights(network, recipe.share)
        weights = {name: named[name] for name in bits}
        found.append(Sharing(weights, bits, recipe.share, recipe.train.seed))
    return found
