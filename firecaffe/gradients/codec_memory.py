"""A compressor's memory as a piece of a training's state: a rank holds that of its nodes."""

from collections.abc import Collection, Mapping

from torch import Tensor

from firecaffe.gradients.compressors.wire import Compressor
from firecaffe.transport.collect import HeldPart


class CodecMemory:
    """A compressor's memory by NODE.PARAMETER; see `training.piece.Piece`.

    A node is on one rank, and on another one if the number of ranks changes. What all ranks hold
    alike (`q.PARAMETER` of power_sgd) is saved once.
    """

    held_by_all = False
    is_result = False

    def __init__(self, compressor: Compressor, own_nodes: Collection[int]) -> None:
        self._compressor, self._own_nodes = compressor, own_nodes

    def parts(self) -> dict[str, HeldPart]:
        return {name: HeldPart(tensor) for name, tensor in self._compressor.state().items()}

    def load(self, stored: Mapping[str, Tensor]) -> None:
        """Loads the memory of this rank's nodes. Raises: CheckpointError."""
        self._compressor.load_state(stored, self._own_nodes)
