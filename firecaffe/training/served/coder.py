"""How a parameter's gradient is pushed to a server: as it is, or encoded by the exchange's codec.

The server applies what it decodes. So that it does not matter who computes a gradient, those that
travel nowhere (rank 0's own, and all of a simulated clock or a replay) are encoded and decoded too.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from firecaffe.gradients.compressors.codec import ROW, RowCodec, TensorCodec


class Coder:
    """Of the learners of this process. Gradients travel as they are; others subclass it."""

    def example(self, gradient: Tensor) -> Tensor:
        """A tensor of the type and the shape in which a gradient like this one travels."""
        return gradient

    def encode(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What travels of a learner's gradients, by parameter, like `example`."""
        return dict(gradients)

    def decode(self, sent: Tensor, num_elements: int) -> Tensor:
        """The gradient, as so many elements in order, of what has come."""
        return sent.view(-1)

    def as_sent(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A learner's gradients by parameter, as whoever they are sent to decodes them."""
        return dict(gradients)

    def drop(self, learner: int) -> None:
        """What a learner encoded last does not count, and leaves no trace."""

    def forget(self, learner: int) -> None:
        """A learner is gone."""


class Encoder(Coder):
    """Encodes each parameter by itself, in rows the last of which is filled up with zeros, or as a
    whole.
    """

    def __init__(self, codec: RowCodec | TensorCodec) -> None:
        self._codec = codec

    def example(self, gradient: Tensor) -> Tensor:
        if isinstance(self._codec, RowCodec):
            size = -(-gradient.numel() // ROW) * self._codec.row_bytes
            return torch.empty(size, dtype=torch.uint8, device="meta")
        zeros = torch.zeros(gradient.numel())
        return self._payload(zeros, zeros)

    def encode(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = {name: each.detach().reshape(-1) for name, each in gradients.items()}
        return {name: self._payload(x, x) for name, x in flat.items()}

    def decode(self, sent: Tensor, num_elements: int) -> Tensor:
        if not num_elements:
            return torch.zeros(0, device=sent.device)
        if isinstance(self._codec, RowCodec):
            return self._codec.decode(sent.view(-1, self._codec.row_bytes))[:num_elements]
        return self._codec.decode(sent, num_elements)

    def as_sent(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, payload in self.encode(learner, gradients).items():
            each = gradients[name]
            decoded = self.decode(payload, each.numel())
            found[name] = torch.empty_like(each).copy_(decoded.view(each.shape))
        return found

    def _payload(self, x: Tensor, memory: Tensor) -> Tensor:
        """What travels of float32 (n,): uint8 (bytes,). memory: what of x was kept back before."""
        if not x.numel():
            return x.new_empty(0, dtype=torch.uint8)
        if isinstance(self._codec, RowCodec):
            return self._codec.encode(pad(x, (0, -x.numel() % ROW))).view(-1)
        return self._codec.encode(x, memory)
