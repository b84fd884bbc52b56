"""Error feedback with a server: what a learner's push did not send is added to its next gradient.

The memory is a learner's, by parameter: it goes along with its pushes that count, in their order,
which the log has. A push that does not count leaves it as it was, one that does not use a parameter
leaves that parameter's. A learner that comes has none, and that of one which is lost is gone.

Under the real clock it is in the process of its learner, and in no checkpoint: who goes on from one
begins by losing all learners.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from firecaffe.errors import CheckpointError
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.codec import RowCodec, TensorCodec
from firecaffe.gradients.compressors.feedback import keep_rest
from firecaffe.training.served.coder import Coder, Encoder
from firecaffe.training.stored import Stored
from firecaffe.transport.collect import HeldPart


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
