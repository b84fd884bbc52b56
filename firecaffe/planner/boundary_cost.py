"""Prices the messages of workers between two layers of a network.

In forward, a reduce-scatter sums outputs that workers computed from different parts of the inputs:
each of these workers gets a share of the sum. Then each worker receives the part of its next input
that it lacks. Backward does the same with gradients. Messages go directly to their receivers, as in
`exchange.collectives`. If several workers have a part, the nearest ones send equal shares of it.
The worker that lacks most determines the time.

Source: the model of rounds of Thakur, Rabenseifner and Gropp 2005, as in `planner.round_prices`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import prod
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from firecaffe.planner.layouts import Digit, Form, LayerLayout
from firecaffe.planner.simulate import Network

Array = NDArray[np.float64]


@dataclass(frozen=True)
class MessageTraffic:
    """One worker's messages by link, shape (links,), and shares of the batch's tensor by link."""

    messages: Array
    share: Array
    added: float = 0.0
    """The share of the tensor that the worker adds up."""

    @cached_property
    def far(self) -> tuple[float, float]:
        """The share sent over the outermost link, and over all links."""
        return float(self.share[-1]), float(self.share.sum())


class Communication(NamedTuple):
    """Seconds of a step, and bytes that each worker sends in them."""

    seconds: float = 0.0
    sent_bytes: float = 0.0

    @classmethod
    def in_sequence(cls, parts: Iterable[Self]) -> Self:
        return cls(*map(sum, zip(*parts, strict=True)))


class Exchanges:
    """Prices exchanges between layouts of a network's workers; caches results by form."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.sums, self.fetch = cache(self._sums), cache(self._fetch)
        self.pieces = cache(self._pieces)
        self.has, self.overlap = cache(self._has), cache(self._overlap)

    @cached_property
    def _sharing(self) -> Array:
        """The number of workers that share a port of each link, shape (links,)."""
        pairs = zip(self.network.links, self.network.inner, strict=True)
        world_size = self.network.world_size
        return np.array([-(-min(inner, world_size) // link.ports) for link, inner in pairs], float)

    @cached_property
    def _level(self) -> NDArray[np.int64]:
        """The number of the link between each pair of ranks, shape (ranks, ranks)."""
        ranks = np.arange(self.network.world_size)
        level = np.full((len(ranks), len(ranks)), len(self.network.links) - 1)
        for number, link in [*enumerate(self.network.links)][-2::-1]:
            group = ranks // link.group
            level[group[:, None] == group] = number
        return level

    def _sums(self, digit: Digit, form: Form) -> MessageTraffic:
        """Sum boxes of the workers that differ in a digit; each gets its share of the sum."""
        stride, size = digit
        of_links = np.zeros(len(self.network.links))
        for other in range(1, size):
            of_links[self.network.level(0, stride * other)] += 1
        box = 1 / _count(form.samples) / _count(form.channels) / size
        return MessageTraffic(of_links, of_links * box, (size - 1) * box)

    def halos(self, digit: Digit, share: float) -> MessageTraffic:
        """Exchange half of a share of the tensor with each neighbor in a digit."""
        stride, size = digit
        ends = [self.network.level(r * stride, (r + 1) * stride) for r in range(size - 1)]
        messages = np.zeros(len(self.network.links))
        for before, after in zip([None, *ends], [*ends, None], strict=True):
            sends = np.zeros(len(messages))
            for level in (end for end in (before, after) if end is not None):
                sends[level] += 1
            messages = np.maximum(messages, sends)
        return MessageTraffic(messages, messages * share / 2)

    def _fetch(self, have: Form, need: Form) -> MessageTraffic:
        """Send each worker, which has one box of a tensor, the rest of the box that it needs."""
        links = len(self.network.links)
        messages, share = np.zeros(links), np.zeros(links)
        if have == need:
            return MessageTraffic(messages, share)
        axes = (have.samples, need.samples), (have.channels, need.channels)
        box = 1 / _count(need.samples) / _count(need.channels)
        lacks = box - self.has(*axes[0]) * self.has(*axes[1])
        rank = int(lacks.argmax())
        if lacks[rank] < 1e-9:
            return MessageTraffic(messages, share)
        shared = self.overlap(*axes[0], rank) * self.overlap(*axes[1], rank)
        (rows, r), (columns, c) = self.pieces(have.samples), self.pieces(have.channels)
        cell, level = rows * c + columns, self._level[rank]
        nearest = np.full(r * c, links)
        np.minimum.at(nearest, cell, level)
        nearest[cell[rank]] = -1  # nobody sends what the rank already has
        sends = np.flatnonzero((level == nearest[cell]) & (shared > 0))
        at, over = cell[sends], level[sends]
        amount = shared[sends] / np.bincount(at, minlength=r * c)[at]
        sent: Array = np.bincount(over, amount, links).astype(float)
        return MessageTraffic(np.bincount(over, minlength=links).astype(float), sent)

    def _pieces(self, digits: tuple[Digit, ...]) -> tuple[NDArray[np.int64], int]:
        """Each rank's piece of a dimension, shape (ranks,), and the number of pieces."""
        ranks = np.arange(self.network.world_size)
        index = np.zeros_like(ranks)
        for stride, size in digits:
            index = index * size + ranks // stride % size
        return index, _count(digits)

    def _has(self, have: tuple[Digit, ...], need: tuple[Digit, ...]) -> Array:
        """The share of a dimension that each rank needs and has, shape (ranks,)."""
        return _overlap(*self.pieces(have), *self.pieces(need))

    def _overlap(self, have: tuple[Digit, ...], need: tuple[Digit, ...], rank: int) -> Array:
        """The share of a dimension that `rank` needs and each rank has, shape (ranks,)."""
        needed, parts = self.pieces(need)
        return _overlap(*self.pieces(have), needed[rank], parts)

    def price(
        self, traffics: Sequence[MessageTraffic], num_bytes: float, rounds: float
    ) -> Communication:
        """Price exchanges in sequence, each in `rounds` parts; num_bytes: the batch's."""
        messages, share, added = stacked(traffics, len(self.network.links))
        seconds = float(self.seconds_of(messages, share, added, num_bytes, rounds).sum())
        sent = sum(float(traffic.share.sum()) for traffic in traffics)
        return Communication(seconds, num_bytes * sent)

    def seconds_of(
        self,
        messages: Array,
        share: Array,
        added: Array,
        num_bytes: Array | float,
        rounds: Array | float,
    ) -> Array:
        """Seconds of each exchange; shapes (..., links) twice, (...), and two that broadcast."""
        latency_s, byte_s, addition_s = self._rates
        num_bytes, rounds = np.asarray(num_bytes), np.asarray(rounds)
        busy_s = messages * rounds[..., None] * latency_s + share * num_bytes[..., None] * byte_s
        longest_s: Array = (busy_s * self._sharing).max(-1)
        added_s: Array = addition_s * added * num_bytes
        return longest_s + added_s

    @cached_property
    def _rates(self) -> tuple[Array, Array, float]:
        links = self.network.links
        latency_s = np.array([link.latency_s for link in links])
        byte_s = np.array([1 / link.bandwidth_bytes_per_s for link in links])
        return latency_s, byte_s, max(link.addition_s_per_byte for link in links)


def stacked(traffics: Sequence[MessageTraffic], links: int) -> tuple[Array, Array, Array]:
    """Stack traffics into shapes (traffics, links), (traffics, links), (traffics,)."""
    shape = len(traffics), links
    messages = np.array([traffic.messages for traffic in traffics], dtype=float).reshape(shape)
    share = np.array([traffic.share for traffic in traffics], dtype=float).reshape(shape)
    return messages, share, np.array([traffic.added for traffic in traffics])


@dataclass(frozen=True)
class Boundary:
    sums: tuple[MessageTraffic, ...]
    fetches: tuple[MessageTraffic, ...]
    """Forward, and backward if there is a gradient."""
    meets: tuple[bool, bool]
    """Whether workers wait for each other here: forward, and backward."""

    @property
    def traffics(self) -> tuple[MessageTraffic, ...]:
        return self.sums + self.fetches


def boundary(
    exchanges: Exchanges, before: LayerLayout, after: LayerLayout, has_gradient: bool = True
) -> Boundary:
    """Plan exchanges between two layers. has_gradient: whether their tensor needs a gradient."""
    sums, choices = [], []
    forward = before.inputs > 1
    backward = after.outputs > 1 and has_gradient
    if forward:
        sums.append(exchanges.sums(before.input_digit, before.makes))
    if backward:
        sums.append(exchanges.sums(after.output_digit, after.takes))
    for made, taken in _cuts(before, after, forward, backward):
        fetches = [exchanges.fetch(made, after.takes)]
        if has_gradient:
            fetches.append(exchanges.fetch(taken, before.makes))
        choices.append(tuple(fetches))
    chosen = min(choices, key=_sent)
    sends = [bool(fetch.messages.any()) for fetch in chosen]
    meets = forward or sends[0], backward or (has_gradient and sends[-1])
    return Boundary(tuple(sums), chosen, meets)


def _cuts(
    before: LayerLayout, after: LayerLayout, forward: bool, backward: bool
) -> list[tuple[Form, Form]]:
    """Forms of the output and of the input's gradient after sums, cut by samples or by channels."""
    made = [before.makes]
    if forward:
        made = [before.makes.finer(before.input_digit, of_samples) for of_samples in (True, False)]
    taken = [after.takes]
    if backward:
        taken = [after.takes.finer(after.output_digit, of_samples) for of_samples in (True, False)]
    return [*product(made, taken)]


def _sent(fetches: Sequence[MessageTraffic]) -> tuple[float, float]:
    # The outermost link counts first, because it is the slowest.
    return sum(fetch.far[0] for fetch in fetches), sum(fetch.far[1] for fetch in fetches)


def _count(digits: Sequence[Digit]) -> int:
    return prod(size for _, size in digits)


def _overlap(
    had: NDArray[np.int64], pieces: int, needed: NDArray[np.int64] | np.int64, parts: int
) -> Array:
    start = np.maximum(needed / parts, had / pieces)
    stop = np.minimum((needed + 1) / parts, (had + 1) / pieces)
    return np.where(stop - start > 1e-9, stop - start, 0.0)
