"""Connects a learner: makes its reducers, and what runs its steps."""

from collections.abc import Sequence
from contextlib import ExitStack, closing

from firecaffe.cluster.group import Group
from firecaffe.cluster.groups import group_of_one
from firecaffe.data import Data
from firecaffe.data.batches import BatchesAhead
from firecaffe.exchange.choose import AUTO
from firecaffe.gradients.bucket_sums import Hook
from firecaffe.gradients.buckets import cut
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.synchrony.log import LogReader
from firecaffe.training.data_workers import data_workers
from firecaffe.training.learner import Learner
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.modes.mode import Linked, ModeParts, Steps, Summed
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.plugins import Plugin, around_batches
from firecaffe.transport.auto_exchange import AutoChoice, choose_exchange
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import LocalRanks, meet_local_ranks


def connect(
    run: Run,
    learner: Learner,
    summed: Sequence[Summed],
    world: Group,
    hook: tuple[object, Hook] | None,
    resources: ExitStack,
) -> tuple[Run, list[GradientReducer], AutoChoice | None]:
    """Make one reducer for each of `summed`. All ranks call it. Raises: PeerLostError.

    Returns also the run as these ranks can do it, and `auto`'s choice if the recipe asks for it.
    """
    config = run.recipe.exchange
    local: LocalRanks | None = None
    if run.route.shares_memory:
        local = meet_local_ranks(world, config.timeout_s)
    if local is None:
        run = run.without_shared_memory()
    else:
        resources.callback(local.close)  # also if there is no exchange yet that closes it
    named, order_of = learner.holding.named, learner.probe.order_of
    orders = [order_of(named, part.named) for part in summed]
    choice = None
    if run.algorithm == AUTO and run.has_exchange:
        buckets = list[int]()
        for part, order in zip(summed, orders, strict=True):
            tensors = list(part.named.values())
            sizes = [tensors[place].nbytes for place in order]
            buckets += [sum(sizes[start:stop]) for start, stop in cut(sizes, config.bucket_bytes)]
        choice = choose_exchange(world, buckets, run.route)
        run = run.by(choice.algorithm)
    if hook is not None and world.group is None:
        resources.enter_context(group_of_one(world.device))
    exchange = resources.enter_context(closing(Exchange(world, run.route, local)))
    made = run.num_leaves, exchange, config.bucket_bytes, hook, learner.update.shards
    reducers = [
        resources.enter_context(GradientReducer(part.named, order, part.tail, part.counts, *made))
        for part, order in zip(summed, orders, strict=True)
    ]
    for place, reducer in enumerate(reducers):
        if reducer.coded is not None:
            name = "compressor" if len(reducers) == 1 else f"compressor-{place}"
            learner.state.add(name, learner.holding.memory(reducer.coded.memory))
    learner.state.check_all_was_loaded()
    return run, reducers, choice


def make_steps(
    run: Run,
    learner: Learner,
    mesh: Mesh,
    data: Data,
    reducers: Sequence[GradientReducer],
    plugins: Sequence[Plugin],
    first_step: int,
    is_repeatable: bool,
    resources: ExitStack,
    source: LogReader | None = None,
) -> Steps:
    """Build the steps; every rank calls it. first_step: the step to resume from.

    reducers: for what the mode wants summed. is_repeatable: of the training data; if they prove not
    to be, the learner gets doubts. source: a log of a server's events, in place of its clock.
    """
    holding, mode = learner.holding, learner.mode
    first = mode.first_run(run, first_step)
    leaves = first.micro_batches(mesh.sharers.rank)
    fetched = leaves if holding.has_inputs else []
    late_doubts = learner.doubts if is_repeatable else None
    last = mode.last_ahead(run)
    ahead = BatchesAhead(learner.batches, fetched, first_step, last, late_doubts)
    resources.enter_context(closing(ahead))
    resources.enter_context(data_workers(data))  # closed first, so that nobody waits for them
    sums = reducers[0]
    if first is not run:  # steps of another mode come first
        of_step = ModeParts(learner.update).summed()
        _, [sums], _ = connect(first, learner, of_step, mesh.sharers, None, resources)
    update = learner.update.connect(sums)
    in_order = around_batches(plugins, ahead, mesh.world)
    return mode.steps(
        Linked(
            run=run,
            mesh=mesh,
            step=EveryStep(holding, update, in_order, leaves, run.momentum, learner.noise.is_due),
            reducers=reducers,
            ahead=ahead,
            batches=around_batches(plugins, learner.batches, mesh.world),
            state=learner.state,
            probe=learner.probe.digest,
            resources=resources,
            source=source,
        )
    )
