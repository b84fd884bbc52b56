"""Constraints on a training's weights: pruned ones stay zero, and shared ones have few values.

A constraint changes gradients before an update and weights after it, as a function of weights,
summed gradients and the step. It acts on whole layers (`Wholes`), however many workers hold them.

A shared value's gradient is the sum, or the mean, of its weights' gradients. Each of these weights
receives it, so an element-wise solver updates them all as it would update the value: with one
momentum, and weight decay once. Source: Han, Mao and Dally 2016, arXiv 1510.00149, section 3.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from firecaffe.compression import (
    ADAPTIVE,
    GRADUAL,
    LAYER,
    MAGNITUDE,
    SURGERY,
    PruneConfig,
    ShareConfig,
)
from firecaffe.compression.prune_and_share import (
    BIAS,
    above,
    adaptive,
    count_of,
    hysteresis_mask,
    kept_share,
    largest,
    largest_of_all,
    pruned_weights,
    rows_of_directions,
    share,
    shared_weights,
    threshold_of,
    with_each_row,
    with_hysteresis,
)
from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe
from firecaffe.training.forward import key_of
from firecaffe.training.piece import LocalWholes, Piece, Weights, Wholes


class Pruning:
    """The masks of pruned weights, and when they change; implements `Constraint`.

    With surgery the network computes with masked weights, and the solver updates `dense`, the
    weights without masks, by the gradients of the masked ones.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        keep: Mapping[str, float],
        threshold: Mapping[str, float],
        rows: Mapping[str, tuple[int, ...]],
        words: PruneConfig,
        wholes: Wholes,
    ) -> None:
        # weights: those that this rank updates, or parts of them. The others have whole weights'
        # names as keys. Each pruned weight is in keep or threshold. rows: see rows_of_directions.
        self._weights, self._keep, self._threshold = weights, keep, threshold
        self._rows = rows
        self._words, self._wholes = words, wholes
        # True where a weight is kept
        self.masks = {n: torch.ones_like(w, dtype=torch.bool) for n, w in weights.items()}
        # with surgery: the weights without masks
        self.dense: dict[str, Tensor] = {}
        if words.how == SURGERY:
            self.dense = {name: weight.detach().clone() for name, weight in weights.items()}

    @property
    def pieces(self) -> dict[str, Piece]:
        pieces: dict[str, Piece] = {"mask": Weights(self.masks.items)}
        if self._words.how == SURGERY:  # even if this rank has none
            pieces["dense"] = Weights(self.dense.items)
        return pieces

    @property
    def line(self) -> str:
        counts = [(int(m.sum()), m.numel()) for _, m in self._wholes.one_by_one(self.masks)]
        kept, of = sum(some for some, _ in counts), sum(count for _, count in counts)
        return f"prune: {kept} of {of} weights of {len(counts)} layers are kept"

    @torch.no_grad()
    def begin(self) -> None:
        for name, weight in self._wholes.of_own(self._weights).items():
            if not weight.any() and not name.endswith(BIAS):
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
        whole = self._wholes.of_own if self._words.scope == LAYER else self._wholes.of_all
        may_return = self._words.how == SURGERY
        weights = whole(self.dense if may_return else self._weights)
        masks = whole(self.masks) if may_return else {}
        scores = {name: weights[name].abs() for name in self._keep if name in weights}
        if may_return:
            scores = {name: with_hysteresis(score, masks[name]) for name, score in scores.items()}
        counts = {n: count_of(self._share(n, done), score.numel()) for n, score in scores.items()}
        if self._words.scope == ADAPTIVE:
            scores = {name: adaptive(score) for name, score in scores.items()}
        if self._words.scope != LAYER and scores:
            chosen = largest_of_all(scores, sum(counts.values()))
        else:
            chosen = {name: largest(score, counts[name]) for name, score in scores.items()}
        for name, deviations in self._threshold.items():
            if name not in weights:
                continue
            weight, threshold = weights[name], threshold_of(weights[name], deviations)
            if may_return:
                chosen[name] = hysteresis_mask(weight, threshold, masks[name])
            else:
                chosen[name] = above(weight, threshold)
        for name, mask in chosen.items():
            if not mask.any() and not name.endswith(BIAS):
                raise RecipeError(_none_left(name, self._threshold.get(name)))
            if name in self._rows:
                chosen[name] = with_each_row(mask, weights[name], self._rows[name])
        self._wholes.put(chosen, self.masks)

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


