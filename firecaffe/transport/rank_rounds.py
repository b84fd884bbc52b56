"""A schedule as one rank sees it: its sends, receives and additions, round by round."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from firecaffe.exchange.proof import check_round
from firecaffe.exchange.schedule import VECTOR, Schedule, Transfer

# A Gloo sender waits until it hears that its receiver is ready, and that word queues behind the
# receiver's own sends. But if all links are busy, a peer that hears it so early sends while the one
# before it still does, and the switch drops packets of both.
AHEAD = 2
"""Most rounds for which receives are posted before they are due."""


@dataclass(frozen=True, slots=True)
class Receive:
    """A receive of elements [start, stop) from `source`, into scratch or (None) the vector."""

    source: int
    start: int
    stop: int
    scratch: int | None


@dataclass(frozen=True, slots=True)
class Addition:
    start: int
    stop: int
    parts: dict[int, int]
    """The places of the parts in scratch, by source, or by the number of an input."""
    of_inputs: bool = False
    """Whether this rank's inputs are added to them; else its vector."""


@dataclass(frozen=True, slots=True)
class RankRound:
    number: int
    sends: list[tuple[int, int, int, int]]
    """Sends (destination, start, stop, input or VECTOR), the next rank first against incast."""
    receives: list[Receive]
    """The receives in the order in which others send them."""
    ahead: int
    """The number of rounds after this one whose receives are posted with its own."""
    additions: list[Addition]
    detours: list[tuple[int, int, int]]
    """Receives (start, stop, place in scratch) whose target is in use when they are posted."""


SendsAndReceives = tuple[int, list[Transfer], list[Transfer]]
"""A round of one rank: (its number, its sends, its arrivals)."""


def rounds_of_rank(schedule: Schedule, rank: int) -> list[RankRound]:
    """Return a rank's work in each round. Raises: ValueError if it would depend on timing."""
    # Between each two ranks, sends and receives are in one order, so they match without labels.
    local_rounds: list[SendsAndReceives] = []
    for number, transfers in schedule.rounds_of(rank):
        check_round(number, transfers, schedule)
        sent = [t for t in transfers if t.source == rank]
        arriving = [t for t in transfers if t.destination == rank]
        local_rounds.append((number, sent, arriving))
    world_size = schedule.world_size
    kept = [
        [t for t in arriving if number < schedule.early_rounds]
        for number, _, arriving in local_rounds
    ]
    over_scratch = [
        {t for t in arriving if t.reduce or _is_in_use(local_rounds, index, t)}
        for index, (_, _, arriving) in enumerate(local_rounds)
    ]
    # Parts that are kept have their own scratch, before that of the other rounds.
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
    for index, (number, sent, arriving) in enumerate(local_rounds):
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
                _ahead(local_rounds, index, schedule.early_rounds),
                [
                    Addition(start, stop, where, of_inputs)
                    for (start, stop, of_inputs), where in parts.items()
                ],
                detours,
            )
        )
    return rounds


def scratch_elements(rounds: list[RankRound]) -> int:
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
    return sum(stop - start for round_ in rounds for _, start, stop, _ in round_.sends)


def _ahead(local_rounds: Sequence[SendsAndReceives], index: int, early_rounds: int) -> int:
    number, sent, arriving = local_rounds[index]
    if number < early_rounds:
        return 0  # the memory of later rounds is still another's
    peers = {t.destination for t in sent} | {t.source for t in arriving}
    following = local_rounds[index + 1 : index + 1 + AHEAD]
    if not sent:  # this rank leaves its peers time
        return len(following)
    return sum(1 for _ in takewhile(lambda o: {t.source for t in o[2]} <= peers, following))


def _is_in_use(local_rounds: Sequence[SendsAndReceives], index: int, copy: Transfer) -> bool:
    return any(
        touched.start < copy.stop and copy.start < touched.stop
        for _, sent, arriving in local_rounds[max(0, index - AHEAD) : index]
        for touched in (*(t for t in sent if t.reads == VECTOR), *arriving)
    )
