"""Messages to and from the owners: a learner's gradients and versions, and rank 0's events.

learner  HEAD: ASK, a version                  owner  its bytes of that version
learner  HEAD: BRING, a work, what was used    then the owner's bytes of the gradient
...
learner  HEAD: END                             owner  a HEAD, as acknowledgment

Rank 0's messages are JSON texts. Parts are a text with their names, then their bytes.
"""

import json
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.errors import PeerLostError
from firecaffe.synchrony.events import from_row, to_row
from firecaffe.synchrony.server_policies import Work
from firecaffe.training.modes.served.coder import Coder, are_finite
from firecaffe.training.modes.served.owner import Owner, OwnerParts, Shard
from firecaffe.training.modes.served.server import UpdateSettings
from firecaffe.training.modes.served.server_memory import Gradient, Parcel
from firecaffe.training.modes.served.work_gradient import Contribution, UpdateOrder, Workbench
from firecaffe.transport.lane import Line

ASK, BRING, END = range(3)


@dataclass(frozen=True)
class OwnerLayout:
    named: Mapping[str, nn.Parameter]
    parcel: Parcel
    shards: Sequence[Shard]
    """The shards by rank. In a small network some may be empty, and have no owner."""
    coder: Coder
    """The coder. For cut parameters it has no memory, and encodes a part to the same values."""
    clips: bool
    """Whether gradients are clipped, so that the norm of the whole gradient has to be finite."""

    def letter(self, shard: Shard) -> Parcel:
        return Parcel(
            {
                name: self.coder.example(self.parcel.views[name].view(-1)[: len(elements)])
                for name, elements in shard.pieces.items()
            }
        )

    def opened(self, letter: Parcel, shard: Shard, used: Container[str]) -> Gradient:
        """Return an owner's part of a gradient, in the letter's memory. Rank 0 has the buffers."""
        names = [name for name in shard.pieces if name in used]
        return Gradient({n: self._shaped(n, letter.views[n], shard) for n in names}, [])

    def _shaped(self, name: str, sent: Tensor, shard: Shard) -> Tensor:
        """Return a gradient's run in its parameter's memory layout, on which norms depend."""
        whole = self.named[name]
        flat = self.coder.decode(sent.to(whole.device), len(shard.pieces[name]))
        if not shard.has_whole(name, whole):
            return flat
        shaped = flat.view(whole.shape)
        return shaped if whole.is_contiguous() else torch.empty_like(whole).copy_(shaped)


class OwnerHead:
    def __init__(self, layout: OwnerLayout) -> None:
        numbers = torch.zeros(5, dtype=torch.int64)
        used = torch.zeros(len(layout.named), dtype=torch.uint8)
        self._parcel = Parcel({"numbers": numbers, "used": used})
        self._names = list(layout.named)

    def fill(self, kind: int, numbers: Sequence[int] = (), used: Container[str] = ()) -> Tensor:
        views = self._parcel.views
        views["numbers"][: 1 + len(numbers)].copy_(torch.tensor([kind, *numbers]))
        views["used"].copy_(torch.tensor([name in used for name in self._names]))
        return self._parcel.data

    def receive(self, line: Line) -> tuple[int, list[int], set[str]]:
        line.receive(self._parcel.data)
        kind, *numbers = self._parcel.views["numbers"].tolist()
        flags = zip(self._names, self._parcel.views["used"].tolist(), strict=True)
        return kind, numbers, {name for name, is_used in flags if is_used}


