"""Rank 0's messages to the owners: events, one after the other, and requests for their parts.

A thread of rank 0 serves each owner, so an owner that still waits for a gradient does not delay the
others. Each message is a JSON text; parts are a text with their names, and then their bytes.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from firecaffe.errors import PeerLostError
from firecaffe.synchrony.events import from_row, to_row
from firecaffe.training.served.holders import UpdateOrder
from firecaffe.training.served.messages import Parcel
from firecaffe.training.served.shards.owner import Owner
from firecaffe.transport.lane import Line


@dataclass(frozen=True)
class Give:
    """Requests an owner's parts, as they are after all earlier events."""


@dataclass(frozen=True)
class End: ...


@dataclass(frozen=True)
class Parts:
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    moved: tuple[int, int]
    """Bytes sent to learners of other ranks, and received from them."""


Order = UpdateOrder | Give | End

Moved = Callable[[], tuple[int, int]]


class Teller:
    def __init__(
        self, do: Callable[[Order], Parts | None], failed: Callable[[BaseException], None]
    ) -> None:
        self._do, self._failed = do, failed
        self._orders, self.answers = SimpleQueue[Order | None](), SimpleQueue[Parts]()
        self.thread = threading.Thread(target=self._run, name="teller", daemon=True)
        self.thread.start()

    def tell(self, order: Order) -> None:
        self._orders.put(order)

    def cut(self) -> None:
        """End the thread, from any other, once it waits for no line. Its owner is not told."""
        self._orders.put(None)

    def _run(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                if (answer := self._do(order)) is not None:
                    self.answers.put(answer)
                if isinstance(order, End):
                    return
        except BaseException as error:
            self._failed(error)


def execute(owner: Owner, moved: Moved, order: Order) -> Parts | None:
    if isinstance(order, UpdateOrder):
        owner.take(order)
    return Parts(*owner.held.parts(), moved()) if isinstance(order, Give) else None


def send_order(line: Line, order: Order) -> Parts | None:
    """Send an order over a line, and receive what it requests. Raises: PeerLostError."""
    row: dict[str, Any] = {"order": type(order).__name__}
    if isinstance(order, UpdateOrder):
        row |= {"event": to_row(order.event), "rate": order.rate}
        row |= {"momentum": order.momentum, "delay": order.delay}
    _send(line, row)
    if isinstance(order, End):
        with suppress(PeerLostError):  # it has the message, and has left
            _receive(line)
    return _receive_parts(line) if isinstance(order, Give) else None


def listen(line: Line, owner: Owner, moved: Moved) -> None:
    """Execute the orders from an owner's line, to its end. Raises: PeerLostError."""
    while (row := _receive(line))["order"] != "End":
        if row["order"] == "UpdateOrder":
            event = from_row(row["event"])
            order = UpdateOrder(event, row["rate"], row["momentum"], row["delay"])
            execute(owner, moved, order)
        elif (parts := execute(owner, moved, Give())) is not None:
            _send_parts(line, parts)
    with suppress(PeerLostError):
        _send(line, row)


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


def _send_parts(line: Line, parts: Parts) -> None:
    parcel = Parcel(parts.tensors)
    parcel.fill(parts.tensors)
    kinds = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in parts.tensors.items()
    ]
    _send(line, {"tensors": kinds, "numbers": parts.numbers, "moved": parts.moved})
    line.send(parcel.data)


def _receive_parts(line: Line) -> Parts:
    row = _receive(line)
    parcel = Parcel({name: _like(kind, shape) for name, kind, shape in row["tensors"]})
    line.receive(parcel.data)
    sent, received = row["moved"]
    return Parts(parcel.views, row["numbers"], (sent, received))


def _like(kind: str, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, kind), device="meta")
