"""A network that the ranks of a row hold together, each a part of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.pieces import InParts, Names, NumbersInParts, NumbersOfRow
from firecaffe.training.piece import Numbers
from firecaffe.training.state import State


@dataclass(frozen=True)
class RowNetwork:
    """What a training has beside such a network."""

    mesh: Mesh
    names: Names
    has_buffers: bool
    """Whether the whole network has any."""
    other_weights: list[int]
    """The ranks that had made other first weights than rank 0, whose are taken."""
    sizes: Mapping[str, int]
    """The numbers of elements of the whole network's trained parameters, in its order."""

    def called(self, name: str) -> str:
        """The whole tensor's name, by this rank's of a part."""
        return self.names.source(name)[0].whole

    def numbers_of_row(self, numbers: Numbers) -> Numbers:
        """Those that the ranks of the row keep together, by whole names. All of them ask."""
        return NumbersOfRow(numbers, self.names, self.mesh.row)

    def cut_pieces(self, state: State) -> None:
        """Lets a state know that ranks hold parts."""
        for name, piece in state.pieces.items():
            if name != "buffer" or self.has_buffers:
                state.pieces[name] = InParts(piece, self.names)
        for word, numbers in state.numbers.items():
            state.numbers[word] = NumbersInParts(numbers, self.names)
            state.numbers_in_parts.add(word)
