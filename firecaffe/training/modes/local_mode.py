"""The mode of local training: replicas, the outer optimizer, and the steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from firecaffe.cluster.group import Group
from firecaffe.exchange.route import find_route
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.solvers.optimizer_state import OptimizerTensors
from firecaffe.solvers.update_rules import Outer
from firecaffe.synchrony.rounds import cut_fragments
from firecaffe.training.divergence import LossRise, replica_advice
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.modes.mode import Linked, ModeParts, ReducerSpec, Steps
from firecaffe.training.modes.replica_steps import Average, LocalStepper, LocalSums
from firecaffe.training.modes.replicas import (
    Fragment,
    Moments,
    Replica,
    Replicas,
    find_moments,
)
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.updates.every_rank import Applier, EveryRank
from firecaffe.transport.exchange import Exchange


class Local(ModeParts):
    updates_by_batch = False
    rise: LossRise

    def __init__(self, run: Run, update: EveryRank, rank: int) -> None:
        """Make the replicas of a rank, all with the network's weights. Raises: RecipeError.

        `rank` is this rank's place among those that divide the replicas. `update` makes the
        synchronous steps.
        """
        super().__init__(update)
        synchrony, solver, holding = run.recipe.synchrony, run.recipe.solver, update.holding
        forward, everywhere = holding.forward, holding.everywhere
        called, norms = holding.whole_name, update.spread.norms
        make = partial(make_optimizer, everywhere, solver, called=called, norms=norms)
        self.rise, self.rounds = LossRise(), run.rounds
        self.num_replicas = synchrony.replicas  # of all ranks
        self.replicas = Replicas(holding, run.shares[rank], make)
        self.fragments = _fragments(holding, synchrony.fragments)
        self.moments = [Moments(fragment.named) for fragment in self.fragments]
        if synchrony.inner_momentum == "average":
            # An optimizer keeps the same kinds of tensors for all parameters. Patterns of the
            # multipliers may match no parameter of a fragment, which would raise.
            plain = partial(make_optimizer, config=replace(solver, lr_mult={}, decay_mult={}))
            self.moments = [find_moments(fragment.named, plain) for fragment in self.fragments]
        counted = len(forward.task.counted)
        self.sums = LocalSums(run.rounds.longest_gap, counted, forward.device)
        rate = None if synchrony.outer_lr == -1 else synchrony.outer_lr
        momentum = None if synchrony.outer_momentum == -1 else synchrony.outer_momentum
        self.outer = Outer(list(everywhere.values()), synchrony.outer, rate, momentum)

    def pieces(self) -> dict[str, Piece]:
        holding, outer = self.holding, OptimizerTensors(self.replicas.model, self.outer.optimizer)
        return {
            "outer": holding.piece(outer),
            "replica": holding.piece_of_replicas(self.replicas),
        }

    def numbers(self) -> dict[str, Numbers]:
        return {"rise": self.rise}

    def first_run(self, run: Run, first_step: int) -> Run:
        return run.synchronous if first_step < self.rounds.synchronous else run

    def summed(self) -> Sequence[ReducerSpec]:
        counts, buffers = self.sums.zero_counts(), self.holding.forward.buffers
        summed = []
        for fragment, moments in zip(self.fragments, self.moments, strict=True):
            changes = buffers.zero_changes() if fragment.has_buffers else []
            tail = [self.sums.zero_losses(), *moments.none(), *changes]
            summed.append(ReducerSpec(fragment.named, tail, counts))
        return summed

    def steps(self, linked: Linked) -> Steps:
        run, update, sharers = linked.run, self.update, linked.mesh.sharers
        synchrony, solver, forward = run.recipe.synchrony, run.recipe.solver, self.holding.forward
        local_reducer = linked.resources.enter_context(self._local_reducer(run))
        order = run.route.order(run.num_leaves, run.shares[sharers.rank])
        averages = [
            Average(
                fragment=fragment,
                reducer=reducer,
                forward=forward,
                replicas=self.replicas,
                order=order,
                moments=moments,
                outer=self.outer,
                forgets=synchrony.inner_momentum == "zero",
                applier=update.applier,
            )
            for fragment, reducer, moments in zip(
                self.fragments, linked.reducers, self.moments, strict=True
            )
        ]

        def update_of(replica: Replica) -> EveryRank:
            optimizer, synchronous = replica.optimizer, update.applier
            scale = synchronous.scale.of(optimizer)
            applier = Applier(optimizer, scale, synchronous.constraints, seed=synchronous.seed)
            return EveryRank(self.holding, applier, update.spread, solver.clip_gradients).connect(
                local_reducer
            )

        stepper = LocalStepper(
            synchronous=linked.step,
            ahead=linked.ahead,
            sharers=sharers,
            rounds=self.rounds,
            replicas=self.replicas,
            averages=averages,
            updates={replica.number: update_of(replica) for replica in self.replicas.own},
            optimizer=update.applier.optimizer,
            spread=update.spread,
            leaves=run.micro_batches(sharers.rank),
            num_replicas=self.num_replicas,
            sums=self.sums,
            advice=replica_advice(synchrony, solver.momentum),
        )
        return Steps(stepper, linked.ahead)

    def _local_reducer(self, run: Run) -> GradientReducer:
        forward, named = self.holding.forward, self.replicas.named
        num_leaves = run.recipe.train.num_micro_batches // self.num_replicas
        return GradientReducer(
            named,
            list(range(len(named))),
            forward.empty_tail(),
            forward.zero_counts(),
            num_leaves,
            Exchange(Group(0, 1, forward.device), find_route("tree", num_leaves, 1)),
            run.recipe.exchange.bucket_bytes,
        )

    def row(self, steps: int) -> Mapping[str, Any] | None:
        return {
            "replicas": self.num_replicas,
            "synchronous_steps": min(steps, self.rounds.synchronous),
            "averages": self.rounds.averages(steps),
        }


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
