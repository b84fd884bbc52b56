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


class Sharing:
    """The codes of the weights that share values; see `Constraint`. Weights of code 0 are zero."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        bits: Mapping[str, int],
        words: ShareConfig,
        seed: int,
    ) -> None:
        """bits: of each weight, by name. seed: of a start by chance."""
        self._weights, self._bits, self._words, self._seed = weights, bits, words, seed
        self.codes = {
            name: torch.zeros_like(each, dtype=torch.int32) for name, each in weights.items()
        }

    @property
    def pieces(self) -> dict[str, Piece]:
        return {"code": Weights(self.codes.items)}

    @property
    def line(self) -> str:
        weights = sum(int(each.count_nonzero()) for each in self.codes.values())
        values = sum(len(each) for each in self._firsts.values())
        layers = len(self.codes)
        return f"share: {weights} weights that are not zero of {layers} layers have {values} values"

    @torch.no_grad()
    def begin(self) -> None:
        for name, weight in self._weights.items():
            if not weight.any() and not name.endswith(BIAS):
                raise RecipeError(
                    f"share: the weights of {name.rpartition('.')[0]} are all zero at the start; "
                    "leave it out of the pattern"
                )
            chance = torch.Generator().manual_seed(key_of(self._seed, "share", name))
            codes, values = share(weight, self._bits[name], self._words.start, chance)
            self.codes[name].copy_(codes)
            weight.copy_(values[codes.long()])

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        if self._fixed:  # taken before the first update
            return
        for name, weight in self._weights.items():
            if weight.grad is not None:
                self._share(name, weight.grad)

    def _share(self, name: str, gradient: Tensor) -> None:
        """Gives each weight the gradient of its value."""
        codes = self.codes[name].reshape(-1)
        sums = torch.zeros(len(self._firsts[name]) + 1, dtype=torch.float64, device=gradient.device)
        # One after the other, in any number of threads; in 64 bits, for they may be millions.
        sums.index_add_(0, codes, gradient.reshape(-1).double())
        if self._words.gradient == "mean":
            sums /= codes.bincount(minlength=len(sums)).clamp(min=1)
        sums[0] = 0
        gradient.copy_(sums.to(gradient.dtype)[codes].view(gradient.shape))

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        self.restrict(self._weights)

    @torch.no_grad()
    def restrict(self, weights: Mapping[str, Tensor]) -> None:
        """Gives all weights of a value that of the first: a solver rounds at the end of a tensor
        not always as in its middle.
        """
        for name in self.codes:
            values = self._fixed.get(name)
            if values is None:
                values = self._values(name, weights[name])
            weights[name].copy_(values[self.codes[name].reshape(-1)].view(weights[name].shape))

    def _values(self, name: str, weight: Tensor) -> Tensor:
        """The values of a weight by code."""
        return torch.cat([weight.new_zeros(1), weight.reshape(-1)[self._firsts[name]]])

    @cached_property
    def _firsts(self) -> dict[str, Tensor]:
        """The place of the first weight of each code but 0."""
        firsts = {}
        for name, codes in self.codes.items():
            ordered, places = codes.reshape(-1).sort(stable=True)
            is_first = torch.cat([ordered[:1] != 0, ordered.diff() != 0])
            firsts[name] = places[is_first]
        return firsts

    @cached_property
    def _fixed(self) -> dict[str, Tensor]:
        """The values by code, if they are not trained."""
        if self._words.train:
            return {}
        return {name: self._values(name, each.detach()) for name, each in self._weights.items()}
