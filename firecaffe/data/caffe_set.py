"""The samples of a Caffe network's data layers in one phase, as a data set."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from firecaffe.data.caffe_tops import Draws, Tops
from firecaffe.data.caffe_transform import draws
from firecaffe.data.hash import EVALUATION
from firecaffe.data.layout import Batch, Layout
from firecaffe.data.prefetch import FETCHERS


class CaffeSet:
    """Samples of layers: those of the same number in all layers belong together.

    Inputs are the first top. Targets are the other top, a tuple if there are several, or empty. If
    `is_training`, crops and mirrors are drawn, but only in training. Otherwise only mirrors are,
    once and for all. `transform_words` describes this for `training.facts`.
    """

    def __init__(self, layers: Sequence[Tops], transform_words: str, is_training: bool) -> None:
        self.layers, self.is_training = layers, is_training
        self.transform_words = transform_words
        self.class_names = layers[0].class_names if is_training else ()

    def __len__(self) -> int:
        return len(self.layers[0])

    @property
    def fetchers(self) -> int:
        return 0 if all(each.is_held for each in self.layers) else FETCHERS

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.batch(torch.tensor([0])))

    def batch(self, indices_B: Tensor) -> Batch:
        if self.is_training:
            return self._fetched(indices_B, None)
        return self.keyed_batch(indices_B, 0, EVALUATION)

    def keyed_batch(self, indices_B: Tensor, seed: int, epoch: int) -> Batch:
        is_random = any(each.is_random for each in self.layers)
        return self._fetched(indices_B, draws(indices_B, seed, epoch) if is_random else None)

    def _fetched(self, indices_B: Tensor, drawn: Draws) -> Batch:
        samples = indices_B.tolist()
        inputs, *targets = [top for each in self.layers for top in each.fetch(samples, drawn)]
        return inputs, targets[0] if len(targets) == 1 else tuple(targets)
