"""A schedule as one rank sees it: its sends, receives and additions, round by round."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from firecaffe.exchange.proof import check_round
from firecaffe.exchange.schedule import VECTOR, Schedule, Transfer

AHEAD = 2
"""The most rounds for which receives are posted before they are due. A Gloo sender waits until it
hears that its receiver is ready, and that word queues behind whatever the receiver is sending. But
if all links are busy, a peer that is told so early sends while the one before it still does, and
the switch drops of both."""


@dataclass(frozen=True, slots=True)
class Receive:
    """A receive of elements [start, stop) from `source`: into the vector, or into scratch."""

    source: int
    start: int
    stop: int
    scratch: int | None


@dataclass(frozen=True, slots=True)
class Addition:
    """The addition of the parts that arrive for one slice in one round."""

    start: int
    stop: int
    parts: dict[int, int]
    """The places of the parts in scratch, by source, or by the number of an input."""
    of_inputs: bool = False
    """Whether this rank's inputs are added to them; else its vector."""


@dataclass(frozen=True, slots=True)
class RankRound:
    """One round as one rank sees it."""

    number: int
    sends: list[tuple[int, int, int, int]]
    """The sends: (destination, start, stop, what is read: an input's number, or the vector). The
    next rank is first, so that not all send to one at a time."""
    receives: list[Receive]
    """The receives in the order in which others send them."""
    ahead: int
    """The number of rounds after this one whose receives are posted with its own."""
    additions: list[Addition]
    detours: list[tuple[int, int, int]]
    """The receives through scratch, since their place is still in use when they are posted:
    (start, stop, where in scratch)."""


SendsAndReceives = tuple[int, list[Transfer], list[Transfer]]
"""A round of one rank: (its number, what the rank sends, what arrives)."""


def rounds_of_rank(schedule: Schedule, rank: int) -> list[RankRound]:
    """The work of one rank in each round in which it has any.

    Between each two ranks sends and receives stand in one order, so they match without labels.

    Raises: ValueError if what the rank is to do would depend on timing.
    """
    own: list[SendsAndReceives] = []
    for number, transfers in schedule.rounds_of(rank):
        check_round(number, transfers, schedule)
        sent = [t for t in transfers if t.source == rank]
        arriving = [t for t in transfers if t.destination == rank]
        own.append((number, sent, arriving))
    world_size = schedule.world_size
    kept = [[t for t in arriving if number < schedule.early_rounds] for number, _, arriving in own]
    over_scratch = [
        {t for t in arriving if t.reduce or _is_in_use(own, index, t)}
        for index, (_, _, arriving) in enumerate(own)
    ]
    # What is kept has scratch of its own, before that of the other rounds.
    offset_of_kept = 0
    kept_parts: dict[tuple[int, int, bool], dict[int, int]] = defaultdict(dict)
    after_kept = sum(t.num_elements for transfers in kept for t in transfers)
    needed = [
        sum(t.num_elements for t in transfers if t not in before)
        for transfers, before in zip(over_scratch, kept, strict=True)
    ]
    # A round's scratch is free again when the receives of the rounds ahead of it need theirs.
    stride = max(needed, default=0)
    rounds: list[RankRound] = []
    used = 0
    for index, (number, sent, arriving) in enumerate(own):
        sent.sort(key=lambda t: ((t.destination - rank) % world_size, t.reads))
        arriving.sort(key=lambda t: ((rank - t.source) % world_size, t.reads))
        offset = after_kept + stride * (used % (AHEAD + 1))
        used += needed[index] > 0
        receives = []
        parts: dict[tuple[int, int, bool], dict[int, int]] = defaultdict(dict)
        detours = []
        for t in arriving:
            if number < schedule.early_rounds:
                receives.append(Receive(t.source, t.start, t.stop, offset_of_kept))
                kept_parts[t.start, t.stop, True][t.reads] = offset_of_kept
                offset_of_kept += t.num_elements
                continue
            if t not in over_scratch[index]:
                receives.append(Receive(t.source, t.start, t.stop, None))
                continue
            receives.append(Receive(t.source, t.start, t.stop, offset))
            if t.reduce and t.reads == VECTOR:
                parts[t.start, t.stop, False][t.source] = offset
            elif t.reduce:
                where = t.start, t.stop, True
                parts[where] |= {**kept_parts.pop(where, {}), t.reads: offset}
            else:
                detours.append((t.start, t.stop, offset))
            offset += t.num_elements
        rounds.append(
            RankRound(
                number,
                [(t.destination, t.start, t.stop, t.reads) for t in sent],
                receives,
                _ahead(own, index, schedule.early_rounds),
                [
                    Addition(start, stop, where, of_inputs)
                    for (start, stop, of_inputs), where in parts.items()
                ],
                detours,
            )
        )
    return rounds


def scratch_elements(rounds: list[RankRound]) -> int:
    """The elements of scratch that the rounds need."""
    return max(
        (
            receive.scratch + receive.stop - receive.start
            for round_ in rounds
            for receive in round_.receives
            if receive.scratch is not None
        ),
        default=0,
    )


def sent_elements(rounds: list[RankRound]) -> int:
    """The elements that the rank sends in all."""
    return sum(stop - start for round_ in rounds for _, start, stop, _ in round_.sends)


def _ahead(own: Sequence[SendsAndReceives], index: int, early_rounds: int) -> int:
    """The number of rounds after round `index` whose receives are posted with it: those that
    receive from its peers only; all, if this rank sends nothing in it and so leaves its peers time.
    None go with an early round, for the memory of later ones is another's as yet.
    """
    number, sent, arriving = own[index]
    if number < early_rounds:
        return 0
    peers = {t.destination for t in sent} | {t.source for t in arriving}
    following = own[index + 1 : index + 1 + AHEAD]
    if not sent:
        return len(following)
    return sum(1 for _ in takewhile(lambda o: {t.source for t in o[2]} <= peers, following))


def _is_in_use(own: Sequence[SendsAndReceives], index: int, copy: Transfer) -> bool:
    """Whether a round in which the receive is posted already still touches its slice."""
    return any(
        touched.start < copy.stop and copy.start < touched.stop
        for _, sent, arriving in own[max(0, index - AHEAD) : index]
        for touched in (*(t for t in sent if t.reads == VECTOR), *arriving)
    )
