"""Builds what local training has beside others: replicas, the outer optimizer, the steps."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import World
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.exchange.route import find_route
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.solvers.optimizer_state import OptimizerTensors
from firecaffe.solvers.outer import Outer
from firecaffe.synchrony.fragments import cut_fragments
from firecaffe.synchrony.rounds import Rounds
from firecaffe.training.forward import Forward
from firecaffe.training.local.average import Average
from firecaffe.training.local.moments import Moments, find_moments
from firecaffe.training.local.replicas import Fragment, Replicas
from firecaffe.training.local.stepper import LocalStepper
from firecaffe.training.local.sums import LocalSums
from firecaffe.training.piece import Piece
from firecaffe.training.step import Stepper
from firecaffe.transport.exchange import Exchange


@dataclass(frozen=True)
class Local:
    """What a training of replicas has beside others, before it is connected to other ranks."""

    rounds: Rounds
    replicas: Replicas
    outer: Outer
    sums: LocalSums
    fragments: Sequence[Fragment]
    moments: Sequence[Moments]
    """Of each fragment."""

    num_replicas: int
    """Of all ranks."""

    def row(self, steps: int) -> dict[str, int]:
        """What the record of a training of so many steps says of it."""
        return {
            "replicas": self.num_replicas,
            "synchronous_steps": min(steps, self.rounds.synchronous),
            "averages": self.rounds.averages(steps),
        }

    @property
    def pieces(self) -> dict[str, Piece]:
        """The pieces of the state."""
        outer = OptimizerTensors(self.replicas.model, self.outer.optimizer)
        return {"outer": outer, "replica": self.replicas}

    def tails(self, forward: Forward) -> list[list[Tensor]]:
        """The tail of a replica, in an average of each fragment."""
        return [
            [
                self.sums.no_losses(),
                *moments.none(),
                *(forward.buffers.no_changes() if fragment.has_buffers else []),
            ]
            for fragment, moments in zip(self.fragments, self.moments, strict=True)
        ]


def make_local(run: Run, rank: int, forward: Forward, named: dict[str, nn.Parameter]) -> Local:
    """Makes the replicas of a rank, all with the network's weights. Raises: RecipeError."""
    words, solver = run.recipe.synchrony, run.recipe.solver
    replicas = Replicas(
        forward.model, named, run.shares[rank], lambda: make_optimizer(named, solver)
    )
    fragments = _fragments(named, words.fragments)
    moments = [Moments(each.named) for each in fragments]
    if words.inner_momentum == "average":
        make = partial(make_optimizer, config=solver)
        moments = [find_moments(each.named, make) for each in fragments]
    sums = LocalSums(run.rounds.longest_wait, len(forward.task.counted), forward.device)
    rate = None if words.outer_lr == -1 else words.outer_lr
    momentum = None if words.outer_momentum == -1 else words.outer_momentum
    outer = Outer(list(named.values()), words.outer, rate, momentum)
    return Local(run.rounds, replicas, outer, sums, fragments, moments, words.replicas)


def _fragments(named: dict[str, nn.Parameter], count: int) -> list[Fragment]:
    """Raises: RecipeError if there are fewer parameters. Buffers go with the last one."""
    names = list(named)
    cut = cut_fragments([parameter.numel() for parameter in named.values()], count)
    return [
        Fragment({names[place]: named[names[place]] for place in places}, places is cut[-1])
        for places in cut
    ]


def local_stepper(
    local: Local,
    run: Run,
    world: World,
    synchronous: Stepper,
    ahead: BatchesAhead,
    reducers: Sequence[GradientReducer],
    resources: ExitStack,
) -> LocalStepper:
    """Makes what runs the steps. synchronous: for those before the first round. reducers: of each
    fragment of the replicas of all ranks. resources: takes what has to be closed.
    """
    words, forward = run.recipe.synchrony, synchronous.forward
    each = run.recipe.train.num_micro_batches // words.replicas
    alone = Exchange(Group(0, 1, world.device), find_route("tree", each, 1))
    own = GradientReducer(
        local.replicas.named,
        list(range(len(local.replicas.named))),
        forward.empty_tail(),
        forward.no_counts(),
        each,
        alone,
        run.recipe.exchange.bucket_bytes,
    )
    resources.enter_context(own)
    order = run.route.order(run.num_leaves, run.shares[world.rank])
    forgets = words.inner_momentum == "zero"
    parts = zip(local.fragments, reducers, local.moments, strict=True)
    averages = [
        Average(fragment, reducer, forward, local.replicas, order, local.outer, moments, forgets)
        for fragment, reducer, moments in parts
    ]
    return LocalStepper(
        synchronous=synchronous,
        ahead=ahead,
        world=world,
        rounds=local.rounds,
        replicas=local.replicas,
        averages=averages,
        own=own,
        leaves=run.micro_batches(world.rank),
        num_replicas=local.num_replicas,
        sums=local.sums,
    )
