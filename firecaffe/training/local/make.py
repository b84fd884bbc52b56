"""Builds what local training has beside others: replicas, the outer optimizer, the steps."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from firecaffe.cluster.group import Group
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
from firecaffe.training.local.names import NamesOfReplicas
from firecaffe.training.local.replicas import Fragment, Replicas
from firecaffe.training.local.rows import local_row
from firecaffe.training.local.stepper import LocalStepper
from firecaffe.training.local.sums import LocalSums
from firecaffe.training.parallel.held import RowNetwork
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.pieces import InParts
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

    def pieces(self, held: RowNetwork | None) -> dict[str, Piece]:
        """The pieces of the state. held: a network that is held by a row of ranks."""
        outer = OptimizerTensors(self.replicas.model, self.outer.optimizer)
        if held is None:
            return {"outer": outer, "replica": self.replicas}
        of_replicas = NamesOfReplicas(held.names)
        return {
            "outer": InParts(outer, held.names),
            "replica": InParts(self.replicas, of_replicas),
        }

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


def make_local(
    run: Run,
    rank: int,
    forward: Forward,
    model: nn.Module,
    of_all: dict[str, nn.Parameter],
    held: RowNetwork | None,
) -> Local:
    """Makes the replicas of a rank, all with the network's weights.

    Args:
        rank: The place of this one among those that share out the replicas.
        forward: The network's.
        model: The network, in which this rank's tensors have their names.
        of_all: The parameters that are trained; those of other ranks on the meta device.
        held: What the network has beside if it is held by a row of ranks.

    Raises: RecipeError.
    """
    words, solver = run.recipe.synchrony, run.recipe.solver
    named = {name: each for name, each in of_all.items() if not each.is_meta}
    called = str if held is None else held.called
    make = partial(make_optimizer, of_all, solver, called=called)
    replicas = Replicas(model, named, run.shares[rank], make, held)
    fragments = _fragments(named, words.fragments, held)
    moments = [Moments(each.named) for each in fragments]
    if words.inner_momentum == "average":
        # What an optimizer keeps is the same for all parameters; patterns may match none of these.
        plain = partial(make_optimizer, config=replace(solver, lr_mult={}, decay_mult={}))
        moments = [find_moments(each.named, plain) for each in fragments]
    sums = LocalSums(run.rounds.longest_wait, len(forward.task.counted), forward.device)
    rate = None if words.outer_lr == -1 else words.outer_lr
    momentum = None if words.outer_momentum == -1 else words.outer_momentum
    outer = Outer(list(of_all.values()), words.outer, rate, momentum)
    return Local(run.rounds, replicas, outer, sums, fragments, moments, words.replicas)


def _fragments(
    named: dict[str, nn.Parameter], count: int, held: RowNetwork | None
) -> list[Fragment]:
    """Whole parameters together, whoever holds which parts of them. Buffers go with the last one.

    Raises: RecipeError if there are fewer parameters.
    """
    sizes = {name: parameter.numel() for name, parameter in named.items()}
    whole: Callable[[str], str] = str
    if held is not None:
        sizes, whole = dict(held.sizes), held.called
    names = list(sizes)
    cut = cut_fragments(list(sizes.values()), count)
    wholes = [{names[place] for place in places} for places in cut]
    return [
        Fragment({n: p for n, p in named.items() if whole(n) in each}, each is wholes[-1])
        for each in wholes
    ]


def local_stepper(
    local: Local,
    run: Run,
    mesh: Mesh,
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
    sharers = mesh.sharers
    alone = Exchange(Group(0, 1, sharers.device), find_route("tree", each, 1))
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
    order = run.route.order(run.num_leaves, run.shares[sharers.rank])
    forgets = words.inner_momentum == "zero"
    parts = zip(local.fragments, reducers, local.moments, strict=True)
    averages = [
        Average(fragment, reducer, forward, local.replicas, order, local.outer, moments, forgets)
        for fragment, reducer, moments in parts
    ]
    return LocalStepper(
        synchronous=synchronous,
        ahead=ahead,
        sharers=sharers,
        row=local_row(synchronous, mesh.row),
        rounds=local.rounds,
        replicas=local.replicas,
        averages=averages,
        own=own,
        leaves=run.micro_batches(sharers.rank),
        num_replicas=local.num_replicas,
        sums=local.sums,
    )
