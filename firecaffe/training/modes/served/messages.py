"""The messages between a server and a learner of another rank, over a lane, as runs of bytes.

server   HEAD: WORK, leaf, whether weights follow     then the weights, if they are new there
learner  the contribution: times, a vote, what was used, gradient, tail, counts
...
server   HEAD: END, the length of a text              then the text and the last weights
learner  HEAD, as acknowledgment
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from firecaffe.synchrony.server_policies import Work
from firecaffe.training.forward import Forward
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.server_memory import Gradient, Parcel
from firecaffe.training.modes.served.work_gradient import Contribution, loss_scale
from firecaffe.transport.lane import Lane

WORK, END = range(2)


class Head(NamedTuple):
    kind: int
    learner: int = 0
    step: int = 0
    place: int = 0
    version: int = 0
    has_weights: bool = False
    length: int = 0
    is_dropped: bool = False
    """Whether the learner's previous contribution does not count."""

    @property
    def work(self) -> Work:
        return Work(self.learner, self.step, self.place, self.version)


class Messages:
    """The messages over one lane. Both ends construct them alike."""

    def __init__(
        self,
        lane: Lane,
        forward: Forward,
        named: Mapping[str, nn.Parameter],
        coder: Coder,
        is_elsewhere: bool = False,
    ) -> None:
        """Encode gradients with `coder`; if `is_elsewhere`, send none: others hold the weights."""
        self.lane, self._coder = lane, coder
        self._named = {} if is_elsewhere else named
        buffers = dict(forward.model.named_buffers())
        self.weights = Parcel({**self._named, **buffers, **loss_scale(forward)})
        self._whole = {**named, **buffers}
        self.last: Mapping[str, Tensor] = {}
        """All weights and buffers, as received with the end."""
        self._head = Parcel({"": torch.zeros(len(Head._fields), dtype=torch.int64)})
        gradients = {f"gradient/{n}": coder.example(p) for n, p in self._named.items()}
        tails = {f"tail/{i}": tensor for i, tensor in enumerate(forward.empty_tail())}
        facts = {
            "is_used": torch.zeros(len(self._named), dtype=torch.uint8),
            "is_finite": torch.zeros((len(named) + 1) * is_elsewhere, dtype=torch.uint8),
            "moved": torch.zeros(2 * is_elsewhere, dtype=torch.int64),
            "seconds": torch.zeros(2, dtype=torch.float64),
            "votes": torch.zeros(1, dtype=torch.uint8),
            "counts": forward.zero_counts(),
        }
        self._contribution = Parcel({**gradients, **tails, **facts})
        self._tails, self._is_elsewhere = list(tails), is_elsewhere
        self._device = forward.device

    def send_head(self, head: Head) -> None:
        self._head.views[""].copy_(torch.tensor(head))
        self.lane.send(self._head.data)

    def receive_head(self) -> Head:
        self.lane.receive(self._head.data)
        head = Head(*self._head.views[""].tolist())
        if head.is_dropped:
            self._coder.drop(head.learner)
        return head

    def send_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.weights.fill(tensors)
        if self.weights.data.numel():  # a network may have no buffers
            self.lane.send(self.weights.data)

    def receive_weights(self) -> None:
        if self.weights.data.numel():
            self.lane.receive(self.weights.data)

    def send_contribution(
        self, learner: int, contribution: Contribution, asks_to_stop: bool
    ) -> None:
        tensors, views = contribution.gradient.tensors, self._contribution.views
        encoded = {} if self._is_elsewhere else self._coder.encode(learner, tensors)
        self._contribution.fill({f"gradient/{name}": tensor for name, tensor in encoded.items()})
        self._contribution.fill(dict(zip(self._tails, contribution.gradient.tail, strict=True)))
        views["counts"].copy_(contribution.counts)
        views["is_used"].copy_(torch.tensor([name in tensors for name in self._named]))
        seconds = [contribution.data_s, contribution.compute_s]
        views["seconds"].copy_(torch.tensor(seconds, dtype=torch.float64))
        views["votes"].fill_(asks_to_stop)
        if contribution.is_finite is not None:
            views["is_finite"].copy_(contribution.is_finite)
            views["moved"].copy_(torch.tensor(contribution.moved))
        self.lane.send(self._contribution.data)

    def receive_contribution(self) -> tuple[Contribution, bool]:
        """Receive a contribution, in new memory, and whether its sender was asked to stop."""
        self.lane.receive(self._contribution.data)
        views = self._contribution.views
        is_used = views["is_used"].tolist()
        # In the weights' memory layout, as after a backward, because a sum may depend on it.
        tensors = {
            name: self._decoded(views[f"gradient/{name}"], parameter)
            for (name, parameter), used in zip(self._named.items(), is_used, strict=True)
            if used
        }
        tail = [self._own(views[name]) for name in self._tails]
        data_s, compute_s = views["seconds"].tolist()
        gradient = Gradient(tensors, tail)
        contribution = Contribution(gradient, self._own(views["counts"]), data_s, compute_s)
        if self._is_elsewhere:
            pulled, pushed = views["moved"].tolist()
            is_finite = views["is_finite"].bool()
            contribution = replace(contribution, is_finite=is_finite, moved=(pulled, pushed))
        return contribution, bool(views["votes"].item())

    def _decoded(self, view: Tensor, parameter: Tensor) -> Tensor:
        decoded = self._coder.decode(view.to(parameter.device), parameter.numel())
        return torch.empty_like(parameter, requires_grad=False).copy_(decoded.view(parameter.shape))

    def _own(self, view: Tensor) -> Tensor:
        return view.to(self._device, copy=True)

    def send_end(self, text: str, weights: Mapping[str, Tensor]) -> None:
        """End the lane, once the other end has everything."""
        data = text.encode()
        self.send_head(Head(END, has_weights=bool(weights), length=len(data)))
        if data:
            self.lane.send(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if weights:
            parcel = Parcel(self._whole)
            parcel.fill(weights)
            self.lane.send(parcel.data)
        self.receive_head()

    def receive_end(self, head: Head) -> str:
        """Return the text of the end; the weights are then in `last`."""
        data = torch.zeros(head.length, dtype=torch.uint8)
        if head.length:
            self.lane.receive(data)
        if head.has_weights:
            parcel = Parcel(self._whole)
            self.lane.receive(parcel.data)
            self.last = parcel.views
        self.send_head(head)
        return data.numpy().tobytes().decode()
