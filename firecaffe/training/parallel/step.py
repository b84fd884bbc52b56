"""What a step does besides if the model is split: its ranks agree, and may exchange samples."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from firecaffe.cluster.agree import finish, gather_text
from firecaffe.data import Batch, SampleOrder, num_samples
from firecaffe.data.layout import map_batch
from firecaffe.exchange.leaves import Shares
from firecaffe.recipe.parallel import rows_of
from firecaffe.recipe.run import Run
from firecaffe.training.forward import Forward
from firecaffe.training.outcome import Outcome, Timings, raise_not_finite
from firecaffe.training.parallel.coded import PartCodec
from firecaffe.training.parallel.head import Head
from firecaffe.training.parallel.network import SplitNetwork

STAND_IN_SAMPLES = 2
"""A batch normalization refuses one."""


def stand_in_of(first: Batch) -> Batch:
    """What a rank computes where its micro-batch is empty and the others of its row are not: they
    wait for it at each split layer, forward and backward. first: a micro-batch of the training, for
    what the network and the loss take is known of its samples alone.
    """
    return map_batch(lambda each: each[:STAND_IN_SAMPLES].clone(), first)


def make_rows(
    run: Run,
    split: SplitNetwork,
    named: Mapping[str, nn.Parameter],
    forward: Forward,
    stand_in: Batch,
    codec: PartCodec | None,
) -> "Rows":
    """named: the parameters that are trained. codec: what encodes gradients of parts by themselves,
    if something does.
    """
    mesh, own_samples = split.mesh, split.own_samples
    go_along = partial(forward.go_along, *stand_in)
    if own_samples is None:
        return Rows(split, run.order, None, [], go_along, 0)
    size = mesh.row.world_size
    first = mesh.world.rank // size * size
    leaves = [run.micro_batches(rank) for rank in range(first, first + size)]
    head = Head(split, named, run, codec)
    return Rows(split, run.order, head, leaves, go_along, num_samples(*stand_in))


class Rows:
    """The ranks of a row, in a step."""

    def __init__(
        self,
        split: SplitNetwork,
        order: SampleOrder,
        head: Head | None,
        leaves: Sequence[Sequence[int]],
        go_along: Callable[[int, int], None],
        stand_in_samples: int,
    ) -> None:
        """head: the split layers, if ranks have samples of their own. leaves: the micro-batches of
        each rank of the row. go_along: computes the stand-in for an empty one, of so many samples.
        """
        self._split, self._order, self._head, self._leaves = split, order, head, leaves
        self._go_along, self._stand_in_samples = go_along, stand_in_samples
        self.group, self._places = split.mesh.row, split.names.places
        self.norms = split.norms
        """Those of the whole network's tensors."""

    def share_out(self, shares: Shares, order: Callable[[range], list[int]]) -> None:
        """Gives ranks with samples of their own other ones, from the next step on. order: that in
        which a rank computes its share.
        """
        if self._head is not None:
            self._head.share_out(shares)
            row = self._split.mesh.world.rank // len(self._leaves)
            self._leaves = [order(share) for share in rows_of(shares, len(self._leaves))[row]]

    def begin_step(self) -> None:
        self._before, self._early_s = self._seconds, 0.0
        if self._head is not None:
            self._head.begin_step()

    def outcome(self) -> Callable[..., "SplitOutcome"]:
        """Makes this step's outcome, once its exchanges are done."""
        row_s, column_s = (
            now - before for now, before in zip(self._seconds, self._before, strict=True)
        )
        early_s = self._early_s
        return partial(SplitOutcome, row_s=row_s, early_s=early_s, column_s=column_s - early_s)

    @property
    def _seconds(self) -> tuple[float, float]:
        return self._split.group.seconds, 0.0 if self._head is None else self._head.seconds

    def begin(self, step: int, number: int) -> None:
        """Begins a micro-batch on each rank, the same number of each share. One that is empty is
        done with then.
        """
        own = self._split.own_samples
        if own is None:
            return
        self._samples = [
            self._order.samples_in_leaf(step, leaves[number]) for leaves in self._leaves
        ]
        own.begin([each or self._stand_in_samples for each in self._samples])
        rank = self._split.mesh.row.rank
        if any(self._samples) and not self._samples[rank]:
            self._go_along(step, self._leaves[rank][number])

    def end(self, step: int, number: int, apply: Callable[[], None]) -> None:
        """Takes the gradients that the micro-batches have left. apply: updates what has gradients;
        it is called if these are all of an update of the split layers that is not the step's last.
        """
        own, head = self._split.own_samples, self._head
        if own is None or head is None:
            return
        kept = zip(self._samples, own.take_gradients(), strict=True)
        gradients = [each if samples else {} for samples, each in kept]
        head.add([leaves[number] for leaves in self._leaves], gradients)
        update, rest = divmod(number + 1, len(self._leaves[0]) // head.updates)
        if rest or update == head.updates:
            return
        before_s = head.seconds
        if head.finish(step, update - 1):
            apply()
        self._early_s += head.seconds - before_s
        head.begin()

    def finish_step(
        self, step: int, finite: Tensor, names: Sequence[str]
    ) -> tuple[Tensor, Sequence[str]]:
        """Leaves the mean gradients of what only this part of the ranks sums. finite, names: of the
        others. Returns those of all, by the whole tensors' names, in the network's order.
        """
        if self._head is not None:
            self._head.finish(step, self._head.updates - 1)
            finite, names = torch.cat([finite, self._head.finite]), [*names, *self._head.names]
        called = [self._split.called(each) for each in names]
        in_order = sorted(range(len(called)), key=lambda index: self._places[called[index]])
        return finite[in_order], [called[index] for index in in_order]

    def agree(self, outcome: Outcome, votes: Tensor) -> Tensor:
        """The votes of the whole row. One rank of it alone may see what is not finite.

        Raises: NotFiniteError on all ranks; PeerLostError.
        """
        outcome.wait()
        row, problem = self._split.mesh.row, outcome.problem
        if row.group is not None:
            told = torch.cat([votes, votes.new_tensor([float(bool(problem))])])
            finish(row, partial(dist.all_reduce, told, group=row.group))
            votes = told[:-1]
            if told[-1] > 0:
                problem = self._first_problem(outcome)
        raise_not_finite(problem, outcome.step)
        return votes

    def _first_problem(self, outcome: Outcome) -> str:
        """What one worker would tell, of the gradients of all ranks of the row."""
        row, is_finite = self._split.mesh.row, outcome.is_finite.tolist()
        own = [each for each, fine in zip(outcome.names, is_finite, strict=True) if not fine]
        told = [json.loads(text) for text in gather_text(row, json.dumps(own))]
        names = sorted({each for names in told for each in names}, key=self._places.__getitem__)
        of_row = replace(outcome, names=names, is_finite=torch.zeros(len(names), dtype=torch.bool))
        return next(each for each in gather_text(row, of_row.problem) if each)


@dataclass(frozen=True)
class SplitOutcome(Outcome):
    """The outcome of a step, with exchanges that no computation hides."""

    row_s: float
    """Seconds of those between layers."""
    early_s: float
    """Of those of the gradients of parts, for updates before the last micro-batch."""
    column_s: float
    """Of those of the gradients of parts, after backward."""

    def _timings(self) -> Timings:
        found = super()._timings()
        early_s = self.row_s + self.early_s
        waited_s = early_s + self.column_s
        return replace(
            found,
            compute_s=found.compute_s - early_s,
            exposed_communication_s=found.exposed_communication_s + waited_s,
            exchange_s=found.exchange_s + waited_s,
            update_s=found.update_s - self.column_s,
            activations_s=self.row_s,
        )
