"""Pushes of gradients to a server: as they are, or encoded by the exchange's codec.

The server applies what it decodes. Gradients that travel nowhere (rank 0's own, and all of a
simulated clock or a replay) are encoded and decoded too: it does not matter which rank computes.

With error feedback, what a learner's push did not send is added to its next gradient. This memory
changes only with pushes that count, in the order of the log, and only for the parameters that a
push uses. A learner that joins has no memory, and that of a lost learner is lost. Under the real
clock it is in the learner's process, in no checkpoint: a resumed training first loses all learners.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from firecaffe.errors import CheckpointError
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.codec import ROW, RowCodec, TensorCodec
from firecaffe.gradients.compressors.feedback import keep_residual
from firecaffe.training.piece import Piece
from firecaffe.training.tensor_file import Stored
from firecaffe.transport.collect import HeldPart


class Coder:
    """Encodes the gradients of a process's learners: here, as they are. Others extend it."""

    def example(self, gradient: Tensor) -> Tensor:
        """Return a tensor of the dtype and shape in which a gradient like this one is sent."""
        return gradient

    def encode(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is sent of a learner's gradients, by parameter, in the form of `example`."""
        return dict(gradients)

    def decode(self, sent: Tensor, num_elements: int) -> Tensor:
        """Return the gradient that was sent, as `num_elements` elements in order."""
        return sent.view(-1)

    def as_received(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a learner's gradients by parameter, as the receiver decodes them."""
        return dict(gradients)

    def drop(self, learner: int) -> None:
        """Undo a learner's last `encode`, because its push does not count."""

    def forget(self, learner: int) -> None: ...

    remembers = False
    """Whether an encoding depends on earlier gradients of the learner."""

    def pieces(self) -> dict[str, Piece]:
        return {}


class Encoder(Coder):
    """Encodes each parameter by itself: whole, or in rows, the last one padded with zeros."""

    def __init__(self, codec: RowCodec | TensorCodec) -> None:
        self._codec = codec

    def example(self, gradient: Tensor) -> Tensor:
        if isinstance(self._codec, RowCodec):
            size = -(-gradient.numel() // ROW) * self._codec.row_bytes
            return torch.empty(size, dtype=torch.uint8, device="meta")
        zeros = torch.zeros(gradient.numel())
        return self._payload(zeros, zeros)

    def encode(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = {name: gradient.detach().reshape(-1) for name, gradient in gradients.items()}
        return {name: self._payload(x, x) for name, x in flat.items()}

    def decode(self, sent: Tensor, num_elements: int) -> Tensor:
        if not num_elements:
            return torch.zeros(0, device=sent.device)
        if isinstance(self._codec, RowCodec):
            return self._codec.decode(sent.view(-1, self._codec.row_bytes))[:num_elements]
        return self._codec.decode(sent, num_elements)

    def as_received(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sent = {}
        for name, payload in self.encode(learner, gradients).items():
            gradient = gradients[name]
            decoded = self.decode(payload, gradient.numel())
            sent[name] = torch.empty_like(gradient).copy_(decoded.view(gradient.shape))
        return sent

    def _payload(self, x: Tensor, memory: Tensor) -> Tensor:
        """Encode x, float32 (n,), as uint8 (bytes,). `memory` is the part of x kept back before."""
        if not x.numel():
            return x.new_empty(0, dtype=torch.uint8)
        if isinstance(self._codec, RowCodec):
            return self._codec.encode(pad(x, (0, -x.numel() % ROW))).view(-1)
        return self._codec.encode(x, memory)


class FeedbackEncoder(Encoder):
    """Keeps what it has not sent: a `Piece` with LEARNER.PARAMETER, each of shape (elements,)."""

    held_by_all = False
    is_result = False
    remembers = True

    def __init__(self, codec: RowCodec | TensorCodec, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(codec)
        self._named = named
        # By learner and parameter. Tensors are replaced, never changed.
        self._memory: dict[int, dict[str, Tensor]] = {}
        self._before: dict[int, dict[str, Tensor]] = {}

    def encode(self, learner: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        before = self._memory.get(learner, {})
        now, payloads, is_finite = dict(before), {}, True
        for name, gradient in gradients.items():
            flat = gradient.detach().reshape(-1)
            memory = before[name] if name in before else torch.zeros_like(flat)
            x = flat + memory
            payloads[name] = self._payload(x, memory)
            now[name] = torch.empty_like(x)
            keep_residual(now[name], x, self.decode(payloads[name], x.numel()))
            is_finite = is_finite and _is_finite(x)
        # A gradient that has overflowed makes no update.
        self._before[learner], self._memory[learner] = before, now if is_finite else before
        return payloads

    def drop(self, learner: int) -> None:
        self._memory[learner] = self._before[learner]

    def forget(self, learner: int) -> None:
        self._memory.pop(learner, None)
        self._before.pop(learner, None)

    def pieces(self) -> dict[str, Piece]:
        return {"compressor": self}

    def parts(self) -> dict[str, HeldPart]:
        return {
            f"{learner}.{name}": HeldPart(tensor)
            for learner, memory in sorted(self._memory.items())
            for name, tensor in memory.items()
        }

    def load(self, stored: Stored) -> None:
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
    """Make a coder from the name of a codec that encodes gradients one by one; empty for none."""
    if not compressor:
        return Coder()
    codec = COMPRESSORS[compressor]
    assert isinstance(codec, RowCodec | TensorCodec)
    remembers = isinstance(codec, TensorCodec) or codec.remembers
    return FeedbackEncoder(codec, named) if remembers else Encoder(codec)


def are_finite(names: Iterable[str], runs: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Return whether each parameter's gradient is finite: bool, shape (parameters + 1,).

    A parameter that was not used counts as finite. The last element is for the norm of the whole
    gradient; a caller that clips sets it. `runs` has parts of gradients by parameter.
    """
    broken = {name for name, values in runs if not _is_finite(values)}
    return torch.tensor([*(name not in broken for name in names), True])


def _is_finite(values: Tensor) -> bool:
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(low.isfinite() & high.isfinite())
