"""A network that the ranks of a row hold together, each a part of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.pieces import Names, NumbersOfRow
from firecaffe.training.piece import Numbers
from firecaffe.training.updates.spread import Part


@dataclass(frozen=True)
class RowNetwork:
    """What a training has beside such a network."""

    mesh: Mesh
    names: Names
    has_buffers: bool
    """Whether the whole network has any."""
    other_weights: list[int]
    """The ranks that had made other first weights than rank 0, whose are taken."""
    outline: dict[str, nn.Parameter]
    """The whole network's parameters, in its order, on the meta device."""

    @property
    def trained_outline(self) -> dict[str, nn.Parameter]:
        """Those that are trained."""
        return {name: each for name, each in self.outline.items() if each.requires_grad}

    def called(self, name: str) -> str:
        """The whole tensor's name, by this rank's of a part."""
        return self.names.source(name)[0].whole

    def part(self, name: str) -> Part:
        """What one of this rank's tensors is of the whole network's."""
        source, _ = self.names.source(name)
        if not source.cut:
            return Part(source.whole)
        return Part(source.whole, source.part, len(source.cut) - 1)

    def numbers_of_row(self, numbers: Numbers) -> Numbers:
        """Those that the ranks of the row keep together, by whole names. All of them ask."""
        return NumbersOfRow(numbers, self.names, self.mesh.row)


def outline_of(wholes: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters among some tensors, on the meta device."""
    return {
        name: nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        for name, each in wholes.items()
        if isinstance(each, nn.Parameter)
    }
