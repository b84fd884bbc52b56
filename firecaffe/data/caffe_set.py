"""The samples of a net's data layers in one phase, as a data set."""

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
    """Inputs are the first top of the first layer. Targets are the next one; a tuple of them if
    there are several, and empty if there is none.

    Args:
        layers: Of as many samples each: those of the same number belong together.
        transform_words: What is done to them, for `training.facts`.
        is_training: Whether cuts and mirrors are drawn for a training alone. Those of a test are
            drawn once and for all, and are the mirrors only.
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
