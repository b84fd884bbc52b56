"""Executes a schedule over a group: this rank's sends, receives and additions, round by round.

A vector is cut into pieces that go through the schedule in parallel: while one is being added, or
waits for a slow peer, the others keep both directions of the link busy. Receives are posted some
rounds ahead. Whatever arrives first, every rank waits in the order (round, piece), so no two can
wait for each other, and the sums are those of the schedule.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.exchange.leaves import tree_sum
from firecaffe.exchange.proof import check_round
from firecaffe.exchange.schedule import VECTOR, Schedule, Transfer

# A Gloo sender waits for a notice that its receiver is ready, and the notice queues behind the
# receiver's own sends. So receives are posted early. But if all links are busy, a peer with an
# early notice sends while the previous peer still sends, and the switch drops packets of both.
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
"""The number of a round, and one rank's sends and arrivals in it."""


def rounds_of_rank(schedule: Schedule, rank: int) -> list[RankRound]:
    """Return a rank's work in each round. Raises: ValueError if it would depend on timing."""
    # Between any two ranks, sends and receives have the same order, so they match without labels.
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
    # Kept parts have their own scratch, before the scratch of the other rounds.
    offset_of_kept = 0
    kept_parts: dict[tuple[int, int, bool], dict[int, int]] = defaultdict(dict)
    after_kept = sum(t.num_elements for transfers in kept for t in transfers)
    needed = [
        sum(t.num_elements for t in transfers if t not in before)
        for transfers, before in zip(over_scratch, kept, strict=True)
    ]
    # A round's scratch is free again before receives that are posted ahead need the same place.
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
        return 0  # the memory into which later rounds receive is still in use
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


PeerMessage = tuple[bool, int, Tensor]
"""A message: (whether it is a send, the peer, the elements)."""


class PendingWork(Protocol):
    def wait(self) -> object:
        """Return when its memory is free again. Raises: PeerLostError."""


StartMessages = Callable[[Sequence[PeerMessage]], Sequence[PendingWork]]
"""Starts messages; returns a `PendingWork` for each. Raises: PeerLostError."""