class OwnersBench:
    """A bench whose weights come from their owners, and whose gradients go there.

    Only its learner's thread calls it.
    """

    def __init__(
        self,
        bench: Workbench,
        layout: OwnerLayout,
        rank: int,
        own: Owner | None,
        lines: Mapping[int, Line],
    ) -> None:
        self._bench, self._layout, self._lines = bench, layout, lines
        self._rank, self._own = rank, own
        self._weights = Parcel(layout.parcel.views)
        ranks = [*lines] if own is None else [*lines, rank]
        self._letters = {owner: layout.letter(layout.shards[owner]) for owner in ranks}
        self._head = OwnerHead(layout)
        self._version = -1

    def compute(self, work: Work, weights: Mapping[str, Tensor]) -> Contribution:
        parameters = self._pull(work.version)
        contribution = self._bench.compute(work, {**parameters, **weights})
        is_finite = self._push(work, contribution.gradient)
        pulled = sum(line.received_bytes for line in self._lines.values())
        pushed = sum(line.sent_bytes for line in self._lines.values())
        tail = Gradient({}, contribution.gradient.tail)
        return replace(contribution, gradient=tail, is_finite=is_finite, moved=(pulled, pushed))

    def _pull(self, version: int) -> Mapping[str, Tensor]:
        if version != self._version:
            shards = self._layout.shards
            head = self._head.fill(ASK, [version])
            waits = [line.begin_send(head) for line in self._lines.values()]
            for rank, line in self._lines.items():
                waits.append(line.begin_receive(shards[rank].of(self._weights)))
            if self._own is not None:
                shards[self._rank].of(self._weights).copy_(self._own.version(version))
            for wait in waits:
                wait()
            self._version = version
        return self._weights.views

    def _push(self, work: Work, gradient: Gradient) -> Tensor:
        """Send a gradient to its owners. Return what is finite; see `coder.are_finite`."""
        layout, used = self._layout, gradient.tensors
        runs = {
            f"{rank}/{name}": layout.shards[rank].run_of(name, used[name]).reshape(-1)
            for rank in self._letters
            for name in layout.shards[rank].pieces
            if name in used
        }
        sent = layout.coder.encode(work.learner, runs)
        for path, payload in sent.items():
            owner, _, name = path.partition("/")
            self._letters[int(owner)].views[name].copy_(payload)
        head, waits = self._head.fill(BRING, work, used), []
        for rank, line in self._lines.items():
            waits += [line.begin_send(head), line.begin_send(self._letters[rank].data)]
        if self._own is not None:
            mine = layout.shards[self._rank]
            copy = layout.letter(mine)
            copy.data.copy_(self._letters[self._rank].data)
            self._own.bring(work, layout.opened(copy, mine, used))
        decoded = (
            (path.partition("/")[2], layout.coder.decode(payload, runs[path].numel()))
            for path, payload in sent.items()
        )
        is_finite = are_finite(layout.named, decoded)
        if layout.clips:
            is_finite[-1] = nn.utils.get_total_norm(list(used.values())).isfinite()
        for wait in waits:
            wait()
        return is_finite

    def end(self) -> None:
        """End the lines, once the owners have everything; then this rank may leave."""
        head = self._head.fill(END)
        for line in self._lines.values():
            line.send(head)
        for line in self._lines.values():
            with suppress(PeerLostError):  # the owner has it, and has left
                self._head.receive(line)


def serve_learner(line: Line, owner: Owner, shard: Shard, layout: OwnerLayout) -> None:
    """Serve a learner's line, on an owner, until the learner ends it. Raises: PeerLostError."""
    head = OwnerHead(layout)
    while (received := head.receive(line))[0] != END:
        kind, numbers, used = received
        if kind == ASK:
            line.send(owner.version(numbers[0]))
        else:
            letter = layout.letter(shard)
            line.receive(letter.data)
            owner.bring(Work(*numbers), layout.opened(letter, shard, used))
    with suppress(PeerLostError):  # the learner may have left
        line.send(head.fill(END))


class RemoteOwner:
    """The owner at the other end of rank 0's line, with `Owner`'s methods."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def take(self, order: UpdateOrder) -> None:
        row = {"order": "UpdateOrder", "event": to_row(order.event), **vars(order.settings)}
        _send(self._line, {**row, "overflows": order.overflows})

    def give(self) -> OwnerParts:
        _send(self._line, {"order": "Give"})
        return _receive_parts(self._line)

    def end(self) -> None:
        _send(self._line, {"order": "End"})
        with suppress(PeerLostError):  # the owner has the message, and has left
            _receive(self._line)


def listen(line: Line, owner: Owner) -> None:
    """Execute rank 0's orders at an owner, until the last. Raises: PeerLostError."""
    while (kind := (row := _receive(line)).pop("order")) != "End":
        if kind == "Give":
            _send_parts(line, owner.give())
        else:
            event, overflows = from_row(row.pop("event")), row.pop("overflows")
            owner.take(UpdateOrder(event, UpdateSettings(**row), overflows))
    with suppress(PeerLostError):
        _send(line, {"order": "End"})


def _send(line: Line, row: Mapping[str, Any]) -> None:
    text = torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)
    line.send(torch.tensor([text.numel()]))
    line.send(text)


def _receive(line: Line) -> dict[str, Any]:
    length = torch.zeros(1, dtype=torch.int64)
    line.receive(length)
    text = torch.zeros(int(length), dtype=torch.uint8)
    line.receive(text)
    return dict(json.loads(text.numpy().tobytes()))


def _send_parts(line: Line, parts: OwnerParts) -> None:
    parcel = Parcel(parts.tensors)
    parcel.fill(parts.tensors)
    kinds = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in parts.tensors.items()
    ]
    row = {"numbers": parts.numbers, "mean_step": parts.mean_step, "moved": parts.moved}
    _send(line, {"tensors": kinds, **row})
    line.send(parcel.data)


def _receive_parts(line: Line) -> OwnerParts:
    row = _receive(line)
    parcel = Parcel({name: _like(kind, shape) for name, kind, shape in row["tensors"]})
    line.receive(parcel.data)
    sent, received = row["moved"]
    return OwnerParts(parcel.views, row["numbers"], row["mean_step"], (sent, received))


def _like(kind: str, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, kind), device="meta")
