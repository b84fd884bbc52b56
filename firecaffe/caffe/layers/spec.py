"""What a layer is made from, and a row of the table of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from firecaffe.caffe.message import Message

Shape = tuple[int, ...]
"""Of a blob, with the batch first."""


@dataclass(frozen=True)
class Spec:
    """One layer of a net, in one phase, with the shapes of what goes into it."""

    name: str
    type: str
    layer: Message
    """The whole layer."""
    param: Message
    """What is its type's own, as convolution_param; empty if it is not there."""
    bottoms: Sequence[Shape]
    num_tops: int
    """How many blobs are asked of it."""
    phase: str
    """TRAIN or TEST."""


@dataclass(frozen=True)
class Kind:
    """A row of LAYERS."""

    make: Callable[[Spec], nn.Module]
    """The module: called with the bottoms, in their order, it returns the top, or a tuple of tops.
    Its parameters and buffers are filled as the fillers say. Raises: CaffeError.
    """
    param: str = ""
    """The name of the message with its own words; empty if it has none."""
    blobs: tuple[str, ...] = ("weight", "bias")
    """The names of the module's parameters and buffers, in the order of Caffe's blobs; those that a
    layer does not have are left out.
    """
    is_loss: bool = False
    """Whether its first top counts with a weight of 1 where no loss_weight is given."""
    takes_targets: bool = False
    """Whether its last bottom is what the samples should have given, as a label."""