class Sharing:
    """The codes of the weights that share values; implements `Constraint`. Code 0 means zero."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        bits: Mapping[str, int],
        words: ShareConfig,
        seed: int,
        wholes: Wholes,
    ) -> None:
        # weights: those that this rank updates, or parts of them. bits: by whole weights' names.
        # seed: for a random start.
        self._weights, self._bits, self._words, self._seed = weights, bits, words, seed
        self._wholes = wholes
        # the values by code before the first update, if they are not trained
        self._fixed: dict[str, Tensor] | None = None
        self.codes = {n: torch.zeros_like(w, dtype=torch.int32) for n, w in weights.items()}

    @property
    def pieces(self) -> dict[str, Piece]:
        return {"code": Weights(self.codes.items)}

    @property
    def line(self) -> str:
        codes = (of_layer.flatten() for _, of_layer in self._wholes.one_by_one(self.codes))
        counts = [code.bincount()[1:] for code in codes]
        weights = sum(int(count.sum()) for count in counts)
        values = sum(int(count.count_nonzero()) for count in counts)
        layers = len(counts)
        return f"share: {weights} weights that are not zero of {layers} layers have {values} values"

    @torch.no_grad()
    def begin(self) -> None:
        codes, shared = dict[str, Tensor](), dict[str, Tensor]()
        for name, weight in self._wholes.of_own(self._weights).items():
            if not weight.any() and not name.endswith(BIAS):
                raise RecipeError(
                    f"share: the weights of {name.rpartition('.')[0]} are all zero at the start; "
                    "leave it out of the pattern"
                )
            chance = torch.Generator().manual_seed(key_of(self._seed, "share", name))
            codes[name], values = share(weight, self._bits[name], self._words.start, chance)
            shared[name] = values[codes[name].long()].to(weight)
        self._wholes.put(codes, self.codes)
        self._wholes.put(shared, self._weights)

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        codes = self._codes  # all ranks assemble them together, even one that has none
        if not self._words.train:
            if self._fixed is None:
                local_weights = {name: weight.detach() for name, weight in self._weights.items()}
                self._fixed = self._values(local_weights)
            return
        gradients = {n: w.grad for n, w in self._weights.items() if w.grad is not None}
        whole = self._wholes.of_own(gradients)
        shared = {n: self._shared(n, codes[n].reshape(-1), g) for n, g in whole.items()}
        self._wholes.put(shared, gradients)

    def _shared(self, name: str, codes: Tensor, gradient: Tensor) -> Tensor:
        sums = torch.zeros(len(self._firsts[name]) + 1, dtype=torch.float64, device=gradient.device)
        # Adds in one order, however many threads there are; in 64 bits, as there may be millions.
        sums.index_add_(0, codes, gradient.reshape(-1).double())
        if self._words.gradient == "mean":
            sums /= codes.bincount(minlength=len(sums)).clamp(min=1)
        sums[0] = 0
        return sums.to(gradient.dtype)[codes].view(gradient.shape)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        self.restrict(self._weights)

    @torch.no_grad()
    def restrict(self, weights: Mapping[str, Tensor]) -> None:
        # A solver may round differently at a tensor's end, so the first weight of a value is copied
        # to the others.
        local_weights = {name: weights[name] for name in self.codes}
        whole = self._values(local_weights) if self._fixed is None else self._fixed
        shared = {n: whole[n][code.reshape(-1)].view(code.shape) for n, code in self._codes.items()}
        self._wholes.put(shared, local_weights)

    def _values(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.cat([weight.new_zeros(1), weight.reshape(-1)[self._firsts[name]]])
            for name, weight in self._wholes.of_own(parts).items()
        }

    @cached_property
    def _codes(self) -> dict[str, Tensor]:
        # of whole weights
        return self._wholes.of_own(self.codes)

    @cached_property
    def _firsts(self) -> dict[str, Tensor]:
        # the index of the first weight of each code except 0
        firsts = {}
        for name, codes in self._codes.items():
            ordered, places = codes.reshape(-1).sort(stable=True)
            is_first = torch.cat([ordered[:1] != 0, ordered.diff() != 0])
            firsts[name] = places[is_first]
        return firsts


class Constraint(Protocol):
    @property
    def pieces(self) -> dict[str, Piece]:
        """The state, by the names of its pieces in a checkpoint."""

    @property
    def line(self) -> str: ...

    def begin(self) -> None:
        """Make the state from a new training's first weights, and apply it. Raises: RecipeError."""

    def before_update(self, step: int) -> None:
        """Change weights and gradients (summed and clipped) before the update of `step`, from 0."""

    def after_update(self, step: int) -> None: ...

    def restrict(self, weights: Mapping[str, Tensor]) -> None:
        """Apply the constraint to tensors in place of the weights, such as their moving average."""


def check_constraints(recipe: Recipe, network: nn.Module) -> None:
    """Raise RecipeError, with the layer's name, if weights cannot be constrained as asked."""
    make_constraints(recipe, dict(network.named_parameters()), {}, LocalWholes())


def make_constraints(
    recipe: Recipe,
    network: Mapping[str, nn.Parameter],
    own: Mapping[str, nn.Parameter],
    wholes: Wholes,
) -> list[Constraint]:
    """Return a recipe's constraints, in their order. Raises: as `check_constraints`.

    own: the network's parameters that this rank updates, or parts of them.
    """
    constraints: list[Constraint] = []
    if recipe.prune.is_on:
        keep, threshold = pruned_weights(network, recipe.prune)
        pruned = {n: p for n, p in own.items() if wholes.name(n) in {**keep, **threshold}}
        rows = rows_of_directions(network)
        constraints.append(Pruning(pruned, keep, threshold, rows, recipe.prune, wholes))
    if recipe.share.is_on:
        bits = shared_weights(network, recipe.share)
        shared = {n: parameter for n, parameter in own.items() if wholes.name(n) in bits}
        constraints.append(Sharing(shared, bits, recipe.share, recipe.train.seed, wholes))
    return constraints
