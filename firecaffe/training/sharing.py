"""Weights that share few values: a constraint of a training.

The gradient of a value is the sum of its weights' gradients, or their mean. Each of these weights
is given it, so a solver that works element by element updates all of them alike, as it would update
the value itself: with one momentum, and weight decay once.

Source: Han, Mao and Dally 2016, arXiv 1510.00149, section 3.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from firecaffe.compression.config import ShareConfig
from firecaffe.compression.layers import BIAS
from firecaffe.compression.share import share
from firecaffe.errors import RecipeError
from firecaffe.training.arithmetic import key_of
from firecaffe.training.piece import Piece
from firecaffe.training.weights import Weights
from firecaffe.training.wholes import Wholes


class Sharing:
    """The codes of the weights that share values; see `Constraint`. Weights of code 0 are zero."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        bits: Mapping[str, int],
        words: ShareConfig,
        seed: int,
        wholes: Wholes,
    ) -> None:
        """weights: those that this rank updates, or parts of them. bits: of each, by the whole
        weight's name. seed: of a start by chance.
        """
        self._weights, self._bits, self._words, self._seed = weights, bits, words, seed
        self._wholes = wholes
        self._fixed: dict[str, Tensor] | None = None
        """The values by code, if they are not trained; those before the first update."""
        self.codes = {
            name: torch.zeros_like(each, dtype=torch.int32) for name, each in weights.items()
        }

    @property
    def pieces(self) -> dict[str, Piece]:
        return {"code": Weights(self.codes.items)}

    @property
    def line(self) -> str:
        codes = (each.flatten() for _, each in self._wholes.one_by_one(self.codes))
        counts = [each.bincount()[1:] for each in codes]
        weights = sum(int(each.sum()) for each in counts)
        values = sum(int(each.count_nonzero()) for each in counts)
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
        codes = self._codes  # put together by all ranks at once, also by one that has none
        if not self._words.train:
            if self._fixed is None:
                own = {name: each.detach() for name, each in self._weights.items()}
                self._fixed = self._values(own)
            return
        gradients = {n: each.grad for n, each in self._weights.items() if each.grad is not None}
        whole = self._wholes.of_own(gradients)
        shared = {n: self._shared(n, codes[n].reshape(-1), each) for n, each in whole.items()}
        self._wholes.put(shared, gradients)

    def _shared(self, name: str, codes: Tensor, gradient: Tensor) -> Tensor:
        """For each weight the gradient of its value."""
        sums = torch.zeros(len(self._firsts[name]) + 1, dtype=torch.float64, device=gradient.device)
        # One after the other, in any number of threads; in 64 bits, for they may be millions.
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
        """Gives all weights of a value that of the first: a solver rounds at the end of a tensor
        not always as in its middle.
        """
        own = {name: weights[name] for name in self.codes}
        whole = self._values(own) if self._fixed is None else self._fixed
        shared = {n: whole[n][each.reshape(-1)].view(each.shape) for n, each in self._codes.items()}
        self._wholes.put(shared, own)

    def _values(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of weights by code."""
        return {
            name: torch.cat([weight.new_zeros(1), weight.reshape(-1)[self._firsts[name]]])
            for name, weight in self._wholes.of_own(parts).items()
        }

    @cached_property
    def _codes(self) -> dict[str, Tensor]:
        """Of whole weights."""
        return self._wholes.of_own(self.codes)

    @cached_property
    def _firsts(self) -> dict[str, Tensor]:
        """The place of the first weight of each code but 0."""
        firsts = {}
        for name, codes in self._codes.items():
            ordered, places = codes.reshape(-1).sort(stable=True)
            is_first = torch.cat([ordered[:1] != 0, ordered.diff() != 0])
            firsts[name] = places[is_first]
        return firsts