@dataclass
class ActivePiece:
    vector: Tensor
    rounds: Sequence[RankRound]
    scratch: Tensor
    start: StartMessages
    rank: int
    at_once: bool = False
    """Whether all messages of a round start in one call, and none before the round is due."""
    inputs: Mapping[int, Tensor] = field(default_factory=dict)
    """This rank's inputs, by number; they may be changed if this rank adds them."""
    sum_inputs: Callable[[Sequence[Tensor]], Tensor] | None = None
    """A function of one slice of all inputs, in order, to its total; may add in place."""
    _posted: int = 0
    _receiving: dict[int, list[PendingWork]] = field(default_factory=dict)
    _sending: list[tuple[int, int, PendingWork]] = field(default_factory=list)

    def begin(self, index: int) -> None:
        """Post the receives of this round and of those ahead, and send what is due."""
        round_ = self.rounds[index]
        numbers, messages = self._receives_to_post(index)
        messages += [
            (True, peer, self.inputs.get(reads, self.vector)[start:stop])
            for peer, start, stop, reads in round_.sends
        ]
        works = self.start(messages)
        self._note_posted(numbers, works)
        for (_, start, stop, _), work in zip(round_.sends, works[len(numbers) :], strict=True):
            self._sending.append((start, stop, work))

    def post(self) -> None:
        """Post the first receives, unless they must start with the first sends."""
        if self.rounds and not self.at_once:
            numbers, messages = self._receives_to_post(0)
            self._note_posted(numbers, self.start(messages))

    def _receives_to_post(self, index: int) -> tuple[list[int], list[PeerMessage]]:
        messages: list[PeerMessage] = []
        numbers = []
        ahead = 0 if self.at_once else self.rounds[index].ahead
        while self._posted < len(self.rounds) and self._posted <= index + ahead:
            for receive in self.rounds[self._posted].receives:
                length = receive.stop - receive.start
                if receive.scratch is None:
                    self._finish_sends(receive.start, receive.stop)
                    target = self.vector[receive.start : receive.stop]
                else:
                    target = self.scratch[receive.scratch : receive.scratch + length]
                messages.append((False, receive.source, target))
                numbers.append(self._posted)
            self._receiving[self._posted] = []
            self._posted += 1
        return numbers, messages

    def _note_posted(self, numbers: Sequence[int], works: Sequence[PendingWork]) -> None:
        for number, work in zip(numbers, works, strict=False):
            self._receiving[number].append(work)

    def finish(self, index: int) -> None:
        """Wait for the round's messages and do its additions."""
        round_ = self.rounds[index]
        for work in self._receiving.pop(index):
            work.wait()
        for addition in round_.additions:
            self._finish_sends(addition.start, addition.stop)
            self._add(addition)
        for start, stop, offset in round_.detours:
            self._finish_sends(start, stop)
            self.vector[start:stop] = self.scratch[offset : offset + stop - start]

    def close(self) -> None:
        self._finish_sends(0, self.vector.numel())

    def _finish_sends(self, start: int, stop: int) -> None:
        # The elements that are being sent must not change.
        under_way = []
        for sent_start, sent_stop, work in self._sending:
            if sent_start < stop and start < sent_stop:
                work.wait()
            else:
                under_way.append((sent_start, sent_stop, work))
        self._sending = under_way

    def _add(self, addition: Addition) -> None:
        target = self.vector[addition.start : addition.stop]
        length = addition.stop - addition.start
        if addition.of_inputs:
            assert self.sum_inputs is not None
            by_number = {
                number: self.scratch[offset : offset + length]
                for number, offset in addition.parts.items()
            }
            by_number |= {
                number: vector[addition.start : addition.stop]
                for number, vector in self.inputs.items()
            }
            target.copy_(self.sum_inputs([by_number[number] for number in sorted(by_number)]))
            return
        terms = [
            (source, self.scratch[offset : offset + length])
            for source, offset in addition.parts.items()
        ]
        in_order = [part for _, part in sorted([*terms, (self.rank, target)])]
        # The sum of two is the common case; it needs no second pass over memory.
        if len(in_order) == 2:
            torch.add(in_order[0], in_order[1], out=target)
            return
        total = tree_sum(in_order, lambda left, right: left.add_(right))
        if total is not target:
            target.copy_(total)


def execute(pieces: Sequence[ActivePiece]) -> None:
    """Carry out one rank's part of the pieces' schedules, in place."""
    for piece in pieces:
        piece.post()
    for piece in pieces:
        if piece.rounds:
            piece.begin(0)
    order = sorted(
        (round_.number, which, index)
        for which, piece in enumerate(pieces)
        for index, round_ in enumerate(piece.rounds)
    )
    for _, which, index in order:
        piece = pieces[which]
        piece.finish(index)
        if index + 1 < len(piece.rounds):
            piece.begin(index + 1)
    for piece in pieces:
        piece.close()


@dataclass(frozen=True, slots=True)
class PeerWork:
    work: Work
    world: Group

    def wait(self) -> None:
        with peers_may_be_lost(self.world):
            self.work.wait()


def one_by_one(world: Group, group: ProcessGroup, tag: int) -> StartMessages:
    """Start messages one by one, for a backend that matches tags, such as Gloo."""

    def start(messages: Sequence[PeerMessage]) -> list[PeerWork]:
        with peers_may_be_lost(world):
            works = [
                group.send([tensor], peer, tag) if is_send else group.recv([tensor], peer, tag)
                for is_send, peer, tensor in messages
            ]
        return [PeerWork(work, world) for work in works]

    return start


def in_one_call(world: Group, group: ProcessGroup) -> StartMessages:
    """Start a round's messages in one call, as NCCL needs it."""

    # NCCL matches by order, and its Works stand for the whole call; so nothing is posted ahead.
    def start(messages: Sequence[PeerMessage]) -> list[PeerWork]:
        if not messages:
            return []
        operations = [
            P2POp(dist.isend if is_send else dist.irecv, tensor, group_peer=peer, group=group)
            for is_send, peer, tensor in messages
        ]
        with peers_may_be_lost(world):
            works = [PeerWork(work, world) for work in dist.batch_isend_irecv(operations)]
        return works if len(works) == len(messages) else [works[-1]] * len(messages)

    return start
