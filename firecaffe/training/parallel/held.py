"""A network that the ranks of a row hold together, each a part of its tensors."""

from dataclasses import dataclass

from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.pieces import InParts, Names, NumbersInParts
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

    def cut_pieces(self, state: State) -> None:
        """Lets a state know that ranks hold parts."""
        for name, piece in state.pieces.items():
            if name != "buffer" or self.has_buffers:
                state.pieces[name] = InParts(piece, self.names)
        for word, numbers in state.numbers.items():
            state.numbers[word] = NumbersInParts(numbers, self.names)
            state.numbers_in_parts.add(word)
