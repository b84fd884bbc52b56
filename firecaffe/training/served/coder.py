"""How a parameter's gradient is pushed to a server: as it is, or encoded by the exchange's codec.

The server applies what it decodes. So that it does not matter who computes a gradient, those that
travel nowhere (rank 0's own, and all of a simulated clock or a replay) are encoded and decoded too.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.codec import ROW, RowCodec


class Coder:
    """Gradients travel as they are. Others subclass it."""

    def example(self, gradient: Tensor) -> Tensor:
        """A tensor of the type and the shape in which a gradient like this one travels."""
        return gradient

    def encode(self, gradient: Tensor) -> Tensor:
        """What travels, like `example`."""
        return gradient

    def decode(self, sent: Tensor, num_elements: int) -> Tensor:
        """The gradient, as so many elements in order, of what has come."""
        return sent.view(-1)

    def as_sent(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by parameter, as whoever they are sent to decodes them."""
        return dict(gradients)


class RowCoder(Coder):
    """Encodes by rows, the last of a parameter filled up with zeros."""

    def __init__(self, codec: RowCodec) -> None:
        self._codec = codec

    def example(self, gradient: Tensor) -> Tensor:
        rows = -(-gradient.numel() // ROW)
        return torch.empty(rows, self._codec.row_bytes, dtype=torch.uint8, device="meta")

    def encode(self, gradient: Tensor) -> Tensor:
        if not gradient.numel():
            return gradient.new_empty(0, self._codec.row_bytes, dtype=torch.uint8)
        return self._codec.encode(pad(gradient.detach().reshape(-1), (0, -gradient.numel() % ROW)))

    def decode(self, sent: Tensor, num_elements: int) -> Tensor:
        return self._codec.decode(sent)[:num_elements]

    def as_sent(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.empty_like(each).copy_(
                self.decode(self.encode(each), each.numel()).view(each.shape)
            )
            for name, each in gradients.items()
        }


def make_coder(compressor: str) -> Coder:
    """compressor: a codec by rows that keeps nothing back, by its name; or empty."""
    if not compressor:
        return Coder()
    codec = COMPRESSORS[compressor]
    assert isinstance(codec, RowCodec)
    return RowCoder(codec)
