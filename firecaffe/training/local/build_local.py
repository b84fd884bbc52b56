"""Builds local training: replicas, the outer optimizer, the steps, and the parts of its mode."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.exchange.route import find_route
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.solvers.optimizer_state import OptimizerTensors
from firecaffe.solvers.outer_optimizer import Outer
from firecaffe.synchrony.rounds import Rounds, cut_fragments
from firecaffe.training.divergence import Rise, for_replicas
from firecaffe.training.forward import Forward
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.local.replica_steps import Average, LocalStepper, LocalSums
from firecaffe.training.local.replicas import Fragment, Moments, Replica, Replicas, find_moments
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.modes.mode import Linked, ModeParts, Steps, Summed
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.piece import Piece
from firecaffe.training.updates.applier import Applier
from firecaffe.training.updates.every_rank import EveryRank
from firecaffe.training.updates.loss_scale import LossScale
from firecaffe.transport.exchange import Exchange


@dataclass(frozen=True)
class Local:
    rounds: Rounds
    replicas: Replicas
    outer: Outer
    sums: LocalSums
    fragments: Sequence[Fragment]
    moments: Sequence[Moments]

    num_replicas: int
    """The replicas of all ranks."""

    def row(self, steps: int) -> dict[str, int]:
        return {
            "replicas": self.num_replicas,
            "synchronous_steps": min(steps, self.rounds.synchronous),
            "averages": self.rounds.averages(steps),
        }

    def pieces(self, holding: Holding) -> dict[str, Piece]:
        outer = OptimizerTensors(self.replicas.model, self.outer.optimizer)
        return {
            "outer": holding.piece(outer),
            "replica": holding.piece_of_replicas(self.replicas),
        }

    def tails(self, forward: Forward) -> list[list[Tensor]]:
        """Return a replica's tail, all zeros, for an average of each fragment."""
        return [
            [
                self.sums.no_losses(),
                *moments.none(),
                *(forward.buffers.no_changes() if fragment.has_buffers else []),
            ]
            for fragment, moments in zip(self.fragments, self.moments, strict=True)
        ]


def make_local(
    run: Run,
    rank: int,
    update: EveryRank,
) -> Local:
    """Make the replicas of a rank, all with the network's weights. Raises: RecipeError.

    `rank` is its place among those that share out the replicas. `update` makes the synchronous
    steps.
    """
    synchrony, solver, holding = run.recipe.synchrony, run.recipe.solver, update.holding
    forward, everywhere = holding.forward, holding.everywhere
    called, norms = holding.whole_name, update.spread.norms
    make = partial(make_optimizer, everywhere, solver, called=called, norms=norms)
    replicas = Replicas(holding, run.shares[rank], make)
    fragments = _fragments(holding, synchrony.fragments)
    moments = [Moments(fragment.named) for fragment in fragments]
    if synchrony.inner_momentum == "average":
        # An optimizer keeps the same for all parameters. Patterns may match none of a fragment's.
        plain = partial(make_optimizer, config=replace(solver, lr_mult={}, decay_mult={}))
        moments = [find_moments(fragment.named, plain) for fragment in fragments]
    sums = LocalSums(run.rounds.longest_wait, len(forward.task.counted), forward.device)
    rate = None if synchrony.outer_lr == -1 else synchrony.outer_lr
    momentum = None if synchrony.outer_momentum == -1 else synchrony.outer_momentum
    outer = Outer(list(everywhere.values()), synchrony.outer, rate, momentum)
    return Local(run.rounds, replicas, outer, sums, fragments, moments, synchrony.replicas)


def _fragments(holding: Holding, count: int) -> list[Fragment]:
    """Group whole parameters; the last group has the buffers. Raises: RecipeError if too few."""
    sizes, whole = holding.sizes, holding.whole_name
    names = list(sizes)
    cut = cut_fragments(list(sizes.values()), count)
    wholes = [{names[place] for place in places} for places in cut]
    return [
        Fragment({n: p for n, p in holding.named.items() if whole(n) in group}, group is wholes[-1])
        for group in wholes
    ]


def local_stepper(
    local: Local,
    run: Run,
    mesh: Mesh,
    synchronous: EveryStep,
    update: EveryRank,
    ahead: BatchesAhead,
    reducers: Sequence[GradientReducer],
    resources: ExitStack,
) -> LocalStepper:
    """Make what runs the steps; `synchronous` and `update` make those before the first round."""
    synchrony, holding, forward = run.recipe.synchrony, update.holding, update.holding.forward
    sharers = mesh.sharers
    local_reducer = resources.enter_context(_sums_here(local, run, forward))
    order = run.route.order(run.num_leaves, run.shares[sharers.rank])
    forgets = synchrony.inner_momentum == "zero"
    parts = zip(local.fragments, reducers, local.moments, strict=True)
    of_all = local.outer, forgets, update.applier.ema
    averages = [
        Average(fragment, reducer, forward, local.replicas, order, moments, *of_all)
        for fragment, reducer, moments in parts
    ]
    clip = run.recipe.solver.clip_gradients

    def update_of(replica: Replica) -> EveryRank:
        scale = LossScale(forward.scaler, replica.optimizer, forward.device)
        applier = Applier(replica.optimizer, scale)
        return EveryRank(holding, applier, update.spread, clip).connect(local_reducer)

    return LocalStepper(
        synchronous=synchronous,
        ahead=ahead,
        sharers=sharers,
        rounds=local.rounds,
        replicas=local.replicas,
        averages=averages,
        updates={replica.number: update_of(replica) for replica in local.replicas.own},
        optimizer=update.applier.optimizer,
        spread=update.spread,
        leaves=run.micro_batches(sharers.rank),
        num_replicas=local.num_replicas,
        sums=local.sums,
        advice=for_replicas(synchrony, run.recipe.solver.momentum),
    )


def _sums_here(local: Local, run: Run, forward: Forward) -> GradientReducer:
    num_leaves = run.recipe.train.num_micro_batches // run.recipe.synchrony.replicas
    return GradientReducer(
        local.replicas.named,
        list(range(len(local.replicas.named))),
        forward.empty_tail(),
        forward.no_counts(),
        num_leaves,
        Exchange(Group(0, 1, forward.device), find_route("tree", num_leaves, 1)),
        run.recipe.exchange.bucket_bytes,
    )


class LocalParts(ModeParts):
    updates_by_batch = False

    def __init__(self, update: EveryRank, local: Local) -> None:
        super().__init__(update, Rise())
        self._local = local

    def pieces(self) -> dict[str, Piece]:
        return self._local.pieces(self.holding)

    def first_run(self, run: Run, first_step: int) -> Run:
        return run.synchronous if first_step < run.rounds.synchronous else run

    def summed(self) -> Sequence[Summed]:
        local, counts = self._local, self._local.sums.no_counts()
        tails = local.tails(self.holding.forward)
        parts = zip(local.fragments, tails, strict=True)
        return [Summed(fragment.named, tail, counts) for fragment, tail in parts]

    def steps(self, linked: Linked) -> Steps:
        made = linked.step, self.update, linked.ahead, linked.reducers, linked.resources
        return Steps(local_stepper(self._local, linked.run, linked.mesh, *made), linked.ahead)

    def row(self, steps: int) -> Mapping[str, Any] | None:
        return self._local.row(steps)
