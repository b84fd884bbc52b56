"""A schedule as one rank sees it: its sends, receives and additions, round by round."""

from collections import defaultdict
from dataclasses import dataclass

from firecaffe.exchange.schedule import Schedule, Transfer

AHEAD = 2
"""Rounds for which receives are posted before they are due, so that no message waits for its
receiver to look up."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Elements [start, stop) from `source`: into the vector, or into scratch to be added."""

    source: int
    start: int
    stop: int
    scratch: int | None


@dataclass(frozen=True, slots=True)
class Addition:
    """The parts that arrive for one slice in one round: where in scratch, by source."""

    start: int
    stop: int
    parts: dict[int, int]


@dataclass(frozen=True, slots=True)
class RankRound:
    """One round as one rank sees it."""

    number: int
    sends: list[tuple[int, int, int]]
    """(destination, start, stop), the next rank first: so not all send to one at a time."""
    receives: list[Receive]
    """In the order in which others send them."""
    additions: list[Addition]
    postable: int
    """From which of this rank's rounds on, counted from 0, its receives may be posted."""


def rounds_of_rank(schedule: Schedule, rank: int) -> list[RankRound]:
    """What one rank does in each round in which it does anything.

    Between each two ranks sends and receives stand in one order, so they match without labels.
    """
    own: list[tuple[int, list[Transfer], list[Transfer]]] = []
    for number, round_ in enumerate(schedule.rounds):
        sent = [t for t in round_ if t.source == rank]
        arriving = [t for t in round_ if t.destination == rank]
        if sent or arriving:
            own.append((number, sent, arriving))
    world_size = schedule.world_size
    part_elements = [sum(t.num_elements for t in arriving if t.reduce) for _, _, arriving in own]
    # A round's scratch is free again when the receives of the rounds ahead of it need theirs.
    stride = max(part_elements, default=0)
    rounds: list[RankRound] = []
    reducing = 0
    for index, (number, sent, arriving) in enumerate(own):
        sent.sort(key=lambda t: (t.destination - rank) % world_size)
        arriving.sort(key=lambda t: (rank - t.source) % world_size)
        offset = stride * (reducing % (AHEAD + 1))
        reducing += part_elements[index] > 0
        receives = []
        parts: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for t in arriving:
            receives.append(Receive(t.source, t.start, t.stop, offset if t.reduce else None))
            if t.reduce:
                parts[t.start, t.stop][t.source] = offset
                offset += t.num_elements
        rounds.append(
            RankRound(
                number,
                [(t.destination, t.start, t.stop) for t in sent],
                receives,
                [Addition(*slice_, by_source) for slice_, by_source in parts.items()],
                _postable(own, index),
            )
        )
    return rounds


def scratch_elements(rounds: list[RankRound]) -> int:
    """How much scratch the rounds need."""
    return max(
        (
            offset + addition.stop - addition.start
            for round_ in rounds
            for addition in round_.additions
            for offset in addition.parts.values()
        ),
        default=0,
    )


def _postable(own: list[tuple[int, list[Transfer], list[Transfer]]], index: int) -> int:
    """The first round after the last one that touches what this one's receives overwrite."""
    copies = [t for t in own[index][2] if not t.reduce]
    for earlier in range(index - 1, max(-1, index - 1 - AHEAD), -1):
        _, sent, arriving = own[earlier]
        if any(
            touched.start < copy.stop and copy.start < touched.stop
            for copy in copies
            for touched in (*sent, *arriving)
        ):
            return earlier + 1
    return max(0, index - AHEAD)
