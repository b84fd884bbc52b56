"""A rank that holds parts of layers; all ranks of its row compute the same samples."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from firecaffe.training.forward import Forward
from firecaffe.training.holdings.in_row import InRow
from firecaffe.training.parallel.network import SplitNetwork
from firecaffe.training.times import Spent


class SplitLayers(InRow):
    """Implements `Holding`. Split layers exchange tensors by themselves, forward and backward."""

    def __init__(self, forward: Forward, network: nn.Module, split: SplitNetwork) -> None:
        super().__init__(forward, network, split)
        self.everywhere = {**self.named, **split.outlines}
        self._split = split

    def spent(self) -> Spent:
        return Spent(layers_s=self._split.group.seconds)

    @property
    def split_layers(self) -> Mapping[str, str] | None:
        return self._split.chosen

    def row(self, num_leaves: int) -> dict[str, Any] | None:
        return self._split.row
