"""How a parameter's gradient is pushed to a server: as it is, or encoded by the exchange's codec.

The server applies what it decodes. So that it does not matter who computes a gradient, those that
travel nowhere (rank 0's own, and all of a simulated clock or a replay) are encoded and decoded too.

Error feedback with a server: what a learner's push did not send is added to its next gradient.

The memory is a learner's, by parameter: it goes along with its pushes that count, in their order,
which the log has. A push that does not count leaves it as it was, one that does not use a parameter
leaves that parameter's. A learner that comes has none, and that of one which is lost is gone.

Under the real clock it is in the process of its learner, and in no checkpoint: who goes on from one
begins by losing all learners.

Which gradients of a worker are finite, where these go elsewhere than to rank 0.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from firecaffe.errors import CheckpointError
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.codec import ROW, RowCodec, TensorCodec
from firecaffe.gradients.compressors.feedback import keep_rest
from firecaffe.training.tensor_file import Stored
from firecaffe.transport.collect import HeldPart


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


class FeedbackEncoder(Encoder):
    """An encoder that keeps what it has not sent. As a piece of a training's state
    (`training.piece.Piece`) it is LEARNER.PARAMETER, each of shape (elements,).
    """

    held_by_all = False
    is_result = False

    def __init__(self, codec: RowCodec | TensorCodec, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(codec)
        self._named = named
        self._memory: dict[int, dict[str, Tensor]] = {}
        """By learner and parameter. Tensors are replaced, never changed."""
        self._before: dict[int, dict[str, Tensor]] = {}
        """As it was before the learner's last push."""

    def encode(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        before = self._memory.get(learner, {})
        now, payloads = dict(before), {}
        for name, gradient in gradients.items():
            flat = gradient.detach().reshape(-1)
            memory = before[name] if name in before else torch.zeros_like(flat)
            x = flat + memory
            payloads[name] = self._payload(x, memory)
            now[name] = torch.empty_like(x)
            keep_rest(now[name], x, self.decode(payloads[name], x.numel()))
        self._before[learner], self._memory[learner] = before, now
        return payloads

    def drop(self, learner: int) -> None:
        self._memory[learner] = self._before[learner]

    def forget(self, learner: int) -> None:
        self._memory.pop(learner, None)
        self._before.pop(learner, None)

    def parts(self) -> dict[str, HeldPart]:
        return {
            f"{learner}.{name}": HeldPart(each)
            for learner, memory in sorted(self._memory.items())
            for name, each in memory.items()
        }

    def load(self, stored: Stored) -> None:
        """Raises: CheckpointError if it is that of another network."""
        for path in stored:
            learner, _, name = path.partition(".")
            value, parameter = stored[path], self._named.get(name)
            sizes = None if parameter is None else (parameter.numel(),)
            if not learner.isdecimal() or parameter is None or value.shape != sizes:
                raise CheckpointError(
                    f"checkpoint holds {stored.full_name(path)}, which this training does not have"
                )
            memory = self._memory.setdefault(int(learner), {})
            memory[name] = value.to(parameter.device, copy=True)


def make_coder(compressor: str, named: Mapping[str, nn.Parameter]) -> Coder:
    """compressor: the name of a codec that encodes gradients one by one; empty for none."""
    if not compressor:
        return Coder()
    codec = COMPRESSORS[compressor]
    assert isinstance(codec, RowCodec | TensorCodec)
    remembers = isinstance(codec, TensorCodec) or codec.remembers
    return FeedbackEncoder(codec, named) if remembers else Encoder(codec)


def are_finite(names: Iterable[str], runs: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Whether the gradient of each parameter is, bool, shape (parameters + 1,); one that was not
    used is. The last place is for the norm of all, which whoever clips finds. runs: of gradients,
    by their parameters.
    """
    broken = {name for name, values in runs if not _is_finite(values)}
    return torch.tensor([*(name not in broken for name in names), True])


def _is_finite(values: Tensor) -> bool:
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(low.isfinite() & high.isfinite())
