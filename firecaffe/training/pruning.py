"""Weights that are pruned stay zero: a constraint of a training."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from firecaffe.compression.config import ADAPTIVE, GRADUAL, LAYER, MAGNITUDE, SURGERY, PruneConfig
from firecaffe.compression.layers import BIAS
from firecaffe.compression.prune import (
    above,
    above_with_hold,
    adaptive,
    count_of,
    kept_share,
    largest,
    largest_of_all,
    threshold_of,
    with_hold,
)
from firecaffe.errors import RecipeError
from firecaffe.training.piece import Piece
from firecaffe.training.weights import Weights
from firecaffe.training.wholes import Wholes


class Pruning:
    """The masks of the weights that are pruned, and when they change; see `Constraint`.

    With surgery the network computes with the masked weights, and the solver updates `dense`, the
    weights without masks, by the gradients of the masked ones.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        keep: Mapping[str, float],
        threshold: Mapping[str, float],
        words: PruneConfig,
        wholes: Wholes,
    ) -> None:
        """weights: those that this rank updates, or parts of them. keep, threshold: by the names of
        whole weights; each that is pruned is in one of them.
        """
        self._weights, self._keep, self._threshold = weights, keep, threshold
        self._words, self._wholes = words, wholes
        self.masks = {
            name: torch.ones_like(each, dtype=torch.bool) for name, each in weights.items()
        }
        """True where a weight is kept."""
        self.dense: dict[str, Tensor] = {}
        """With surgery, the weights that masked ones are made of."""
        if words.how == SURGERY:
            self.dense = {name: each.detach().clone() for name, each in weights.items()}

    @property
    def pieces(self) -> dict[str, Piece]:
        pieces: dict[str, Piece] = {"mask": Weights(self.masks.items)}
        if self._words.how == SURGERY:  # also if this rank has none
            pieces["dense"] = Weights(self.dense.items)
        return pieces

    @property
    def line(self) -> str:
        found = [(int(m.sum()), m.numel()) for _, m in self._wholes.one_by_one(self.masks)]
        kept, of = sum(some for some, _ in found), sum(each for _, each in found)
        return f"prune: {kept} of {of} weights of {len(found)} layers are kept"

    @torch.no_grad()
    def begin(self) -> None:
        for name, each in self._wholes.of_own(self._weights).items():
            if not each.any() and not name.endswith(BIAS):
                layer = name.rpartition(".")[0]
                raise RecipeError(
                    f"prune: the weights of {layer} are all zero at the start, of which none "
                    "would be kept; leave it out of the pattern"
                )
        for name, dense in self.dense.items():
            dense.copy_(self._weights[name])
        self._choose(0)
        self.restrict(self._weights)

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        for name, weight in self._weights.items():
            if self._may_return(step):
                weight.copy_(self.dense[name])
            elif weight.grad is not None:
                weight.grad.masked_fill_(~self.masks[name], 0)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        done = step + 1
        if self._may_return(step):
            for name, weight in self._weights.items():
                self.dense[name].copy_(weight)
        is_due = done % self._words.every == 0 or done == self._words.steps
        if self._words.how != MAGNITUDE and done <= self._words.steps and is_due:
            self._choose(done)
        self.restrict(self._weights)

    @torch.no_grad()
    def restrict(self, weights: Mapping[str, Tensor]) -> None:
        for name, mask in self.masks.items():
            weights[name].masked_fill_(~mask, 0)

    def _may_return(self, step: int) -> bool:
        return self._words.how == SURGERY and step < self._words.steps

    def _choose(self, done: int) -> None:
        """Chooses the weights that are kept after so many steps."""
        found = {}
        whole = self._wholes.of_own if self._words.scope == LAYER else self._wholes.of_all
        may_return = self._words.how == SURGERY
        weights = whole(self.dense if may_return else self._weights)
        masks = whole(self.masks) if may_return else {}
        scores = {name: weights[name].abs() for name in self._keep if name in weights}
        if may_return:
            scores = {name: with_hold(each, masks[name]) for name, each in scores.items()}
        counts = {
            name: count_of(self._share(name, done), each.numel()) for name, each in scores.items()
        }
        if self._words.scope == ADAPTIVE:
            scores = {name: adaptive(each) for name, each in scores.items()}
        if self._words.scope != LAYER:
            found = largest_of_all(scores, sum(counts.values()))
        else:
            found = largest(scores, counts)
        for name, deviations in self._threshold.items():
            if name not in weights:
                continue
            weight, threshold = weights[name], threshold_of(weights[name], deviations)
            if may_return:
                found[name] = above_with_hold(weight, threshold, masks[name])
            else:
                found[name] = above(weight, threshold)
        for name, mask in found.items():
            if not mask.any() and not name.endswith(BIAS):
                raise RecipeError(_none_left(name, self._threshold.get(name)))
        self._wholes.put(found, self.masks)

    def _share(self, name: str, done: int) -> float:
        keep = self._keep[name]
        return kept_share(keep, done, self._words.steps) if self._words.how == GRADUAL else keep


def _none_left(name: str, deviations: float | None) -> str:
    layer = name.rpartition(".")[0]
    if deviations is None:
        return (
            f"prune.scope all keeps no weight of {layer}, for those of other layers are larger; "
            "leave it out of the patterns, or say prune.scope adaptive"
        )
    return f"prune.threshold {deviations:g} keeps no weight of {layer}; take a smaller one"
